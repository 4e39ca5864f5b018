"""A run's recorded files, and what is drawn and printed from them."""

from __future__ import annotations

import json

import pytest

from trae_mem.cli.main import run
from trae_mem.errors import ConfigError
from trae_mem.recorder import Event
from trae_mem.report import events as recorded
from trae_mem.report import plots, tables
from trae_mem.report.summary import Check, RunRecord, StepRecord, median_step_seconds

UNITS, SLOTS, UNIT_BYTES = 4, 2, 1 << 20
MS = 1_000_000


def event(kind: str, unit: int, begin: int, end: int | None = None, size: int = 0) -> Event:
    """An event with times in milliseconds."""
    end = begin if end is None else end
    return Event(kind, unit, f"layers.{unit}", unit % SLOTS, size, begin * MS, end * MS)


def pass_over_units(start: int, *, first: bool = True) -> list[Event]:
    """One forward pass: 10 ms a unit, loaded while the one before computes."""
    found: list[Event] = []
    for unit in range(UNITS):
        begin = start + 10 * unit
        if unit >= SLOTS or not first:
            found.append(event("evict", (unit - SLOTS) % UNITS, begin - 8))
        found.append(event("load", unit, begin - 8, begin - 2, UNIT_BYTES))
        found.append(event("acquire", unit, begin))
        found.append(event("release", unit, begin + 9))
    return found


def step(number: int, begin: int, end: int, loss: float = 2.5) -> StepRecord:
    return StepRecord(
        number,
        loss,
        (end - begin) / 1e3,
        64,
        begin * MS,
        end * MS,
        0.001,
        UNITS,
        SLOTS * UNIT_BYTES,
    )


@pytest.fixture
def folder(tmp_path):
    """What a run of two steps leaves behind, with made-up numbers."""
    record = RunRecord(
        config={"model_config": {"model": "tiny"}, "record_steps": 100},
        environment={},
        outcome="finished",
        model={
            "layers": UNITS,
            "layer_bytes": UNITS * UNIT_BYTES,
            "parameters": 1000,
            "trainable_parameters": 10,
            "budget_bytes": None,
        },
        steps=[step(1, 100, 150, 0.1 + 0.2), step(2, 151, 201, 1 / 3)],
        status={
            "slots": SLOTS,
            "streamed_units": UNITS,
            "resident_units": 0,
            "bytes_on_device": SLOTS * UNIT_BYTES,
            "total_bytes": UNITS * UNIT_BYTES,
            "loads": 8,
            "load_bytes": 8 * UNIT_BYTES,
            "hits": 7,
            "acquires": 8,
            "source": "file",
        },
        peak_rss_bytes=500 << 20,
        checks=[Check("speed, at most", 1.5, 1.05, "x", ok=False)],
    )
    record.write(tmp_path)
    events = [*pass_over_units(108), *pass_over_units(159, first=False)]
    lines = [json.dumps(vars(entry)) for entry in events]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    samples = [{"time_ns": 10 * number * MS, "rss": (400 + number) << 20} for number in range(21)]
    text = "".join(json.dumps(sample) + "\n" for sample in samples)
    (tmp_path / "memory.jsonl").write_text(text, encoding="utf-8")
    return tmp_path


# --- the record ----------------------------------------------------------------------------------


def test_a_record_is_read_back_as_it_was_written(folder):
    record = RunRecord.read(folder)
    assert record.losses == [0.1 + 0.2, 1 / 3]
    assert record.steps[1] == step(2, 151, 201, 1 / 3)
    assert record.checks == [Check("speed, at most", 1.5, 1.05, "x", ok=False)]
    record.write(folder)
    assert RunRecord.read(folder) == record


def test_the_summary_holds_its_steps_as_columns(folder):
    values = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert values["steps"]["step"] == [1, 2]
    assert values["summary"]["last_loss"] == 1 / 3
    assert values["summary"]["stall_share"] == pytest.approx(0.002 / 0.1)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"steps": {"a": [1]}, "summary": {}}'])
