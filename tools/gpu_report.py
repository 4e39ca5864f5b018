"""Words and tables for what `gpu_check.py` found."""

from __future__ import annotations

from typing import Any

GIB = 1 << 30
Result = dict[str, Any]


def line(scene: Result) -> str:
    """One scene in a line."""
    if "skipped" in scene:
        return f"SKIPPED: {scene['skipped']}"
    verdict = "ok" if scene["ok"] else "WRONG"
    return f"{verdict}, {scene['seconds']:.0f} s" + (
        f": {scene['error']}" if "error" in scene else ""
    )


def markdown(name: str, report: Result) -> str:
    """The whole report, for `docs/results`."""
    scenes = report["scenes"]
    parts = [f"# {name}", "", _environment(report), ""]
    if report["simulated"]:
        parts += ["A rehearsal on a simulated card: nothing here is a measurement.", ""]
    parts += ["| scene | result |", "|---|---|"]
    parts += [f"| {scene['title']} | {line(scene)} |" for scene in scenes.values()]
    for key, write in _SECTIONS.items():
        scene = scenes.get(key)
        if scene is not None and "error" not in scene and "skipped" not in scene:
            parts += ["", f"## {scene['title']}", "", *write(scene)]
    return "\n".join([*parts, ""])


def _environment(report: Result) -> str:
    device, here = report["scenes"].get("device", {}), report["environment"]
    words = [f"Python {here['python']}, {here['system']}, {here['cores']} cores"]
    words.append(f"{here['memory_bytes'] / GIB:.0f} GiB of host memory")
    if "torch" in device:
        words.append(f"torch {device['torch']}, driver for CUDA {device['driver_cuda'] // 1000}")
        words.append(f"{device['memory_bytes'] / GIB:.2f} GiB of device memory")
        words.append(f"host memory: {device['pinning']}")
    return ", ".join(words) + "."


def _parity(scene: Result) -> list[str]:
    cases = scene["cases"]
    found = [
        f"{len(cases) - scene['failed']} of {len(cases)} combinations give the same bits "
        "(type x checkpointing x store x poison)."
    ]
    for case in cases:
        if case["difference"] is not None:
            what = ", ".join(str(case[key]) for key in ("dtype", "checkpointing", "store", "debug"))
            found.append(f"- {what}: {case['difference']}")
    return found


def _link(scene: Result) -> list[str]:
    names = {
        "pinned": "to the device, pinned",
        "loads": "to the device, our loads",
        "pageable": "to the device, pageable",
        "to_host_pinned": "to the host, pinned",
    }
    rates = scene["bytes_per_second"]
    rows = ["| copies | GB/s |", "|---|---|"]
    rows += [f"| {text} | {rates[key] / 1e9:.1f} |" for key, text in names.items()]
    return [*rows, "", f"Our loads reach {scene['share_of_pinned']:.0%} of the pinned rate."]


_TRAINED = (
    "| weights | batch | result | allocated | reserved | slots | s / step | tokens / s |",
    "|---|---|---|---|---|---|---|---|",
)


def _trained_row(label: str, run: Result) -> str:
    seconds = run["step_seconds"]
    cells = [
        label,
        str(run["batch"]),
        "runs" if run["out_of_memory"] is None else "out of memory",
        _gib(run["allocated_bytes"]),
        _gib(run["reserved_bytes"]),
        _gib(run.get("slots_bytes", 0)),
        "-" if seconds is None else f"{seconds:.2f}",
        "-" if seconds is None else f"{run['tokens_per_second']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _capped(scene: Result) -> list[str]:
    rows = [f"Held to {scene['cap_bytes'] / GIB:.2f} GiB, memory in GiB.", "", *_TRAINED]
    labels = {
        "resident": "all resident",
        "resident_checkpointed": "all resident, checkpointed",
        "streaming": "streaming, checkpointed",
    }
    return rows + [_trained_row(text, scene[key]) for key, text in labels.items()]


def _large(scene: Result) -> list[str]:
    note = f"Held to {scene['cap_bytes'] / GIB:.2f} GiB, memory in GiB; {scene['weights']}."
    return [note, "", *_TRAINED, _trained_row("streaming, checkpointed", scene)]


def _throughput(scene: Result) -> list[str]:
    rows = [
        f"{scene['layers']} layers of 7B, bf16, checkpointed, prefetch 2, one micro-step a step.",
        "",
        "| tokens / step | resident, tokens / s | streaming, tokens / s | step / resident "
        "| transfer / compute | max(compute, transfer) / step |",
        "|---|---|---|---|---|---|",
    ]
    for point in scene["points"]:
        cells = [
            str(point["tokens"]),
            f"{point['tokens_per_second_resident']:.0f}",
            f"{point['tokens_per_second_streaming']:.0f}",
            f"{point['step_over_resident']['median']:.3f}",
            f"{point['transfer_over_compute']['median']:.2f}",
            f"{point['efficiency']['median']:.3f}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


_SECTIONS = {
    "parity": _parity,
    "link": _link,
    "capped_7b": _capped,
    "large_70b": _large,
    "throughput": _throughput,
}
