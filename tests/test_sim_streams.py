"""Streams and events of the simulated GPU: what runs when, and what waits for what."""

from __future__ import annotations

import threading

import pytest
import torch
from sim_gates import closed_gate

from trae_mem.sim import control

pytestmark = pytest.mark.sim


@pytest.fixture
def side():
    return torch.cuda.Stream()


def filled(value: float) -> torch.Tensor:
    made = torch.full((1000,), float(value), device="cuda")
    torch.cuda.current_stream().synchronize()  # not the device: another stream may be held
    return made


def test_the_host_runs_ahead_of_its_kernels():
    x = filled(1)
    with closed_gate() as gate:
        for _ in range(20):
            x = x + 1
        done = torch.cuda.Event()
        done.record()
        assert not done.query()
        assert not torch.cuda.current_stream().query()
        gate.open()
        assert x[0].item() == 21
    assert done.query()


def test_the_first_call_with_a_form_does_not_wait_either():
    x = filled(1)
    with closed_gate():
        y = x[:777].cumsum(0)  # no other test has this form
        assert y.shape == (777,)
        assert not torch.cuda.current_stream().query()
    assert y[-1].item() == 777


def test_streams_run_beside_each_other(side):
    x = filled(1)
    with closed_gate():
        x.add_(1)
        with torch.cuda.stream(side):
            assert (filled(2) * 2)[0].item() == 4
        assert not torch.cuda.default_stream().query()


def test_a_kernel_waits_for_an_event_of_another_stream(side):
    x, y = filled(1), filled(0)
    ready = torch.cuda.Event()
    with closed_gate(side) as gate:
        with torch.cuda.stream(side):
            x.mul_(5)
            ready.record()
        torch.cuda.current_stream().wait_event(ready)
        y.copy_(x * 2)
        assert not torch.cuda.current_stream().query()
        gate.open()
        torch.cuda.current_stream().synchronize()
    assert y[0].item() == 10


def test_without_the_wait_it_reads_too_early(side):
    x, y = filled(1), filled(0)
    with closed_gate(side):
        with torch.cuda.stream(side):
            x.mul_(5)
        y.copy_(x * 2)
        torch.cuda.current_stream().synchronize()
    assert y[0].item() == 2


def test_a_wait_is_for_the_record_before_it(side):
    x = filled(1)
    event = torch.cuda.Event()
    event.record()
    with closed_gate(side):
        torch.cuda.current_stream().wait_event(event)
        event.record(side)
        assert (x + 1)[0].item() == 2  # the later record is behind the gate


def test_a_stream_waits_for_another(side):
    x = filled(1)
    with closed_gate(side) as gate:
        with torch.cuda.stream(side):
            x.mul_(7)
        torch.cuda.current_stream().wait_stream(side)
        y = x + 1
        gate.open()
        assert y[0].item() == 8


def test_copies_run_in_the_order_of_their_stream(side):
    host, there = torch.ones(1000).pin_memory(), filled(0)
    with closed_gate(side):
        with torch.cuda.stream(side):
            there.copy_(host, non_blocking=True)
        host.fill_(3)  # a mistake, and it shows
    side.synchronize()
    assert there[0].item() == 3


def test_a_number_is_taken_when_the_kernel_is_queued():
    x, number = filled(1), torch.tensor(2.0)
    with closed_gate() as gate:
        y = x * number
        number.fill_(50)
        gate.open()
        assert y[0].item() == 2


def test_events_measure_time():
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    filled(1)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 0


def test_priorities_and_the_current_stream(side):
    urgent = torch.cuda.Stream(priority=-1)
    assert urgent.priority == -1
    assert side.cuda_stream != urgent.cuda_stream
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_another_threads_kernels():
    found = []

    def work():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found.append((torch.ones(500, device="cuda") * 3).sum())
            stream.synchronize()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [x.item() for x in found] == [1500] * 4


@pytest.mark.parametrize("seed", range(5))
def test_delays_change_nothing_where_the_waits_are(side, seed):
    control.set_adversary(seed=seed, delay_us=300, poison=True)
    try:
        total = filled(0)
        for step in range(10):
            with torch.cuda.stream(side):
                x = torch.full((1000,), float(step), device="cuda") * 2
                ready = torch.cuda.Event()
                ready.record()
            torch.cuda.current_stream().wait_event(ready)
            total += x
            x.record_stream(torch.cuda.current_stream())
            del x
        assert total.unique().tolist() == [90]
    finally:
        control.set_adversary()


def test_what_waits_for_the_device_is_counted():
    x = filled(1)
    control.reset_calls()
    y = x + 1
    assert not control.blocking_calls()
    y[0].item()
    assert sum(control.blocking_calls().values()) >= 1
    assert control.blocking_calls("no_such_library") == {}
