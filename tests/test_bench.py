"""The benchmarks run end to end on tiny settings; what they measure there means nothing."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from trae_mem.bench import footprint, harness, hooks, overlap, peers
from trae_mem.bench.child import Child, ChildError
from trae_mem.bench.models import LlamaShape
from trae_mem.bench.schedule import ideal_step_seconds
from trae_mem.bench.weight_probe import WeightProbe
from trae_mem.cli.bench import app
from trae_mem.recorder import Event

TINY_SHAPE = LlamaShape(6, 64, 96, head_size=32)
TINY = {
    "overlap": (
        overlap,
        overlap.Settings(
            shape=TINY_SHAPE,
            batch=1,
            length=8,
            ratios=(1.0,),
            prefetches=(0, 2),
            rounds=2,
            rounds_beside=1,
            calibration_steps=1,
        ),
    ),
    "footprint": (
        footprint,
        footprint.Settings(
            shape=TINY_SHAPE, depths=(1, 2), variants=("file",), length=4, steps=1, repeats=1
        ),
    ),
    "hooks": (hooks, hooks.Settings(units=5, warm_up=2, repeats=6)),
    "peers": (
        peers,
        peers.Settings(
            shape=TINY_SHAPE,
            variants=("resident", "accelerate cpu_offload", "trae_mem file"),
            length=8,
            forwards=2,
            train_steps=2,
        ),
    ),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One run of each benchmark through the command line, with its figure."""
    found = {}
    for name, (module, settings) in TINY.items():
        folder = tmp_path_factory.mktemp(name)
        path, figure = folder / "results.json", folder / "figure.png"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "QUICK", settings)
            command = [name, "--quick", "--json", str(path), "--figure", str(figure)]
            result = CliRunner().invoke(app, command)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        found[name] = json.loads(path.read_text(encoding="utf-8"))
        reached = all(check["ok"] for check in found[name]["checks"])
        assert result.exit_code == (0 if reached else 1)
        assert "Checks" in result.output
        assert figure.read_bytes().startswith(b"\x89PNG")
    return found


def missed(report: dict[str, Any]) -> list[str]:
    return [check["name"] for check in report["checks"] if not check["ok"]]


@pytest.mark.parametrize("name", TINY)
def test_a_report_says_what_was_measured_where_and_against_which_bounds(
    reports: dict[str, dict[str, Any]], name: str
) -> None:
    report = reports[name]
    assert list(report) == ["benchmark", "environment", "settings", "results", "checks"]
    assert report["benchmark"] == name
    assert {"device", "cores", "memory_bytes", "kernel", "threads"} <= set(report["environment"])
    assert {"python", "torch", "trae_mem", "git_commit"} <= set(report["environment"])
    assert report["checks"]
    for check in report["checks"]:
        assert list(check) == ["name", "value", "bound", "unit", "ok"]


@pytest.mark.parametrize("name", TINY)
def test_a_report_names_no_path(reports: dict[str, dict[str, Any]], name: str) -> None:
    text = json.dumps(reports[name])
    for place in (tempfile.gettempdir(), str(Path.cwd()), str(Path.home())):
        assert f'"{place}' not in text


def test_overlap_finds_the_same_training_and_the_exact_number_of_loads(
    reports: dict[str, dict[str, Any]],
) -> None:
    report = reports["overlap"]
    assert all(name.startswith("efficiency") for name in missed(report))
    points = {point["prefetch"]: point for point in report["results"]["points"]}
    assert points[0]["loads_per_step"] == 2 * (6 - 2)
    assert points[2]["loads_per_step"] == 2 * (6 - 4)
    assert report["results"]["steps_compared"] == 2 + 3  # a warm-up each, and the rounds
    for point in points.values():
        assert point["seconds_per_load"]["median"] >= 0.9 * point["nominal_seconds_per_load"]


def test_hooks_counts_every_acquire_and_no_load(reports: dict[str, dict[str, Any]]) -> None:
    assert all(name.startswith("host cost") for name in missed(reports["hooks"]))
    assert reports["hooks"]["results"]["acquires"] == 2 * 5 * 6


def test_footprint_trains_and_compares_weights_with_peak_memory(
    reports: dict[str, dict[str, Any]],
) -> None:
    report = reports["footprint"]
    assert all(name.startswith("peak memory growth") for name in missed(report))
    first, second = report["results"]["points"]
    assert second["weight_bytes"] == 2 * first["weight_bytes"]
    grown = second["peak_bytes"]["median"] - first["peak_bytes"]["median"]
    added = second["weight_bytes"] - first["weight_bytes"]
    assert report["results"]["growth"]["file"] == pytest.approx(grown / added)


