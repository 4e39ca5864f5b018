"""Several simulated GPUs in one process."""

from __future__ import annotations

import pytest
import torch
from models import same_bits
from sim_gates import closed_gate

from trae_mem.sim import control

pytestmark = pytest.mark.sim(gpu="RTX 4090", devices=3, memory="1GiB")


def test_each_has_its_own_memory():
    assert torch.cuda.device_count() == 3
    before = [control.used_bytes(i) for i in range(3)]
    x = torch.ones(1 << 22, device="cuda:1")
    used = [control.used_bytes(i) - before[i] for i in range(3)]
    assert used[1] >= x.nbytes
    assert used[0] == used[2] == 0
    assert torch.cuda.memory_allocated(1) >= x.nbytes


def test_kernels_run_on_the_device_of_their_tensors():
    x = torch.arange(6.0, device="cuda:2")
    y = (x * 2).sum()
    assert y.device == torch.device("cuda:2")
    assert y.item() == 30
    with torch.cuda.device(1):
        assert torch.ones(2, device="cuda").device.index == 1
        assert (x + 1).device.index == 2


@pytest.mark.parametrize("convert", [False, True])
def test_copies_between_devices(convert):
    x = torch.randn(40, 30, device="cuda:0")
    y = (
        torch.empty(30, 40, device="cuda:1").t()
        if convert
        else torch.empty_like(x, device="cuda:1")
    )
    y.copy_(x)
    assert same_bits(y.cpu(), x.cpu())
    assert same_bits(x.to("cuda:2", torch.float64).cpu(), x.cpu().double())


def test_mixed_devices_are_refused():
    x, y = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
        x + y
    with pytest.raises(RuntimeError, match="two devices"):
        torch.nn.functional.linear(x, torch.ones(2, 3, device="cuda:1"))


def test_one_device_does_not_wait_for_another():
    torch.cuda.synchronize(0)
    with closed_gate(torch.cuda.default_stream(0)):
        assert (torch.ones(5, device="cuda:1") + 1).sum().item() == 10


def test_random_numbers_of_each_device():
    torch.cuda.manual_seed_all(4)
    first = [torch.rand(5, device=f"cuda:{i}").cpu() for i in range(2)]
    torch.cuda.manual_seed_all(4)
    assert same_bits(torch.rand(5, device="cuda:1").cpu(), first[1])


def test_a_model_over_two_devices_trains_as_on_one():
    def step(*devices):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8).to(device) for device in devices]
        x = torch.arange(16.0).view(2, 8)
        for layer, device in zip(layers, devices, strict=True):
            x = layer(x.to(device)).tanh()
        x.square().mean().backward()
        return [layer.weight.grad.cpu() for layer in layers]

    for one, two in zip(step("cpu", "cpu"), step("cuda:0", "cuda:1"), strict=True):
        assert same_bits(one, two)
