"""Training on the simulated GPU gives the bits that it gives on the CPU."""

from __future__ import annotations

import pytest
import torch
from models import (
    assert_same,
    assert_same_trace,
    batch,
    build_lora,
    gradients,
    same_bits,
    use_checkpointing,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from trae_mem.sim import control

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True)
def math_attention():
    """The CPU would choose its own flash attention, which rounds differently."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def trained(device, *, family="llama", mode="none", dtype=None, amp=None, **options):
    """Three steps with gradient clipping; everything that must be equal."""
    from models import Trace

    model = build_lora(family)
    use_checkpointing(model, mode)
    model.to(device=device, dtype=dtype)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, 1e-2, **options)
    trace = Trace()
    for step in range(3):
        inputs = {name: value.to(device) for name, value in batch(step).items()}
        with torch.autocast(device, dtype=amp, enabled=amp is not None):
            loss = model(**inputs).loss
        loss.backward()
        trace.losses.append(loss.detach().cpu())
        trace.gradients.append({n: g.cpu() for n, g in gradients(model).items()})
        nn.utils.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    named = model.named_parameters()
    trace.trained = {n: p.detach().cpu() for n, p in named if p.requires_grad}
    return trace


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_lora_training_is_that_of_the_cpu(family, dtype):
    options = {"family": family, "dtype": dtype}
    assert_same_trace(trained("cuda", **options), trained("cpu", **options))


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_so_it_is_with_checkpointing(mode):
    assert_same_trace(trained("cuda", mode=mode), trained("cpu", mode=mode))


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_so_it_is_with_fused_and_foreach_optimizers(kind):
    assert_same_trace(trained("cuda", **{kind: True}), trained("cpu", **{kind: True}))


def test_so_it_is_with_autocast():
    amp = torch.bfloat16
    assert_same_trace(trained("cuda", amp=amp), trained("cpu", amp=amp))


@pytest.mark.parametrize("seed", range(3))
def test_so_it_is_with_delays_and_poison(seed):
    expected = trained("cpu")
    control.set_adversary(seed=seed, delay_us=100, poison=True)
    try:
        assert_same_trace(trained("cuda"), expected)
    finally:
        control.set_adversary()


def test_training_does_not_wait_for_the_device():
    model = build_lora().to("cuda")
    inputs = {name: value.to("cuda") for name, value in batch().items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    for _ in range(2):  # in the first one the optimizer makes its state
        control.reset_calls()
        model(**inputs).loss.backward()
        optimizer.step()
        blocking = control.blocking_calls()
    assert blocking == {}


# --- dropout and recomputation -------------------------------------------------------------------


def stack_gradients(use_reentrant):
    torch.manual_seed(7)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3)) for _ in range(4))
    layers.to("cuda")
    x = torch.linspace(-1, 1, 48, device="cuda").view(3, 16).requires_grad_()
    for layer in layers:
        x = layer(x) if use_reentrant is None else checkpoint(layer, x, use_reentrant=use_reentrant)
    x.square().mean().backward()
    return {name: p.grad.cpu() for name, p in layers.named_parameters()}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_draws_the_same_dropout(use_reentrant):
    assert_same(stack_gradients(use_reentrant), stack_gradients(None))


# --- scaled losses -------------------------------------------------------------------------------


def test_a_gradient_scaler_skips_steps_that_overflow():
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.SGD([weight], 0.5)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    for factor, expected in ((1.0, 0.5), (float("inf"), 0.5), (1.0, 0.0)):
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert weight.tolist() == [expected] * 4
    assert scaler.get_scale() == 4.0


# --- compiled ------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def block_step(device, backend):
    torch.manual_seed(3)
    block = Block().to(device)
    run = block if backend is None else torch.compile(block, backend=backend, fullgraph=True)
    run(torch.linspace(-1, 1, 16, device=device).view(2, 8)).square().sum().backward()
    return {name: p.grad.cpu() for name, p in block.named_parameters()}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_block(backend):
    torch.compiler.reset()
    assert_same(block_step("cuda", backend), block_step("cpu", None))


def test_attention_with_a_mask_and_grouped_heads():
    def run(device):
        shapes = ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))
        q, k, v = (
            torch.linspace(-2, 2, s.numel(), device=device).view(s).sin().requires_grad_()
            for s in map(torch.Size, shapes)
        )
        mask = torch.ones(6, 6, dtype=torch.bool, device=device).tril()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        out.square().sum().backward()
        return [out.detach(), q.grad, k.grad, v.grad]

    for there, here in zip(run("cuda"), run("cpu"), strict=True):
        assert same_bits(there.cpu(), here)


def test_attention_chooses_a_path_that_runs_here():
    x = torch.ones(1, 2, 3, 4, device="cuda", dtype=torch.float16)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        assert F.scaled_dot_product_attention(x, x, x).sum().item() == 24
