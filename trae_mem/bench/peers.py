"""accelerate's offloading and ours beside all resident, on the same model and data.

Each variant has a process of its own; rounds go through them in turns. A peer is used as its
documentation says; where that cannot train, what happens is reported, and a second variant
offloads the frozen layers alone, by hand, so that its training can be timed too.

accelerate's `cpu_offload` to a CPU copies nothing: a weight's place "on the device" is the very
memory that it rests in. Its seconds are therefore those of its hooks alone.
"""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import nn

from trae_mem.bench.checkpoints import write_checkpoint
from trae_mem.bench.child import Child, timed
from trae_mem.bench.harness import Outcome, Report, at_most, spread
from trae_mem.bench.models import LlamaShape, add_adapters, digest, loss_of, tokens, trainable
from trae_mem.bench.weight_probe import WeightProbe

RESIDENT = "resident"
OURS = ("trae_mem ram", "trae_mem file")
PEERS = ("accelerate cpu_offload", "accelerate disk_offload")
BY_HAND = ("accelerate cpu_offload, by hand", "accelerate disk_offload, by hand")
VARIANTS = (RESIDENT, *PEERS, *BY_HAND, *OURS)
_DTYPE = torch.bfloat16
_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    shape: LlamaShape = field(default_factory=lambda: LlamaShape(24, 1024, 2816))
    variants: tuple[str, ...] = VARIANTS
    prefetch: int = 2
    batch: int = 1
    length: int = 128  # tokens
    forwards: int = 7
    train_steps: int = 7
    threads: int = 1  # of compute; what moves weights has the other cores


QUICK = Settings(forwards=3, train_steps=3)


class Variant:
    """Runs in the child: the model, offloaded as the variant says."""

    def __init__(self, variant: str, folder: str, scratch: str, prefetch: int) -> None:
        import transformers

        import trae_mem
        from trae_mem.training.memory import peak_rss

        self._ours = variant in OURS
        if self._ours:
            model: nn.Module = trae_mem.load_lazily(folder)
        else:
            auto: Any = transformers.AutoModelForCausalLM
            model = auto.from_pretrained(folder, dtype=_DTYPE, local_files_only=True)
        self._model = add_adapters(model)
        if self._ours:
            trae_mem.enable(model, prefetch=prefetch, source=variant.split()[-1])
        elif variant in PEERS:
            _offload(self._model, variant, scratch)
        elif variant in BY_HAND:
            for name, layer in _frozen_layers(self._model):
                _offload(layer, variant, f"{scratch}/{name}")
        self._optimizer = torch.optim.AdamW(trainable(self._model), lr=1e-3)
        self._steps = 0
        self.loading_peak = peak_rss()

    def forward(self, ids_seed: int, batch: int, length: int) -> dict[str, Any]:
        """One forward pass without gradients."""
        self._model.eval()
        ids = self._ids(ids_seed, batch, length)
        with torch.no_grad():
            loss, seconds = timed(lambda: loss_of(self._model, ids).item())
        return {"loss": loss, "seconds": seconds}

    def train(self, batch: int, length: int) -> dict[str, Any]:
        """One training step, or what kept it from being one."""
        self._model.train()
        ids = self._ids(self._steps, batch, length)
        self._steps += 1
        adapters = trainable(self._model)

        def step() -> float:
            self._optimizer.zero_grad()
            loss = loss_of(self._model, ids)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            return loss.item()

        try:
            loss, seconds = timed(step)
        except Exception as error:  # of a peer: that is the finding
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        meta = any(parameter.is_meta for parameter in adapters)
        return {
            "loss": loss,
            "seconds": seconds,
            "adapter_tensors": len(adapters),
            "adapters_with_gradient": sum(parameter.grad is not None for parameter in adapters),
            "adapters": None if meta else digest(adapters),
        }

    def device_bytes(self, batch: int, length: int) -> dict[str, int]:
        """The most bytes of layer weights on the device at a time, forward and in training."""
        import trae_mem

        if self._ours:
            held = trae_mem.status(self._model).bytes_on_device
            return {"forward": held, "train": held}
        probe = WeightProbe([layer for _, layer in _frozen_layers(self._model)])
        ids = self._ids(0, batch, length)
        with torch.no_grad():
            forward = probe.peak_bytes(lambda: loss_of(self._model, ids))
        return {"forward": forward, "train": probe.peak_bytes(lambda: loss_of(self._model, ids))}

    def memory(self) -> dict[str, int]:
        """Peak memory of the process, at the end of loading and since then."""
        from trae_mem.training.memory import peak_rss

        return {"peak_bytes": peak_rss(), "loading_peak_bytes": self.loading_peak}

    def forget_peak(self) -> bool:
        """Lets the peak memory begin anew; whether the system can do that."""
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return False
        return True

    def _ids(self, seed: int, batch: int, length: int) -> torch.Tensor:
        config: Any = self._model.config
        return tokens(seed, batch, length, config.vocab_size)


