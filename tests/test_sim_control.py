"""Looking into the simulated GPU: misuse, faults on demand, calls, what lives."""

from __future__ import annotations

import ctypes

import pytest
import torch
from sim_gates import closed_gate

from trae_mem.sim import control

MIB = 1 << 20

pytestmark = pytest.mark.sim(memory="1GiB")


class Window:
    """A tensor's memory without the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


@pytest.mark.sim(reports="ignore")
def test_a_kernel_on_memory_that_is_gone_is_reported_and_fails():
    torch.cuda.empty_cache()
    x = torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda")
    stale = torch.as_tensor(Window(x), device="cuda")
    del x
    torch.cuda.empty_cache()
    stale.add_(1)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        torch.cuda.synchronize()
    (report,) = control.reports()
    assert report.kind == "illegal address"
    assert "aten::add" in report.message
    assert report.stack
    control.clear_faults()
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.sim(reports="ignore")
def test_unregistering_host_memory_under_a_queued_copy_is_reported():
    runtime = torch.cuda.cudart()
    host, there = torch.ones(MIB), torch.zeros(MIB, device="cuda")
    assert int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)) == 0
    with closed_gate():
        there.copy_(host, non_blocking=True)
        runtime.cudaHostUnregister(host.data_ptr())
        assert [report.kind for report in control.reports()] == ["free under pending work"]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        torch.cuda.synchronize()
    assert control.reports()[1].kind == "copy from unregistered host memory"


def test_reports_can_be_cleared():
    ctypes.CDLL(None).cudaFreeHost(ctypes.c_void_p(64))
    (report,) = control.reports()
    assert "cudaFreeHost" in str(report)
    control.clear_reports()
    assert control.reports() == []


@pytest.mark.sim(reports="ignore")
def test_a_call_can_be_made_to_fail():
    torch.cuda.empty_cache()
    control.fail("cudaMalloc", nth=1)
    control.fail("cudaMalloc", nth=2)  # torch tries again when its cache is empty
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.empty(300 * MIB, dtype=torch.uint8, device="cuda").numel() == 300 * MIB


@pytest.mark.sim(reports="ignore")
def test_a_fault_may_stay_until_it_is_cleared():
    torch.cuda.empty_cache()
    control.fail("cudaStreamSynchronize", code=719, sticky=True)  # launch failure
    with pytest.raises(RuntimeError, match="launch failure"):
        torch.cuda.current_stream().synchronize()
    with pytest.raises(RuntimeError, match="launch failure"):
        torch.cuda.synchronize()
    control.clear_faults()
    torch.cuda.synchronize()


def test_calls_are_counted_by_who_made_them():
    torch.cuda.empty_cache()
    control.reset_calls()
    x = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    counted = control.calls()["cudaMalloc"]
    assert counted.count == 1
    assert counted.by == {"libc10_cuda.so": 1}
    x.cpu()
    assert "cudaMemcpyAsync" in control.blocking_calls("libtorch_cuda")


def test_what_lives_is_counted():
    torch.cuda.empty_cache()
    before = control.live().get("libc10_cuda.so", {}).get("allocations", 0)
    x = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert control.live()["libc10_cuda.so"]["allocations"] > before
    del x


def test_peaks_are_kept():
    torch.cuda.empty_cache()
    control.reset_peak()
    before = control.used_bytes()
    x = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del x
    torch.cuda.empty_cache()
    assert control.used_bytes() == before
    assert control.peak_bytes() - before == 64 * MIB


def test_a_device_can_shrink():
    control.set_memory("128MiB")
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        control.set_memory("1GiB")


def test_an_engine_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="to_device"):
        control.busy_seconds("both")
    assert control.busy_seconds("kernels") == 0  # nothing is paced here


@pytest.mark.sim(mode="dry", gpu="H100", memory=None, pace=True)
def test_in_dry_mode_nothing_is_computed_and_time_is_modelled():
    x = torch.empty(16384, 16384, dtype=torch.bfloat16, device="cuda")
    before = control.busy_seconds("kernels")
    for _ in range(2):
        x = x @ x
    torch.cuda.synchronize()
    flops = 2 * 2 * 16384**3
    assert control.busy_seconds("kernels") - before >= flops / 989e12
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.mem_get_info()[1] == 80 << 30
