"""Operators that are not PyTorch's own, and operators that have no CPU kernel."""

from __future__ import annotations

import pytest
import torch

from trae_mem.sim import control

pytestmark = pytest.mark.sim

CALLS = []


@torch.library.custom_op("trae_mem_test::scaled_tanh", mutates_args=(), device_types="cpu")
def scaled_tanh(x: torch.Tensor, scale: float) -> torch.Tensor:
    CALLS.append(x.device.type)
    return x.tanh() * scale


@scaled_tanh.register_fake
def _(x, scale):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(output)
    ctx.scale = inputs[1]


def _backward(ctx, gradient):
    (output,) = ctx.saved_tensors
    return gradient * (ctx.scale - output * output / ctx.scale), None


scaled_tanh.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("trae_mem_test::add_into", mutates_args=("x",), device_types="cpu")
def add_into(x: torch.Tensor, value: float) -> None:
    x.add_(value)


LIBRARY = torch.library.Library("trae_mem_test", "FRAGMENT")
LIBRARY.define("count_positive(Tensor x) -> int")
LIBRARY.impl("count_positive", lambda x: int((x > 0).sum()), "CPU")
LIBRARY.define("noisy(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
LIBRARY.impl("noisy", lambda x: x + torch.rand(x.shape), "CPU")
LIBRARY.define("nowhere(Tensor x) -> Tensor")


def test_an_operator_with_a_cpu_kernel_runs_on_the_gpus_memory():
    CALLS.clear()
    x = torch.linspace(-1, 1, 6, device="cuda", requires_grad=True)
    result = scaled_tanh(x * 1, 2.0)
    assert result.is_cuda
    assert torch.equal(result.detach().cpu(), x.detach().cpu().tanh() * 2)
    result.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), 2 * (1 - x.detach().cpu().tanh() ** 2))
    assert CALLS == ["cpu"]  # once: what it does on the side happens once


def test_it_may_write_its_argument():
    x = torch.zeros(3, device="cuda")
    add_into(x, 2.5)
    assert (x * 2).tolist() == [5, 5, 5]


def test_it_may_return_a_number():
    x = torch.tensor([1.0, -1.0, 2.0], device="cuda")
    assert torch.ops.trae_mem_test.count_positive(x * 3) == 2


def test_it_may_draw_random_numbers():
    x = torch.zeros(4, device="cuda")
    torch.cuda.manual_seed(5)
    first, second = (torch.ops.trae_mem_test.noisy(x).tolist() for _ in range(2))
    host = torch.get_rng_state()
    torch.cuda.manual_seed(5)
    assert torch.ops.trae_mem_test.noisy(x).tolist() == first != second
    assert torch.equal(torch.get_rng_state(), host)


def test_it_may_be_compiled():
    torch.compiler.reset()
    compiled = torch.compile(lambda x: scaled_tanh(x + 1, 2.0) * 3, backend="aot_eager")
    x = torch.linspace(-1, 1, 6, device="cuda")
    assert torch.equal(compiled(x).cpu(), (x.cpu() + 1).tanh() * 2 * 3)


def test_an_operator_without_any_kernel_is_named():
    with pytest.raises(NotImplementedError, match="trae_mem_test::nowhere has no CPU kernel"):
        torch.ops.trae_mem_test.nowhere(torch.ones(2, device="cuda"))


def test_an_operator_for_cuda_only_is_named():
    theta = torch.ones(1, 2, 3, device="cuda")
    with pytest.raises(NotImplementedError, match="cudnn_affine_grid_generator has no CPU kernel"):
        torch.cudnn_affine_grid_generator(theta, 1, 1, 2, 2)
    assert theta.sum().item() == 6


def test_a_sparse_result_is_refused():
    with pytest.raises(NotImplementedError, match="only plain strided tensors"):
        torch.eye(3, device="cuda").to_sparse()


@pytest.mark.sim(reports="ignore")
def test_a_kernel_that_is_launched_all_the_same_is_named():
    with pytest.raises(RuntimeError, match="not supported"):
        torch.cuda._sleep(100)
    (report,) = control.reports()
    assert report.kind == "kernel without a CPU implementation"
    assert "spin_kernel" in report.message
