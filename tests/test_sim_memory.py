"""PyTorch's tensors, copies and memory management on the simulated GPU."""

from __future__ import annotations

import pytest
import torch
from models import same_bits

from trae_mem.sim import control

MIB = 1 << 20
CAPACITY = 256 * MIB

pytestmark = pytest.mark.sim(memory="256MiB")


@pytest.fixture(params=["native", "expandable"], autouse=True)
def allocator(request):
    """Each test runs with both of torch's ways to get device memory."""
    torch.cuda.empty_cache()
    set_expandable(request.param == "expandable")
    yield request.param
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    set_expandable(False)


def set_expandable(on: bool) -> None:
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{on}")


def blocks(count: int, size: int = 32 * MIB) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(count)]


def test_the_device_is_what_was_asked_for():
    assert torch.cuda.is_available()
    assert torch.cuda.get_device_name() == "A10"
    assert torch.cuda.get_device_capability() == (8, 6)
    assert torch.cuda.get_device_properties(0).multi_processor_count == 72
    assert torch.cuda.mem_get_info()[1] == CAPACITY


@pytest.mark.parametrize("pinned", [False, True])
def test_bytes_go_to_the_device_and_back(pinned):
    host = torch.randn(1000, 33)
    there = (host.pin_memory() if pinned else host).to("cuda", non_blocking=True)
    back = torch.empty(1000, 33, pin_memory=pinned)
    back.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert same_bits(back, host)
    assert same_bits(there.clone().cpu(), host)


def test_a_copy_may_convert_and_rearrange():
    host = torch.randn(12, 7)
    there = torch.empty(7, 12, dtype=torch.bfloat16, device="cuda").t()
    there.copy_(host)
    assert same_bits(there.float().cpu(), host.bfloat16().float())
    host.t().copy_(there.t())
    assert same_bits(host, there.cpu().float())
    strided = torch.zeros(5, 6, device="cuda")
    strided[:, ::2] = torch.arange(15.0).view(5, 3)
    assert strided[:, ::2].cpu().tolist() == torch.arange(15.0).view(5, 3).tolist()
    assert strided[:, 1::2].count_nonzero().item() == 0


def test_a_pageable_copy_blocks_and_a_pinned_one_does_not():
    pageable, pinned = torch.ones(MIB), torch.ones(MIB).pin_memory()
    there = torch.empty(MIB, device="cuda")
    torch.cuda.synchronize()
    control.reset_calls()
    there.copy_(pinned, non_blocking=True)
    assert not control.blocking_calls()
    there.copy_(pageable, non_blocking=True)
    assert control.blocking_calls().keys() == {"cudaMemcpyAsync"}


def test_statistics_count_what_is_allocated():
    torch.cuda.reset_peak_memory_stats()
    held = blocks(3)
    assert torch.cuda.memory_allocated() == 3 * 32 * MIB
    assert torch.cuda.memory_reserved() >= 3 * 32 * MIB
    assert control.used_bytes() >= torch.cuda.memory_reserved()
    held.pop()
    assert torch.cuda.memory_allocated() == 2 * 32 * MIB
    assert torch.cuda.max_memory_allocated() == 3 * 32 * MIB
    assert torch.cuda.memory_stats()["allocated_bytes.all.allocated"] >= 3 * 32 * MIB
    assert "Allocated memory" in torch.cuda.memory_summary()


def test_an_emptied_cache_gives_the_memory_back():
    torch.cuda.synchronize()
    before = control.used_bytes()
    held = blocks(2)
    used = control.used_bytes()
    assert used - before >= 2 * 32 * MIB
    held.clear()
    assert control.used_bytes() == used  # torch keeps it
    torch.cuda.empty_cache()
    assert control.used_bytes() == before
    free, total = torch.cuda.mem_get_info()
    assert total - free == before


def test_a_snapshot_shows_the_segments(allocator):
    held = blocks(2)
    torch.cuda.memory._record_memory_history()
    held += blocks(1)
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    active = [b for s in snapshot["segments"] for b in s["blocks"] if b["state"] != "inactive"]
    assert sum(block["size"] for block in active) == torch.cuda.memory_allocated()
    assert any(s["is_expandable"] for s in snapshot["segments"]) == (allocator == "expandable")
    assert snapshot["device_traces"][0]
    del held


def test_out_of_memory_raises_and_the_program_goes_on():
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(2 * CAPACITY, dtype=torch.uint8, device="cuda")
    held = blocks(6)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        held += blocks(3)
    held.clear()
    assert (torch.ones(MIB, device="cuda") * 2).sum().item() == 2 * MIB
    assert len(blocks(6)) == 6


def test_memory_of_another_stream_is_not_reused_while_it_is_read():
    from sim_gates import closed_gate

    side = torch.cuda.Stream()
    x = torch.ones(4 * MIB, device="cuda")
    torch.cuda.synchronize()
    with closed_gate(side):
        with torch.cuda.stream(side):
            doubled = x * 2
        x.record_stream(side)
        address = x.data_ptr()
        del x
        overwritten = torch.full((4 * MIB,), 9.0, device="cuda")
        assert overwritten.data_ptr() != address
    side.synchronize()
    assert doubled.unique().tolist() == [2]


def test_without_record_stream_it_is_reused_as_on_a_gpu():
    from sim_gates import closed_gate

    side = torch.cuda.Stream()
    x = torch.ones(4 * MIB, device="cuda")
    torch.cuda.synchronize()
    with closed_gate(side):
        with torch.cuda.stream(side):
            doubled = x * 2
        address = x.data_ptr()
        del x
        overwritten = torch.full((4 * MIB,), 9.0, device="cuda")
        assert overwritten.data_ptr() == address
        torch.cuda.current_stream().synchronize()
    side.synchronize()
    assert doubled.unique().tolist() == [18]


def test_a_memory_pool_of_its_own():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.ones(MIB, device="cuda")
    assert any(s["segment_pool_id"] == pool.id for s in pool.snapshot())
    assert x.sum().item() == MIB


def test_poison_makes_fresh_memory_nan():
    control.set_adversary(poison=True)
    try:
        torch.cuda.empty_cache()
        assert torch.empty(8 * MIB, device="cuda").isnan().all().item()
    finally:
        control.set_adversary()