def test_peers_shows_what_each_keeps_and_what_it_cannot_do(
    reports: dict[str, dict[str, Any]],
) -> None:
    assert missed(reports["peers"]) == []
    rows = {row["variant"]: row for row in reports["peers"]["results"]["variants"]}
    layer = reports["peers"]["results"]["layer_bytes"]
    assert rows["resident"]["device_bytes_forward"] == 6 * layer
    assert 4 * layer <= rows["trae_mem file"]["device_bytes_train"] < 6 * layer
    peer = rows["accelerate cpu_offload"]
    assert peer["forward_losses_equal"]
    assert peer["device_bytes_forward"] < layer
    assert not peer["trains"]
    assert peer["training"] == "no error, but 0 of 24 adapter tensors got a gradient"


@pytest.mark.parametrize(("bound", "code"), [(1e9, 0), (0.0, 1)])
def test_the_exit_code_tells_whether_a_bound_was_missed(
    monkeypatch: pytest.MonkeyPatch, bound: float, code: int
) -> None:
    monkeypatch.setattr(hooks, "QUICK", TINY["hooks"][1])
    monkeypatch.setattr(hooks, "HOST_BOUND", bound)
    result = CliRunner().invoke(app, ["hooks", "--quick", "--json", "-"])
    assert result.exit_code == code
    checks = json.loads(result.stdout)["checks"]  # nothing but JSON there
    assert all(check["ok"] for check in checks) == (code == 0)


def test_a_figure_is_drawn_again_from_json(
    reports: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    path, figure = tmp_path / "results.json", tmp_path / "again.png"
    harness.write_report(reports["overlap"], str(path))
    result = CliRunner().invoke(app, ["plot", str(path), "--figure", str(figure)])
    assert result.exit_code == 0
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_computing_time_of_a_use_leaves_out_the_next_one_s_wait() -> None:
    def event(kind: str, unit: int, begin: int, end: int) -> Event:
        return Event(kind, unit, "", 0, 0, begin * 10**9, end * 10**9)

    events = [
        event("acquire", 0, 1, 1),
        event("release", 0, 3, 3),
        event("stall", 1, 4, 9),  # asked for at 4, there at 9
        event("acquire", 1, 9, 9),
        event("release", 1, 11, 11),
    ]
    assert overlap.compute_seconds_of_uses(events) == [3.0, 2.0]


@pytest.mark.parametrize(
    ("load", "prefetch", "expected"),
    [
        (0.0, 2, 20.0),  # compute alone
        (1.0, 0, 20.0 + 16.0),  # without prefetch each of 2 x (10 - 2) loads is waited for
        (100.0, 2, 12 * 100.0 + 4.0),  # link alone, but for two units at each turn-around
    ],
)
def test_the_ideal_engine_follows_the_rules_of_streaming(
    load: float, prefetch: int, expected: float
) -> None:
    found = ideal_step_seconds([1.0] * 10, [1.0] * 10, load, slots=prefetch + 2, prefetch=prefetch)
    assert found == pytest.approx(expected)


def test_the_weight_probe_counts_what_is_present_and_what_autograd_keeps() -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    layers.requires_grad_(False)
    weights = [layer.weight for layer in layers]
    size = 8 * 8 * 4

    def offloaded_pass() -> torch.Tensor:
        hidden = torch.ones(1, 8, requires_grad=True)
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
            hidden = layer(hidden)
            layer.weight = torch.nn.Parameter(weight.to("meta"), requires_grad=False)
        return hidden

    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = torch.nn.Parameter(weight.to("meta"), requires_grad=False)
    probe = WeightProbe(list(layers))
    with torch.no_grad():
        assert probe.peak_bytes(offloaded_pass) == size
    assert probe.peak_bytes(offloaded_pass) == 3 * size


def test_a_child_that_fails_says_why() -> None:
    with Child("builtins:dict", {"key": 1}) as child:
        assert child.ask("copy") == {"key": 1}
        with pytest.raises(ChildError, match="has no attribute 'nothing'"):
            child.ask("nothing")
    with Child("builtins:absent", {}) as child, pytest.raises(ChildError, match="absent"):
        child.ask("copy")