def _frozen_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules inside of the blocks that hold frozen parameters of their own."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if ".layers." in name
        and (own := list(module.parameters(recurse=False)))
        and not any(parameter.requires_grad for parameter in own)
    ]


def _offload(module: nn.Module, variant: str, scratch: str) -> None:
    import accelerate

    if "cpu_offload" in variant:
        accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(module, scratch, execution_device=torch.device("cpu"))


def run(settings: Settings) -> Outcome:
    """Measures all variants in turns."""
    with tempfile.TemporaryDirectory(prefix="trae-mem-") as temporary, ExitStack() as stack:
        folder = Path(temporary) / "checkpoint"
        layer_bytes = write_checkpoint(folder, settings.shape, _DTYPE)
        children = {
            variant: stack.enter_context(_start(variant, folder, Path(temporary), settings))
            for variant in settings.variants
        }
        found = _measure(children, settings)
    rows = [_row(variant, found[variant], found[RESIDENT]) for variant in settings.variants]
    results = {"layer_bytes": layer_bytes, "variants": rows}
    return Outcome(asdict(settings), results, _checks(rows, layer_bytes, settings))


def _start(
    variant: str, folder: Path, temporary: Path, settings: Settings
) -> AbstractContextManager[Child]:
    scratch = temporary / variant.replace(" ", "-")
    arguments = {
        "variant": variant,
        "folder": str(folder),
        "scratch": str(scratch),
        "prefetch": settings.prefetch,
    }
    return Child(f"{__name__}:Variant", arguments, threads=settings.threads)


def _measure(children: dict[str, Child], settings: Settings) -> dict[str, dict[str, Any]]:
    size = {"batch": settings.batch, "length": settings.length}
    found: dict[str, dict[str, Any]] = {
        name: {"forward": [], "train": [], "peak_forgotten": child.ask("forget_peak")}
        for name, child in children.items()
    }
    for number in range(settings.forwards):
        for name, child in _turns(children, number):
            found[name]["forward"].append(child.ask("forward", ids_seed=number, **size))
    for name, child in children.items():
        found[name]["memory_forward"] = child.ask("memory")
        child.ask("forget_peak")
    for number in range(settings.train_steps):
        for name, child in _turns(children, number):
            found[name]["train"].append(child.ask("train", **size))
    for name, child in children.items():
        found[name]["memory_train"] = child.ask("memory")
        found[name]["device_bytes"] = child.ask("device_bytes", **size)
    return found


def _turns(children: dict[str, Child], number: int) -> list[tuple[str, Child]]:
    """Every other round backwards: what the first of a round gains or loses evens out."""
    order = list(children.items())
    return order[::-1] if number % 2 else order


