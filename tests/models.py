"""Tiny language models with LoRA adapters, how they are trained, and exact comparisons."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trae_mem
from trae_mem.runtime import find_runtime

UNITS = 7
VOCABULARY = 61
SLOW_LINK = 1_000_000  # bytes/s: a unit of these models takes longer than compute ever does


def _llama(**changes) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    settings = {**sizes, "num_key_value_heads": 2, "num_hidden_layers": UNITS, **changes}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **settings)
    return transformers.LlamaForCausalLM(config)


def _gpt2(**changes) -> nn.Module:
    settings = {"n_embd": 32, "n_head": 4, "n_layer": UNITS, **changes}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, **{**dropout, **settings}
    )
    return transformers.GPT2LMHeadModel(config)


def _bert(**changes) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = {**sizes, **dropout, "num_hidden_layers": UNITS, **changes}
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **settings)
    return transformers.BertForMaskedLM(config)


_BUILDERS = {"llama": _llama, "gpt2": _gpt2, "bert": _bert}
_ADAPTED = {
    "llama": ["v_proj", "down_proj"],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "bert": ["query", "output.dense"],
}
FAMILIES = tuple(_BUILDERS)


def build(family: str = "llama", *, seed: int = 0, **changes) -> nn.Module:
    """The model without adapters, frozen; the same for the same seed."""
    torch.manual_seed(seed)
    return _BUILDERS[family](**changes).requires_grad_(False)


def add_lora(model: nn.Module, family: str = "llama", *, seed: int = 1, **changes) -> nn.Module:
    """PEFT's wrapper, with adapters that are not zero, so that each gradient is not either."""
    torch.manual_seed(seed)
    settings = {"r": 2, "target_modules": _ADAPTED[family], "init_lora_weights": False, **changes}
    if family == "gpt2":
        settings["fan_in_fan_out"] = True
    return peft.get_peft_model(model, peft.LoraConfig(**settings))


def build_lora(family: str = "llama", **changes) -> nn.Module:
    return copy.deepcopy(_prototype(family, **changes))  # quicker than wrapping each layer anew


@functools.cache
def _prototype(family: str, **changes) -> nn.Module:
    return add_lora(build(family, **changes), family)


def write_checkpoint(family: str, folder: Path, **changes) -> Path:
    """A folder with the safetensors of ``build(family)``."""
    build(family, **changes).save_pretrained(folder)
    return folder


def blocks(model: nn.Module) -> nn.ModuleList:
    """The list of a model's repeated blocks."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == UNITS]
    return lists[0]


def batch(number: int = 0, *, rows: int = 2, length: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator("cpu").manual_seed(1000 + number)
    ids = torch.randint(VOCABULARY, (rows, length), generator=generator, device="cpu")
    ids = ids.to(torch.get_default_device())
    return {"input_ids": ids, "labels": ids.clone()}


# --- training ------------------------------------------------------------------------------------


@dataclass
class Trace:
    """What a training left behind, everything that must be equal bit for bit."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # one dict a step
    trained: dict[str, Tensor] = field(default_factory=dict)


def use_checkpointing(model: nn.Module, mode: str) -> None:
    """``mode``: "none", "non-reentrant" or "reentrant"."""
    if mode == "none":
        return
    model.gradient_checkpointing_enable({"use_reentrant": mode == "reentrant"})
    model.enable_input_require_grads()  # reentrant checkpoints need it


def computes_on(model: nn.Module) -> torch.device:
    """Where the model's inputs must be: its first parameter may rest on the host."""
    runtime = find_runtime(model)
    return next(model.parameters()).device if runtime is None else runtime.target.device


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of them on the host, so that results of all devices compare."""
    return {n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None}


def backward_step(model: nn.Module, number: int = 0) -> Tensor:
    """One forward and backward; the loss, detached, on the host."""
    inputs = {name: tensor.to(computes_on(model)) for name, tensor in batch(number).items()}
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach().cpu()


def train(
    model: nn.Module,
    steps: int = 3,
    *,
    micro_steps: int = 1,
    after_step: Callable[[int], None] = lambda step: None,
    **optimizer_options: bool,
) -> Trace:
    """AdamW over the trainable parameters; a micro-step is one forward and backward."""
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2, **optimizer_options)
    trace = Trace()
    for step in range(steps):
        for micro_step in range(micro_steps):
            trace.losses.append(backward_step(model, step * micro_steps + micro_step))
        trace.gradients.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        after_step(step)
    named = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
    trace.trained = {n: p.detach().cpu().clone() for n, p in named}
    return trace


@torch.no_grad()
def logits(model: nn.Module, number: int = 0) -> Tensor:
    """The model's output in evaluation mode, its mode being as before afterwards."""
    training = model.training
    model.eval()
    try:
        return model(input_ids=batch(number)["input_ids"].to(computes_on(model))).logits.cpu()
    finally:
        model.train(training)


@functools.cache
def reference(checkpointing: str = "none") -> tuple[dict[str, Tensor], Tensor, Trace]:
    """The resident ``build_lora()``: its weights, its logits, two steps of its training."""
    model = build_lora()
    use_checkpointing(model, checkpointing)
    return state_of(model), logits(model), train(model, 2)


