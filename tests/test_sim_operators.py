"""Operators on the simulated GPU give the bits, and the strides, that they give on the CPU."""

from __future__ import annotations

import pytest
import torch
from models import same_bits
from sim_operators import CASES, numbers
from torch.nn import functional as F

pytestmark = pytest.mark.sim

# CUDA's recurrent layers are made of other operators than the CPU's, which round differently.
ROUNDED = {"recurrent"}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_gives_what_it_gives_on_the_cpu(name):
    expected, actual = CASES[name]("cpu"), CASES[name]("cuda")
    assert len(actual) == len(expected)
    for number, (there, here) in enumerate(zip(actual, expected, strict=True)):
        assert there.is_cuda
        if name in ROUNDED:
            torch.testing.assert_close(there.cpu(), here)
            continue
        assert same_bits(there.cpu(), here), f"result {number} differs"
        assert there.stride() == here.stride(), f"result {number} is laid out differently"


def test_views_share_their_memory():
    x = torch.zeros(4, 6, device="cuda")
    x.view(24)[5] = 1
    x.t()[1, 2] = 2
    assert x.sum().item() == 3
    assert x.view(24).data_ptr() == x.data_ptr()


def test_results_live_in_device_memory():
    before = torch.cuda.memory_allocated()
    x = torch.ones(1 << 18, device="cuda") + 1
    assert torch.cuda.memory_allocated() - before == x.nbytes


def test_tensors_on_different_devices_are_refused():
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="two devices"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="two devices"):
        F.linear(x, torch.ones(2, 3))
    assert (x + torch.tensor(1)).tolist() == [2, 2, 2]  # numbers may come from the host


def test_wrong_arguments_raise_at_the_call():
    x = torch.ones(3, 4, device="cuda")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        x @ x
    with pytest.raises(RuntimeError, match="positive-definite"):
        torch.linalg.cholesky(-torch.eye(3, device="cuda"))
    assert x.sum().item() == 12


def test_writing_over_what_is_read_raises_at_the_call():
    x = torch.arange(6.0, device="cuda")
    x[:3].add_(x[3:])  # beside each other they may lie in the same storage
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        x[:3].add_(x[1:4])
    assert x.tolist() == [3, 5, 7, 3, 4, 5]


def test_tensors_can_be_resized_and_get_other_storage():
    x = torch.arange(6.0, device="cuda")
    x.resize_(2, 4)
    assert x.flatten()[:6].tolist() == [0, 1, 2, 3, 4, 5]
    y = torch.empty(0, device="cuda").set_(x.untyped_storage(), 1, (3,))
    assert y.tolist() == [1, 2, 3]
    assert y.data_ptr() == x.data_ptr() + 4


def test_a_result_may_be_printed():
    assert "1." in repr(torch.ones(2, device="cuda"))


@pytest.mark.sim(reports="ignore")
def test_an_error_that_only_the_values_show_stops_the_device_and_names_the_operator():
    from trae_mem.sim import control

    table, ids = torch.ones(3, 2, device="cuda"), torch.tensor([1, 7], device="cuda")
    table.index_select(0, ids)
    with pytest.raises(RuntimeError, match="device-side assert"):
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="device-side assert"):
        table + 1
    messages = [report.message for report in control.reports()]
    assert any("aten::index_select" in message for message in messages), messages
    control.clear_faults()
    assert (table + 1).sum().item() == 12


# --- random numbers ------------------------------------------------------------------------------


def drawn() -> list[torch.Tensor]:
    x = torch.ones(50, device="cuda")
    return [
        torch.rand(9, device="cuda"),
        torch.randn(9, device="cuda"),
        torch.randint(100, (9,), device="cuda"),
        torch.randperm(9, device="cuda"),
        torch.bernoulli(x / 2),
        torch.multinomial(x, 5),
        torch.empty(9, device="cuda").exponential_(),
        F.dropout(x, 0.5),
    ]


def test_a_seed_gives_the_same_numbers_again():
    torch.manual_seed(5)
    first = drawn()
    second = drawn()
    torch.manual_seed(5)
    assert all(same_bits(a, b) for a, b in zip(first, drawn(), strict=True))
    assert not any(same_bits(a, b) for a, b in zip(first, second, strict=True))


def test_the_state_of_the_generator_can_be_kept():
    state = torch.cuda.get_rng_state()
    first = drawn()
    with torch.random.fork_rng(devices=[0]):
        drawn()
    second = torch.rand(9, device="cuda")
    torch.cuda.set_rng_state(state)
    assert all(same_bits(a, b) for a, b in zip(first, drawn(), strict=True))
    assert same_bits(torch.rand(9, device="cuda"), second)


def test_a_generator_of_ones_own():
    generators = [torch.Generator("cuda").manual_seed(3) for _ in range(2)]
    first, second = (torch.rand(9, device="cuda", generator=g) for g in generators)
    assert same_bits(first, second)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(9, device="cuda", generator=torch.Generator())


def test_the_cpu_draws_as_if_there_were_no_gpu():
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    drawn()
    assert same_bits(torch.rand(4), expected)


def test_dropout_keeps_its_share_and_scales():
    x = torch.ones(10000, device="cuda")
    y = F.dropout(x, 0.25)
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert 0.7 < (y > 0).float().mean().item() < 0.8


# --- half precision ------------------------------------------------------------------------------


def test_softmax_of_half_precision_in_single():
    x = numbers(3, 8).half().cuda().requires_grad_()
    for function in (F.softmax, F.log_softmax):
        result = function(x, -1, dtype=torch.float32)
        assert same_bits(result.detach().cpu(), function(x.detach().float().cpu(), -1))
        (gradient,) = torch.autograd.grad(result.square().sum(), x)
        assert gradient.dtype == torch.float16
