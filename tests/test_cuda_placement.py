"""With a GPU: what is where while a model streams, and where everything is afterwards."""

from __future__ import annotations

import peft
import pytest
import torch
from models import (
    UNITS,
    Block,
    Stack,
    add_lora,
    assert_same,
    assert_same_trace,
    blocks,
    build,
    build_lora,
    logits,
    stack_step,
    state_of,
    train,
)
from sim_support import let_go

import trae_mem
from trae_mem.runtime import find_runtime

pytestmark = pytest.mark.sim(gpu="A10", memory="1GiB", devices=2, poison=True)


def devices_of(model) -> dict[str, str]:
    """The device of each parameter and buffer, by name."""
    return {n: str(t.device) for n, t in (*model.named_parameters(), *model.named_buffers())}


def streamed_names(model) -> set[str]:
    return {t.name for pack in find_runtime(model).packs for t in pack.tensors}


def test_a_gpu_is_the_default_where_there_is_one():
    model = trae_mem.enable(build_lora())
    assert trae_mem.status(model).device == "A10"
    assert find_runtime(model).target.device == torch.device("cuda", 0)


def test_streamed_weights_rest_in_pinned_host_memory_and_everything_else_is_on_the_gpu():
    model = trae_mem.enable(build_lora(), source="ram")
    streamed = streamed_names(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in streamed:
            assert tensor.device.type == "cpu"
            assert tensor.is_pinned(), name
        else:
            assert str(tensor.device) == "cuda:0", name
    assert any("lora" in name for name in devices_of(model).keys() - streamed)


def test_a_block_sees_its_weights_on_the_gpu_while_it_runs():
    seen = []
    model = trae_mem.enable(Stack())
    hook = model.blocks[3].layer.register_forward_pre_hook(
        lambda layer, args: seen.append(str(layer.weight.device))
    )
    stack_step(model)
    hook.remove()
    assert seen == ["cuda:0"]
    assert model.blocks[3].layer.weight.device.type == "cpu"


@pytest.mark.parametrize("home", ["cpu", "cuda:0", "cuda:1"])
def test_disable_puts_every_tensor_back_to_where_it_was(home):
    resident = build_lora().to(home)
    before = state_of(resident)
    model = trae_mem.enable(build_lora().to(home), device="cuda:1")
    assert devices_of(model)["base_model.model.lm_head.weight"] == "cuda:1"
    assert_same(state_of(model), before)
    trace = train(model, 1)
    trae_mem.disable(model)
    assert devices_of(model) == devices_of(resident)
    assert_same_trace(train(resident, 1), trace)
    assert_same(state_of(model), state_of(resident))


def test_gradients_go_with_their_parameters():
    model = trae_mem.enable(Stack())
    model(torch.randn(2, 3, 16, device="cuda")).sum().backward()
    trae_mem.disable(model)
    gate = model.blocks[0].gate
    assert gate.device == gate.grad.device == torch.device("cpu")
    trae_mem.enable(model)
    assert gate.device == gate.grad.device == torch.device("cuda", 0)


def test_the_gpu_that_holds_the_model_is_taken():
    model = trae_mem.enable(build_lora().to("cuda:1"))
    assert find_runtime(model).target.device == torch.device("cuda", 1)
    expected = train(build_lora(), 2)
    assert_same_trace(train(model, 2), expected)


def test_two_models_stream_to_two_gpus():
    expected = train(build_lora(), 2)
    models = [trae_mem.enable(build_lora(), device=f"cuda:{index}") for index in (0, 1)]
    for model in models:
        assert_same_trace(train(model, 2), expected)
    assert torch.cuda.current_device() == 0


def test_adapters_that_are_added_while_the_model_streams_come_to_the_gpu():
    plain = build()
    trae_mem.enable(plain)
    logits(plain)
    model = add_lora(plain)
    expected = train(add_lora(build()), 2)
    assert_same_trace(train(model, 2), expected)
    assert str(
        devices_of(model)["base_model.model.model.layers.0.mlp.down_proj.lora_A.default.weight"]
    ) == ("cuda:0")


def test_a_head_that_is_replaced_while_the_model_streams_comes_to_the_gpu():
    model = trae_mem.enable(Stack())
    stack_step(model)
    torch.manual_seed(9)
    model.outlet = torch.nn.Linear(16, 16)
    stack_step(model)
    assert str(model.outlet.weight.device) == "cuda:0"


@pytest.mark.parametrize("source", ["ram", "file"])
def test_a_model_that_is_moved_to_the_gpu_while_it_streams_goes_on_as_before(source, checkpoints):
    expected = train(build_lora(), 2)
    where = str(checkpoints["llama"]) if source == "file" else "ram"
    model = trae_mem.enable(build_lora(), source=where)
    model.to("cuda")
    assert_same_trace(train(model, 2), expected)
    weight = blocks(model)[3].self_attn.q_proj.weight
    assert weight.device.type == "cpu"


@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_a_gpu_without_room_for_the_slots_leaves_the_model_as_it_was(home):
    model = build_lora().to(home)
    before, where = state_of(model), devices_of(model)
    free, _ = torch.cuda.mem_get_info(0)
    hog = [torch.empty(free // 2 - (8 << 20), dtype=torch.uint8, device="cuda:0") for _ in (0, 1)]
    tight = torch.empty(
        max(torch.cuda.mem_get_info(0)[0] - (1 << 20), 1), dtype=torch.uint8, device="cuda:0"
    )
    with pytest.raises(torch.OutOfMemoryError):
        trae_mem.enable(model, device="cuda:0")
    del hog, tight
    torch.cuda.empty_cache()
    assert devices_of(model) == where
    assert_same(state_of(model), before)
    assert_same_trace(train(trae_mem.enable(model, device="cuda:0"), 1), train(build_lora(), 1))


def test_saved_and_merged_weights_have_the_right_values(tmp_path):
    """Merging adds an adapter to a weight, so both must be in one place: after `disable`."""
    resident = build_lora()
    model = trae_mem.enable(build_lora())
    train(model, 1)
    train(resident, 1)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(build(), tmp_path)
    adapters = {n: t for n, t in state_of(resident).items() if "lora" in n}
    assert_same({n: t for n, t in state_of(again).items() if "lora" in n}, adapters)
    merged = trae_mem.disable(model).merge_and_unload()
    expected = resident.merge_and_unload()
    assert_same(state_of(merged), state_of(expected))


def test_nothing_of_the_engine_is_left_on_the_gpu_or_pinned_afterwards():
    from trae_mem.sim import control

    model = trae_mem.enable(build_lora())
    train(model, 1)
    held = [facts for name, facts in control.live().items() if "_native" in name]
    assert sum(facts["mapped_bytes"] for facts in held) > 0
    trae_mem.disable(model)
    del model
    let_go()
    held = [facts for name, facts in control.live().items() if "_native" in name]
    assert all(not any(facts.values()) for facts in held), held


def test_pinned_bytes_are_the_bytes_of_the_weights():
    from trae_mem.sim import control

    before = sum(f["pinned_bytes"] for n, f in control.live().items() if "_native" in n)
    model = trae_mem.enable(build_lora(), source="ram")
    after = sum(f["pinned_bytes"] for n, f in control.live().items() if "_native" in n)
    packs = [pack.bytes for pack in find_runtime(model).packs]
    assert len(packs) == UNITS
    assert after - before == sum(packs)


@pytest.mark.parametrize("wanted", ["cuda:2", "cuda:-1", "gpu", "xpu"])
def test_a_device_that_is_not_there(wanted):
    model = build_lora()
    with pytest.raises(trae_mem.ConfigError, match="device="):
        trae_mem.enable(model, device=wanted)
    assert_same(state_of(model), state_of(build_lora()))


def test_a_weight_that_is_made_trainable_while_it_streams_is_refused_by_name():
    model = trae_mem.enable(Stack())
    weight = model.blocks[3].layer.weight.requires_grad_()
    with pytest.raises(trae_mem.TraeMemError, match=r"'blocks.3.layer.weight' was made trainable"):
        stack_step(model)
    trae_mem.enable(trae_mem.disable(model))
    stack_step(model)
    assert str(weight.device) == "cuda:0"


def test_a_block_that_is_replaced_while_the_model_streams_comes_to_the_gpu():
    model = trae_mem.enable(Stack())
    stack_step(model)
    model.blocks[3] = Block()
    stack_step(model)
    assert str(model.blocks[3].gate.device) == "cuda:0"


def test_a_disable_that_fails_still_puts_every_tensor_back():
    from trae_mem.sim import control

    model = trae_mem.enable(Stack())
    stack_step(model)
    control.fail("cuStreamSynchronize", caller="_native")
    try:
        with pytest.raises(trae_mem.TransferError, match="cuStreamSynchronize"):
            trae_mem.disable(model)
    finally:
        control.clear_faults()
    assert set(devices_of(model).values()) == {"cpu"}
    assert_same(state_of(model), state_of(Stack()))