def assert_unharmed(model: nn.Module, checkpointing: str = "none") -> None:
    """The model is what ``build_lora()`` made, computes and learns the same."""
    model.zero_grad()
    state, output, trace = reference(checkpointing)
    assert_same(state_of(model), state)
    assert same_bits(logits(model), output)
    assert_same_trace(train(model, 2), trace)


def assert_untouched(model: nn.Module) -> None:
    """``build_lora()`` does not stream, and is what it was."""
    assert find_runtime(model) is None
    assert_unharmed(copy.deepcopy(model))


def assert_still_streams(model: nn.Module, checkpointing: str = "none") -> None:
    """``build_lora()`` streams, and is what it was."""
    status = trae_mem.status(model)
    assert status.streamed_units + status.resident_units == status.units == UNITS
    assert_unharmed(model, checkpointing)
    find_runtime(model).streamer.check_invariants()


# --- a stack of blocks of any kind ---------------------------------------------------------------

WIDTH = 16


class Block(nn.Module):
    """A residual block: a frozen scale, a frozen layer, a trainable gate."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.gate = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(torch.tanh(x * self.scale)) * self.gate


class Stack(nn.Module):
    """``UNITS`` blocks, one behind the other, between a frozen inlet and a frozen outlet."""

    def __init__(self, block: Callable[[], nn.Module] = Block, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inlet = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList([block() for _ in range(UNITS)])
        self.outlet = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


class GroupedStack(Stack):
    """Checkpoints groups of blocks, not single ones."""

    def __init__(self, group: int, use_reentrant: bool) -> None:
        super().__init__()
        self.group, self.use_reentrant = group, use_reentrant

    def forward(self, x):
        x = self.inlet(x).requires_grad_()
        for start in range(0, UNITS, self.group):
            part = nn.Sequential(*self.blocks[start : start + self.group])
            x = checkpoint(part, x, use_reentrant=self.use_reentrant)
        return self.outlet(x)


def numbers(seed: int = 0, *shape: int) -> Tensor:
    """Input for a ``Stack``."""
    generator = torch.Generator("cpu").manual_seed(seed)
    made = torch.randn(shape or (3, 5, WIDTH), generator=generator, device="cpu")
    return made.to(torch.get_default_device())


def stack_step(model: nn.Module, seed: int = 0) -> list[Tensor]:
    """One forward and backward; the loss and all gradients, which are then cleared."""
    loss = model(numbers(seed).to(computes_on(model))).square().mean()
    loss.backward()
    return [loss.detach().cpu(), *take_gradients(model).values()]


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = gradients(model)
    model.zero_grad()
    assert found, "no gradients were made"
    return found


def assert_same_tensors(actual: list[Tensor], expected: list[Tensor]) -> None:
    for number, pair in enumerate(zip(actual, expected, strict=True)):
        assert torch.isfinite(pair[1]).all()
        assert same_bits(*pair), f"tensor {number} of {len(expected)} differs"


# --- exact comparisons ---------------------------------------------------------------------------


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equal form and equal bytes; NaNs of the same bits are equal, 0 and -0 are not."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    first, second = (
        t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (first, second)
    )
    return torch.equal(first, second)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str = "") -> None:
    assert actual.keys() == expected.keys(), what
    different = [name for name in expected if not same_bits(actual[name], expected[name])]
    assert not different, f"{what}: {len(different)} of {len(expected)} differ: {different[:4]}"


def assert_same_trace(actual: Trace, expected: Trace) -> None:
    assert all(torch.isfinite(loss) for loss in expected.losses)
    for step, pair in enumerate(zip(actual.losses, expected.losses, strict=True)):
        assert same_bits(*pair), f"loss {step}: {pair[0].item()!r}, not {pair[1].item()!r}"
    for step, pair in enumerate(zip(actual.gradients, expected.gradients, strict=True)):
        assert pair[1], f"step {step} made no gradients"
        assert_same(*pair, f"gradients of step {step}")
    assert_same(actual.trained, expected.trained, "trained parameters")


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer, persistent or not, on the host."""
    return {n: t.detach().cpu().clone() for n, t in named_tensors(model)}


def named_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def hook_count(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@contextlib.contextmanager
def hooked(register: Callable[..., object], function: Callable[..., object]):
    """A hook that is there for a ``with`` block."""
    handle = register(function)
    try:
        yield
    finally:
        handle.remove()


def assert_same_training(make: Callable[[], nn.Module], debug: str | None, **options) -> nn.Module:
    """Trains ``make()`` with and without streaming; returns the one that streamed.

    Nothing is loaded ahead: what is poisoned stays so until its unit is acquired.
    """
    resident, model = make(), trae_mem.enable(make(), prefetch=0, debug=debug, **options)
    for seed in range(3):
        assert_same_tensors(stack_step(model, seed), stack_step(resident, seed))
    trae_mem.disable(model)
    assert_same(state_of(model), state_of(resident))
    return model
