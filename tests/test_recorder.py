"""Recorder: the events of training, in order, as JSON lines and as a Chrome trace."""

from __future__ import annotations

import itertools
import json

import pytest
from models import SLOW_LINK, UNITS, backward_step, blocks, build_lora, logits, train

import trae_mem
from trae_mem.recorder import Event, read_json_lines

SLOTS = 4


@pytest.fixture
def model():
    return trae_mem.enable(build_lora())


def of_kind(events: list[Event], kind: str) -> list[int]:
    return [event.unit for event in events if event.kind == kind]


def test_the_events_of_a_step(model):
    with trae_mem.Recorder(model) as recorder:
        backward_step(model)
    forward, backward = list(range(UNITS)), list(reversed(range(UNITS)))
    events = recorder.events()
    assert of_kind(events, "acquire") == forward + backward
    assert of_kind(events, "release") == forward + backward
    assert of_kind(events, "load") == [*forward, *backward[SLOTS:]]
    assert sorted(of_kind(events, "evict")) == [0, 1, 2, 4, 5, 6]
    assert {event.unit_name for event in events} == {
        f"base_model.model.model.layers.{index}" for index in range(UNITS)
    }
    assert recorder.lost == 0


@pytest.mark.host_only("on a GPU the host queues a use before its load has ended")
def test_a_unit_is_used_only_while_it_is_on_the_device(model):
    """On the device: from the end of its load to its eviction, in the slot it shares."""
    with trae_mem.Recorder(model) as recorder:
        train(model, 3)
    events = sorted(recorder.events(), key=lambda event: event.end_ns)
    holder: dict[int, int] = {}
    current = None
    for event in events:
        assert event.slot == event.unit % SLOTS
        assert event.begin_ns <= event.end_ns
        if event.kind == "load":
            assert event.slot not in holder
            assert event.bytes == trae_mem.status(model).unit_bytes
            holder[event.slot] = event.unit
        elif event.kind == "evict":
            assert holder.pop(event.slot) == event.unit
        elif event.kind == "acquire":
            assert current is None
            assert holder[event.slot] == event.unit
            current = event.unit
        elif event.kind == "release":
            assert current == event.unit
            current = None
    assert current is None


def test_stalls_begin_before_the_use_and_end_with_the_load():
    device = trae_mem.HostDevice(link_bytes_per_second=SLOW_LINK)
    model = trae_mem.enable(build_lora(), prefetch=0, device=device)
    with trae_mem.Recorder(model) as recorder:
        logits(model)
    loads = {event.unit: event for event in recorder.events() if event.kind == "load"}
    stalls = [event for event in recorder.events() if event.kind == "stall"]
    assert [stall.unit for stall in stalls] == list(range(UNITS))
    assert all(stall.end_ns >= loads[stall.unit].end_ns for stall in stalls)


def test_only_what_happens_while_it_is_open_is_recorded(model):
    backward_step(model)
    recorder = trae_mem.Recorder(model)
    assert recorder.events() == []
    logits(model)
    recorder.close()
    count = len(recorder.events())
    backward_step(model)
    recorder.close()
    assert len(recorder.events()) == count > 0


def test_two_recorders_at_once(model):
    with trae_mem.Recorder(model) as first:
        logits(model)
        with trae_mem.Recorder(model) as second:
            logits(model)
        logits(model)
    assert of_kind(first.events(), "acquire") == 3 * list(range(UNITS))
    assert of_kind(second.events(), "acquire") == list(range(UNITS))


def test_json_lines(model, tmp_path):
    path = tmp_path / "events.jsonl"
    with trae_mem.Recorder(model, path) as recorder:
        backward_step(model)
        assert not path.exists()
    lines = path.read_text(encoding="utf-8").splitlines()
    keys = ["kind", "unit", "unit_name", "slot", "bytes", "begin_ns", "end_ns"]
    assert all(list(json.loads(line)) == keys for line in lines)
    assert read_json_lines(path) == recorder.events()


def test_the_file_is_written_when_an_error_ends_the_recording(model, tmp_path):
    path = tmp_path / "events.jsonl"

    def record_and_fail():
        with trae_mem.Recorder(model, path):
            logits(model)
            raise KeyError

    with pytest.raises(KeyError):
        record_and_fail()
    assert of_kind(read_json_lines(path), "acquire") == list(range(UNITS))


def test_the_chrome_trace(model, tmp_path):
    path = tmp_path / "trace.json"
    with trae_mem.Recorder(model) as recorder:
        backward_step(model)
    recorder.write_chrome_trace(path)
    entries = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    uses = [entry for entry in entries if entry["cat"] == "use"]
    assert [entry["args"]["unit"] for entry in uses] == of_kind(recorder.events(), "acquire")
    for entry in entries:
        assert entry["ph"] == "X"
        assert entry["dur"] >= 0
        assert {"name", "ts", "pid", "tid"} <= entry.keys()
    loads = [entry for entry in entries if entry["cat"] == "load"]
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in itertools.pairwise(loads))


def test_events_that_the_ring_lost_are_counted(monkeypatch):
    monkeypatch.setenv("TRAE_MEM_EVENT_LOG", "16")
    model = trae_mem.enable(build_lora())
    with trae_mem.Recorder(model) as recorder:
        backward_step(model)
        backward_step(model)
    events = recorder.events()
    monkeypatch.undo()
    whole = trae_mem.enable(build_lora())
    with trae_mem.Recorder(whole) as complete:
        backward_step(whole)
        backward_step(whole)
    per_step = 2 * 2 * UNITS
    assert len(events) == 2 * 16
    assert recorder.lost + len(events) >= 2 * per_step
    assert complete.lost == 0
    names = [(event.kind, event.unit) for event in events if event.kind == "acquire"]
    assert names[-1] == ("acquire", 0)


def test_a_long_run_is_recorded_whole_by_a_short_ring(monkeypatch):
    """The recorder empties the ring before each pass."""
    monkeypatch.setenv("TRAE_MEM_EVENT_LOG", "128")
    model = trae_mem.enable(build_lora())
    with trae_mem.Recorder(model) as recorder:
        train(model, 6)
    assert recorder.lost == 0
    assert len(of_kind(recorder.events(), "acquire")) == 6 * 2 * UNITS


def test_a_model_that_does_not_stream_cannot_be_recorded():
    with pytest.raises(trae_mem.ConfigError, match="enable"):
        trae_mem.Recorder(build_lora())


def test_the_recording_outlives_the_streaming(model):
    recorder = trae_mem.Recorder(model)
    logits(model)
    trae_mem.disable(model)
    recorder.close()
    assert of_kind(recorder.events(), "acquire") == list(range(UNITS))


def test_events_name_the_units_of_the_enabled_module():
    model = build_lora()
    part = model.base_model.model
    trae_mem.enable(part)
    with trae_mem.Recorder(model) as recorder:
        logits(model)
    assert recorder.events()[0].unit_name.startswith("model.layers.")
    assert len(blocks(model)) == UNITS