def _row(variant: str, own: dict[str, Any], resident: dict[str, Any]) -> dict[str, Any]:
    trained = own["train"]
    return {
        "variant": variant,
        "device_bytes_forward": own["device_bytes"]["forward"],
        "device_bytes_train": own["device_bytes"]["train"],
        # The first of each is a warm-up: files are opened, memory is taken.
        "forward_seconds": _spread_of(own["forward"][1:]),
        "train_seconds": _spread_of(trained[1:]),
        "loading_peak_bytes": own["memory_forward"]["loading_peak_bytes"],
        "forward_peak_bytes": own["memory_forward"]["peak_bytes"],
        "train_peak_bytes": own["memory_train"]["peak_bytes"],
        "peaks_are_separate": own["peak_forgotten"],
        "forward_losses_equal": _same(own["forward"], resident["forward"], "loss"),
        "trains": trains(own["train"], resident["train"]),
        "training": training_text(own["train"], resident["train"]),
    }


def _spread_of(measured: list[dict[str, Any]]) -> dict[str, float] | None:
    seconds = [one["seconds"] for one in measured if "seconds" in one]
    return spread(seconds) if seconds else None


def _same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], key: str) -> bool:
    return [one.get(key) for one in ours] == [one.get(key) for one in theirs]


def trains(own: list[dict[str, Any]], resident: list[dict[str, Any]]) -> bool:
    """Whether every loss and every adapter, bit for bit, is that of the resident model."""
    return _same(own, resident, "loss") and _same(own, resident, "adapters")


def training_text(own: list[dict[str, Any]], resident: list[dict[str, Any]]) -> str:
    """What came of training, in words."""
    if trains(own, resident):
        return "identical to resident"
    errors = [str(one["error"]) for one in own if "error" in one]
    if errors:
        return errors[0]
    last = own[-1]
    if last["adapters_with_gradient"] < last["adapter_tensors"]:
        return (
            f"no error, but {last['adapters_with_gradient']} of {last['adapter_tensors']} "
            "adapter tensors got a gradient"
        )
    return "runs, with losses that differ from resident"


def _checks(rows: list[dict[str, Any]], layer_bytes: int, settings: Settings) -> list[Any]:
    ours = [row for row in rows if row["variant"] in OURS]
    # A slot is the largest unit, rounded up to the engine's alignment.
    bound = (settings.prefetch + 2) * (layer_bytes + 4096)
    checks = [
        at_most(
            "our variants whose forward losses differ from resident",
            sum(not row["forward_losses_equal"] for row in ours),
            0,
        ),
        at_most(
            "our variants whose training differs from resident",
            sum(not row["trains"] for row in ours),
            0,
        ),
    ]
    checks += [
        at_most(f"layer weights on the device, {row['variant']}", row[key], bound, "bytes")
        for row in ours
        for key in ("device_bytes_train",)
    ]
    return checks


def table(report: Report) -> Table:
    """A row for each variant; forward / training step in each cell.

    ``trains``: with every loss and every adapter those of the resident model.
    """
    rows = report["results"]["variants"]
    notes = {row["training"]: row["variant"] for row in rows if not row["trains"]}
    shown = Table(
        title="accelerate's offloading and ours: forward / training step",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="\n".join(f"no: {note}" for note in notes),
        caption_justify="left",
    )
    shown.add_column("variant")
    for column in ("layer weights\non device, MiB", "seconds", "peak RSS, GiB", "trains"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row["variant"],
            f"{row['device_bytes_forward'] / _MIB:.0f} / {row['device_bytes_train'] / _MIB:.0f}",
            f"{_median(row['forward_seconds'])} / {_median(row['train_seconds'])}",
            f"{row['forward_peak_bytes'] / _GIB:.2f} / {row['train_peak_bytes'] / _GIB:.2f}",
            "yes" if row["trains"] else "no",
        )
    return shown


def _median(found: dict[str, float] | None) -> str:
    return "-" if found is None else f"{found['median']:.3f}"