def test_a_file_that_is_no_summary_is_refused(tmp_path, text):
    (tmp_path / "summary.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="not the summary of a run"):
        RunRecord.read(tmp_path)


def test_the_median_leaves_the_first_step_out():
    steps = [step(1, 0, 900), step(2, 900, 1000), step(3, 1000, 1100)]
    assert median_step_seconds(steps) == pytest.approx(0.1)
    assert median_step_seconds(steps[:1]) == pytest.approx(0.9)
    assert median_step_seconds([]) == 0


# --- events --------------------------------------------------------------------------------------


def test_a_unit_is_on_the_device_from_the_end_of_its_load_to_its_evict():
    spans = recorded.residence(pass_over_units(8), until_ns=100 * MS)
    found = [(span.unit, span.begin_ns // MS, span.end_ns // MS) for span in spans]
    assert sorted(found) == [(0, 6, 20), (1, 16, 30), (2, 26, 100), (3, 36, 100)]


def test_a_unit_is_in_use_from_acquire_to_release():
    spans = recorded.compute(pass_over_units(8), until_ns=100 * MS)
    found = [(span.unit, span.begin_ns // MS, span.end_ns // MS) for span in spans]
    assert found == [(unit, 8 + 10 * unit, 17 + 10 * unit) for unit in range(UNITS)]


def test_loaded_bytes_never_exceed_the_slots_and_fill_them():
    events = pass_over_units(8) + pass_over_units(60, first=False)
    totals = [total for _, total in recorded.loaded_bytes(events)]
    assert max(totals) == SLOTS * UNIT_BYTES
    assert min(totals) > 0


def test_events_that_cannot_be_read_are_named(tmp_path):
    path = tmp_path / "events.jsonl"
    assert recorded.read_events(path) == []
    path.write_text('{"kind": "load"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"events\.jsonl"):
        recorded.read_events(path)


# --- plots ---------------------------------------------------------------------------------------


def test_both_plots_are_drawn_from_the_files_alone(folder):
    written = plots.render(folder)
    assert [path.name for path in written] == ["memory.png", "layers.png"]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_memory_plot_shows_loaded_weights_under_budget_and_all_resident(folder):
    record = RunRecord.read(folder)
    figure = plots.memory_timeline(
        record,
        plots.read_samples(folder / "memory.jsonl"),
        recorded.read_events(folder / "events.jsonl"),
        resident_samples=[(0, 600 << 20), (200 * MS, 610 << 20)],
    )
    weights, processes = figure.axes
    levels = {line.get_label(): line.get_ydata()[0] for line in weights.get_lines()}
    assert levels["budget: 2 slots, 2.0 MiB"] == 2
    assert levels["all layers resident, 4.0 MiB"] == 4
    (loaded,) = [line for line in weights.get_lines() if "in slots" in line.get_label()]
    assert max(loaded.get_ydata()) == 2
    assert [line.get_label() for line in processes.get_lines()] == ["all resident", "streaming"]


def test_the_layer_plot_has_a_bar_where_a_layer_was_on_the_device(folder):
    record = RunRecord.read(folder)
    events = recorded.read_events(folder / "events.jsonl")
    (axes,) = plots.layer_timeline(events, record.steps).axes
    bars = {bar.get_label(): bar for bar in axes.collections if bar.get_label()[0] != "_"}
    assert set(bars) == {"on the device", "loading", "in use"}
    assert axes.get_title().endswith("steps 1 and 2")
    assert axes.get_xlim() == pytest.approx((0, 0.101))


def test_steps_that_lie_far_apart_are_not_drawn_together():
    near = [step(1, 0, 100), step(2, 101, 200)]
    far = [step(1, 0, 100), step(2, 200, 300)]
    assert plots.shown_steps(near, 1000 * MS) == near
    assert plots.shown_steps(far, 1000 * MS) == far[1:]
    assert plots.shown_steps(near, 150 * MS) == near[:1]


# --- the verb ------------------------------------------------------------------------------------


def test_report_prints_the_tables_and_exports_the_timeline(folder, capsys):
    trace = folder / "trace.json"
    assert run(["report", str(folder), "--chrome-trace", str(trace)]) == 0
    output = capsys.readouterr().out
    assert "Run finished" in output
    assert "2 slots for 4 streamed units" in output
    assert "missed" in output
    entries = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    loads = [entry for entry in entries if entry.get("cat") == "load"]
    assert len(loads) == 2 * UNITS
    assert loads[0]["dur"] == pytest.approx(6000)


def test_report_on_a_folder_without_a_run_exits_with_2(tmp_path, capsys):
    assert run(["report", str(tmp_path)]) == 2
    assert "name the output_dir of a run" in capsys.readouterr().err


def test_a_comparison_is_shown_in_one_table(folder, capsys):
    record = RunRecord.read(folder)
    figures = {
        "layer_bytes_on_device": 2 << 20,
        "layers": 4,
        "layers_on_device": 2,
        "peak_rss_bytes": 1 << 30,
        "median_step_seconds": 1.03,
        "stall_share": 0.01,
        "first_loss": 2.5,
        "last_loss": 2.25,
        "mean_first_3": 2.4,
        "mean_last_3": 2.3,
    }
    record.comparison = {
        "streaming": figures,
        "resident": figures | {"layer_bytes_on_device": 4 << 20, "median_step_seconds": 1.0},
        "step_time_ratio": 1.03,
        "step_time_ratio_quartiles": [1.01, 1.04],
        "compared_steps": 15,
        "losses_identical": False,
    }
    tables.print_comparison(tables.make_console(), record)
    output = capsys.readouterr().out
    assert "0.500" in output
    assert "1.030" in output
    assert "NO" in output
