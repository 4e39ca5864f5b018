"""Ways of training and evaluating that differ from one forward, one backward, one step."""

from __future__ import annotations

import pytest
import torch
from models import (
    UNITS,
    GroupedStack,
    Stack,
    add_lora,
    assert_same_tensors,
    assert_same_trace,
    backward_step,
    batch,
    blocks,
    build,
    build_lora,
    logits,
    numbers,
    same_bits,
    stack_step,
    take_gradients,
    train,
    use_checkpointing,
)

import trae_mem


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("group", [1, 2, 3, 5, UNITS])
def test_checkpoints_over_groups_of_blocks(group, use_reentrant, debug):
    resident = GroupedStack(group, use_reentrant)
    model = trae_mem.enable(GroupedStack(group, use_reentrant), prefetch=1, debug=debug)
    assert trae_mem.status(model).slots == 3
    for seed in range(3):
        assert_same_tensors(stack_step(model, seed), stack_step(resident, seed))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_block_is_used_once_in_backward(use_reentrant):
    """Its recomputation and its backward are one use, in which it is never given back."""
    model = trae_mem.enable(GroupedStack(1, use_reentrant))
    for seed in range(3):
        stack_step(model, seed)
        status = trae_mem.status(model)
        assert status.acquires == (seed + 1) * 2 * UNITS
        assert status.loads == UNITS + (UNITS - 4) + seed * 2 * (UNITS - 4)


def test_a_checkpointed_group_that_fits_its_slots_is_loaded_once_in_backward():
    model = trae_mem.enable(GroupedStack(UNITS, False), slots=UNITS)
    stack_step(model)
    assert trae_mem.status(model).loads == UNITS


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant", "reentrant"])
def test_gradient_accumulation(checkpointing, debug):
    traces = []
    for streams in (False, True):
        model = build_lora()
        use_checkpointing(model, checkpointing)
        if streams:
            trae_mem.enable(model, debug=debug)
        traces.append(train(model, 2, micro_steps=3))
    assert_same_trace(traces[1], traces[0])
    if debug is None:
        first = UNITS + (UNITS - 4)
        assert trae_mem.status(model).loads == first + 5 * 2 * (UNITS - 4)


def test_evaluation_between_steps(debug):
    def train_and_evaluate(model):
        outputs = []
        return train(model, 3, after_step=lambda step: outputs.append(logits(model, step))), outputs

    trace, outputs = train_and_evaluate(build_lora())
    streamed_trace, streamed_outputs = train_and_evaluate(
        trae_mem.enable(build_lora(), debug=debug)
    )
    assert_same_trace(streamed_trace, trace)
    assert_same_tensors(streamed_outputs, outputs)


def test_evaluation_between_forward_and_backward(debug):
    results = []
    for streams in (False, True):
        model = build_lora()
        if streams:
            trae_mem.enable(model, debug=debug)
        loss = model(**batch()).loss
        evaluated = logits(model, 1)
        loss.backward()
        results.append([loss.detach(), evaluated, *take_gradients(model).values()])
    assert_same_tensors(results[1], results[0])


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant", "reentrant"])
def test_two_forwards_before_one_backward(checkpointing, debug):
    results = []
    for streams in (False, True):
        model = build_lora()
        use_checkpointing(model, checkpointing)
        model.train()
        if streams:
            trae_mem.enable(model, debug=debug)
        loss = model(**batch(0)).loss + 2 * model(**batch(1)).loss
        loss.backward()
        results.append([loss.detach(), *take_gradients(model).values()])
    assert_same_tensors(results[1], results[0])


def test_backwards_in_the_order_of_their_forwards(debug):
    results = []
    for streams in (False, True):
        model = build_lora()
        if streams:
            trae_mem.enable(model, debug=debug)
        first, second = model(**batch(0)).loss, model(**batch(1)).loss
        first.backward()
        second.backward()
        results.append(list(take_gradients(model).values()))
    assert_same_tensors(results[1], results[0])


def test_a_retained_graph_goes_backward_twice(debug):
    results = []
    for streams in (False, True):
        model = build_lora()
        if streams:
            trae_mem.enable(model, debug=debug)
        loss = model(**batch()).loss
        loss.backward(retain_graph=True)
        once = list(take_gradients(model).values())
        loss.backward()
        results.append([*once, *take_gradients(model).values()])
    assert_same_tensors(results[1], results[0])


def test_gradients_of_chosen_inputs(debug):
    results = []
    for streams in (False, True):
        model = Stack()
        if streams:
            trae_mem.enable(model, debug=debug)
        x = numbers().requires_grad_()
        wanted = [x, model.blocks[2].gate]
        results.append(torch.autograd.grad(model(x).square().mean(), wanted))
    assert_same_tensors(results[1], results[0])


@pytest.mark.parametrize("order", [[0, 0, 1, 2], [3, 1, 5, 0], [6, 5, 4, 3, 2, 1, 0], [4, 4, 4]])
def test_blocks_called_in_any_order_and_more_than_once(order, debug):
    results = []
    for streams in (False, True):
        model = Stack()
        if streams:
            trae_mem.enable(model, prefetch=0, debug=debug)
        tensors = []
        for seed in range(2):
            x = model.inlet(numbers(seed))
            for index in order:
                x = model.blocks[index](x)
            x.square().mean().backward()
            tensors += [x.detach(), *take_gradients(model).values()]
        results.append(tensors)
    assert_same_tensors(results[1], results[0])


def test_first_blocks_without_anything_to_train(debug):
    """No gradient reaches them, and their outputs need none."""
    results = []
    for streams in (False, True):
        model = add_lora(build(), layers_to_transform=[4, 5, 6])
        if streams:
            trae_mem.enable(model, debug=debug)
        results.append(train(model))
    assert_same_trace(results[1], results[0])


