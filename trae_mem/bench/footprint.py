"""How the memory of a process grows with the depth of the model it trains.

The same training steps, in a fresh process each, over models of 1 to 4 times the depth: with
layers streamed from their file, from RAM, and all resident. With the file store nothing of the
added weights may stay: what grows are the added layers' adapters with their gradients and
optimizer states, and their modules' Python objects, and these are counted in.
"""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from trae_mem.bench.checkpoints import shallower, write_checkpoint
from trae_mem.bench.child import Child
from trae_mem.bench.harness import Outcome, Report, at_most, spread
from trae_mem.bench.models import LlamaShape, add_adapters, digest, loss_of, tokens, trainable
from trae_mem.sizes import format_bytes

GROWTH_BOUND = 0.02  # of the added weight bytes
VARIANTS = ("file", "ram", "resident")
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Settings:
    """What is measured; ``shape`` has the least depth."""

    shape: LlamaShape = field(default_factory=lambda: LlamaShape(4, 2048, 5632))
    depths: tuple[int, ...] = (1, 2, 3, 4)  # times the layers of `shape`
    variants: tuple[str, ...] = VARIANTS
    prefetch: int = 2
    rank: int = 4
    length: int = 16  # tokens, one sequence
    steps: int = 3
    repeats: int = 2  # of the file variant; the others are there to compare with
    threads: int = 1


QUICK = Settings(depths=(1, 4), steps=2, repeats=1)


class Training:
    """Runs in the child: loads the model as the variant says, and trains it."""

    def __init__(
        self, folder: str, variant: str, prefetch: int, rank: int, length: int, steps: int
    ) -> None:
        self._folder, self._variant = folder, variant
        self._prefetch, self._rank, self._length, self._steps = prefetch, rank, length, steps

    def run(self) -> dict[str, Any]:
        """Trains with checkpointed activations; peak memory and what was computed."""
        import transformers

        import trae_mem
        from trae_mem.training.memory import peak_rss

        if self._variant == "resident":
            auto: Any = transformers.AutoModelForCausalLM
            model = auto.from_pretrained(self._folder, dtype=_DTYPE, local_files_only=True)
        else:
            model = trae_mem.load_lazily(self._folder)
        vocabulary = model.config.vocab_size
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        model = add_adapters(model, self._rank)
        if self._variant != "resident":
            trae_mem.enable(model, prefetch=self._prefetch, source=self._variant)
        loaded = peak_rss()
        before = digest(trainable(model))
        optimizer = torch.optim.AdamW(trainable(model), lr=1e-3)
        losses = []
        for step in range(self._steps):
            loss = loss_of(model, tokens(step, 1, self._length, vocabulary))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        adapters = sum(p.numel() * p.element_size() for p in trainable(model))
        return {
            "peak_bytes": peak_rss(),
            "peak_bytes_after_loading": loaded,
            "adapter_bytes": adapters,
            # The adapters, their gradients, and AdamW's two moments.
            "trained_state_bytes": 4 * adapters,
            "losses": losses,
            "adapters": digest(trainable(model)),
            "changed": digest(trainable(model)) != before,
            "bytes_on_device": None
            if self._variant == "resident"
            else trae_mem.status(model).bytes_on_device,
        }


def run(settings: Settings) -> Outcome:
    """Measures each depth and variant, the variants in turns."""
    with tempfile.TemporaryDirectory(prefix="trae-mem-") as temporary:
        deepest = _at_depth(settings, max(settings.depths))
        source = Path(temporary) / "deepest"
        layer_bytes = write_checkpoint(source, deepest, _DTYPE)
        points = []
        for depth in settings.depths:
            folder = Path(temporary) / f"depth-{depth}"
            shape = _at_depth(settings, depth)
            shallower(folder, source, shape, _DTYPE)
            points += _at(folder, depth, shape.layers * layer_bytes, settings)
    grown = {variant: growth(points, variant, "peak_bytes") for variant in settings.variants}
    results = {
        "layer_bytes": layer_bytes,
        "points": points,
        "growth": grown,
        "trained_state_growth": growth(points, "file", "trained_state_bytes"),
    }
    checks = [
        at_most(
            "peak memory growth with the file store / added weight bytes",
            grown["file"],
            GROWTH_BOUND,
        ),
        at_most(
            "runs whose losses or adapters differ from the same depth's others", _odd(points), 0
        ),
        at_most("runs that left the adapters unchanged", sum(not p["changed"] for p in points), 0),
    ]
    return Outcome(asdict(settings), results, checks)


def _at_depth(settings: Settings, depth: int) -> LlamaShape:
    return dataclasses.replace(settings.shape, layers=settings.shape.layers * depth)


def _at(folder: Path, depth: int, weights: int, settings: Settings) -> list[dict[str, Any]]:
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in settings.variants}
    for repeat in range(settings.repeats):
        for variant in settings.variants:
            if repeat > 0 and variant != "file":
                continue
            arguments = {
                "folder": str(folder),
                "variant": variant,
                "prefetch": settings.prefetch,
                "rank": settings.rank,
                "length": settings.length,
                "steps": settings.steps,
            }
            with Child(f"{__name__}:Training", arguments, threads=settings.threads) as child:
                runs[variant].append(child.ask("run"))
    return [
        {
            "depth": depth,
            "layers": settings.shape.layers * depth,
            "variant": variant,
            "weight_bytes": weights,
            **found[0],
            "peak_bytes": spread([one["peak_bytes"] for one in found]),
        }
        for variant, found in runs.items()
    ]


def growth(points: list[dict[str, Any]], variant: str, key: str) -> float:
    """Growth of the figure from the least depth to the greatest / the weight bytes added."""
    own = [point for point in points if point["variant"] == variant]
    first, last = own[0], own[-1]

    def value(point: dict[str, Any]) -> float:
        found = point[key]
        return float(found["median"] if isinstance(found, dict) else found)

    added: int = last["weight_bytes"] - first["weight_bytes"]
    return (value(last) - value(first)) / added


def _odd(points: list[dict[str, Any]]) -> int:
    references = {p["depth"]: p for p in points if p["variant"] == "resident"}
    return sum(
        (point["losses"], point["adapters"]) != (reference["losses"], reference["adapters"])
        for point in points
        if (reference := references.get(point["depth"], point)) is not point
    )


def table(report: Report) -> Table:
    """Peak memory by depth and variant."""
    results = report["results"]
    variants = report["settings"]["variants"]
    shown = Table(title="Peak memory of the process over model depth", title_justify="left")
    for column in ("layers", "their weights", *variants):
        shown.add_column(column, justify="right")
    for depth in report["settings"]["depths"]:
        row = {p["variant"]: p for p in results["points"] if p["depth"] == depth}
        any_point = row[variants[0]]
        shown.add_row(
            str(any_point["layers"]),
            format_bytes(any_point["weight_bytes"]),
            *(format_bytes(row[variant]["peak_bytes"]["median"]) for variant in variants),
        )
    shown.add_section()
    shown.add_row(
        "growth / added", "", *(f"{100 * results['growth'][variant]:.2f} %" for variant in variants)
    )
    shown.caption = (
        "of which adapters, gradients and AdamW states: "
        f"{100 * results['trained_state_growth']:.2f} %"
    )
    return shown