def test_a_first_block_whose_input_needs_no_gradient(debug):
    """Its backward hook would fire before its parameters' gradients exist."""
    results = []
    for streams in (False, True):
        model = add_lora(build(), layers_to_transform=[0])
        if streams:
            trae_mem.enable(model, debug=debug)
        results.append(train(model))
    assert_same_trace(results[1], results[0])


def test_a_fully_frozen_model_passes_gradients_to_its_input(debug):
    results = []
    for streams in (False, True):
        model = build()
        if streams:
            trae_mem.enable(model, debug=debug)
        x = numbers(0, 2, 9, 32).requires_grad_()
        model(inputs_embeds=x).logits.square().mean().backward()
        results.append([x.grad])
    assert_same_tensors(results[1], results[0])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference(context, debug):
    resident, model = build_lora(), trae_mem.enable(build_lora(), debug=debug)
    for number in range(3):
        with context():
            outputs = [m(**batch(number)).logits.clone() for m in (model, resident)]
        assert same_bits(*outputs)


def test_training_after_inference_mode():
    resident, model = build_lora(), trae_mem.enable(build_lora())
    with torch.inference_mode():
        model(**batch())
    assert_same_trace(train(model, 2), train(resident, 2))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generation(family, debug):
    resident, model = build_lora(family), trae_mem.enable(build_lora(family), debug=debug)
    prompt = batch()["input_ids"]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(prompt)
    texts = [
        m.eval().generate(input_ids=prompt, attention_mask=mask, **options)
        for m in (model, resident)
    ]
    assert torch.equal(*texts)
    assert_same_trace(train(model, 2), train(resident, 2))


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant", "reentrant"])
def test_dropout_draws_the_same_numbers(checkpointing, debug):
    results = []
    for streams in (False, True):
        model = build_lora("gpt2", resid_pdrop=0.3, attn_pdrop=0.3)
        use_checkpointing(model, checkpointing)
        if streams:
            trae_mem.enable(model, debug=debug)
        torch.manual_seed(7)
        results.append(train(model, 2))
    assert_same_trace(results[1], results[0])


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant", "reentrant"])
def test_automatic_mixed_precision(checkpointing, debug):
    results = []
    for streams in (False, True):
        model = build_lora()
        use_checkpointing(model, checkpointing)
        if streams:
            trae_mem.enable(model, debug=debug)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(train(model, 2))
    assert_same_trace(results[1], results[0])


def test_half_precision_weights(debug):
    results = []
    for streams in (False, True):
        model = add_lora(build().to(torch.bfloat16))
        if streams:
            trae_mem.enable(model, debug=debug)
        results.append(train(model))
    assert_same_trace(results[1], results[0])


@pytest.mark.parametrize("kept", [0, 1, 3, UNITS])
def test_any_number_of_units_may_stay_on_the_device(kept, debug):
    resident, model = build_lora(), build_lora()
    trae_mem.enable(model)
    slot = -(-trae_mem.status(model).unit_bytes // 256) * 256
    trae_mem.disable(model)
    budget = (kept + min(3, UNITS - kept)) * slot
    trae_mem.enable(model, budget=budget, prefetch=1, debug=debug)
    assert trae_mem.status(model).resident_units == kept
    assert_same_trace(train(model, 2), train(resident, 2))


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_gradients_through_a_cache_of_keys_and_values(debug):
    """The loss of a second forward reaches the first one's blocks, but not by their outputs."""
    results = []
    for streams in (False, True):
        model = build_lora()
        if streams:
            trae_mem.enable(model, prefetch=0, debug=debug)
        ids = batch()["input_ids"]
        first = model(input_ids=ids[:, :4], use_cache=True)
        second = model(input_ids=ids[:, 4:], past_key_values=first.past_key_values, use_cache=True)
        second.logits.square().mean().backward()
        results.append(list(take_gradients(model).values()))
    assert_same_tensors(results[1], results[0])


@pytest.mark.host_only(
    "PEFT adds an adapter only to a weight that is on the same device: merge after disable"
)
def test_forward_called_without_the_hooks_of_the_model(debug):
    """As wrappers do: only the blocks' own hooks run then."""
    resident, model = build_lora(), trae_mem.enable(build_lora(), debug=debug)
    for number in range(2):
        for each in (resident, model):
            each.zero_grad()
            each.forward(**batch(number)).loss.backward()
        assert_same_tensors(
            list(take_gradients(model).values()), list(take_gradients(resident).values())
        )
    for each in (resident, model):
        each.merge_adapter()
    outputs = [each.base_model.model.forward(**batch()).logits for each in (resident, model)]
    assert same_bits(*outputs)


def test_training_goes_on_after_it_was_enabled_in_the_middle(debug):
    results = []
    for streams in (False, True):
        model = build_lora()
        outputs = [backward_step(model, 0)]
        if streams:
            trae_mem.enable(model, debug=debug)
        outputs.append(backward_step(model, 1))
        if streams:
            trae_mem.disable(model)
        outputs.append(backward_step(model, 2))
        results.append([*outputs, *take_gradients(model).values()])
    assert_same_tensors(results[1], results[0])


@pytest.mark.host_only("refused on a GPU, see test_cuda_placement.py")
def test_a_weight_that_is_trained_after_all(debug):
    """Unfrozen while it streams: its gradient is made, and a step of the optimizer is seen."""
    results = []
    for streams in (False, True):
        model = build_lora()
        if streams:
            trae_mem.enable(model, debug=debug)
        blocks(model)[3].mlp.up_proj.weight.requires_grad_()
        results.append(train(model))
    assert_same_trace(results[1], results[0])
