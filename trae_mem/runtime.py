"""One model's streaming: units, store and engine together, and the public functions over them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn, cast

import torch
from torch import Tensor, nn

from trae_mem.errors import ConfigError, TraeMemError
from trae_mem.hooks import Uncopyable, UnitHooks, in_backward
from trae_mem.integrations.peft import MergeWatch
from trae_mem.native import load_native
from trae_mem.packing import Pack, plan_packs, view
from trae_mem.residency import budget_bytes, choose_resident, slot_count
from trae_mem.stats import Status
from trae_mem.store import bring_outside_to_ram, build_store
from trae_mem.units import Wanted, find_units

if TYPE_CHECKING:
    from trae_mem import _native

__all__ = ["Runtime", "disable", "enable", "find_runtime", "offloaded", "refresh", "status"]

# The stream of the caller, see csrc/core/device.h: on a host device the calling thread.
_CALLER_STREAM = 0

_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()
# Weak both ways: the hooks keep a runtime, so that it goes with its model.
_runtime_of_module: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Runtime]] = (
    weakref.WeakKeyDictionary()
)


class Runtime(Uncopyable):
    """Keeps one unit current, and tells the engine which one and where things are going."""

    def __init__(
        self,
        model: nn.Module,
        packs: list[Pack],
        source: str,
        device: _native.Device,
        *,
        prefetch: int,
        slots: int,
        resident: list[bool],
        poison: bool,
    ) -> None:
        native = load_native()
        self.prefetch, self.slots, self.resident = prefetch, slots, resident
        self.device = device
        self.packs = packs
        self.before_pass: list[Callable[[], None]] = []  # called before each pass of the model
        self.written_back_bytes = 0
        self.started_ns = time.monotonic_ns()
        self._travel = native.Travel
        self._current: UnitHooks | None = None
        self._recomputed: int | None = None  # the unit that a recomputation ran last
        self._graph_task = -1  # the backward whose end will release the current unit
        self._passed = False
        self._thread = 0  # that acquired a unit last
        self.pool = native.PagePool(device)
        # Should there be no room for the slots, the model keeps working from where it rests.
        self.store = build_store(packs, source, device)
        self.streamer: _native.LayerStreamer = native.LayerStreamer(
            self.pool,
            self.store.native,
            slots=slots,
            prefetch=prefetch,
            resident=resident,
            poison=poison,
        )
        self.units = [
            UnitHooks(self, index, pack.unit, pack.tensors, self._windows(index, pack))
            for index, pack in enumerate(packs)
        ]
        self._merges = MergeWatch(model, self.units)
        self._root_handle = model.register_forward_pre_hook(self._before_pass, prepend=True)
        _runtimes.add(self)
        for pack in packs:
            _runtime_of_module[pack.unit.module] = weakref.ref(self)

    def _windows(self, index: int, pack: Pack) -> list[Tensor]:
        memory = self.streamer.window(index, pack.bytes)
        return [view(memory, packed.offset, packed) for packed in pack.tensors]

    def close(self) -> None:
        """Takes the hooks off; every tensor shows its resting bytes afterwards."""
        self.release_current()
        self._root_handle.remove()
        self._merges.close()
        for hooks in self.units:
            hooks.remove()
            _runtime_of_module.pop(hooks.unit.module, None)
        # The hooks keep the runtime. Without the other direction, all of it goes, and the device's
        # memory with it, as soon as no graph needs the hooks for a backward that is still to come.
        self.units = []
        _runtimes.discard(self)
        self.streamer.drain()

    # --- the current unit, see hooks.py [Note: late release] ------------------------------------

    def forward(self, hooks: UnitHooks, *, around: bool) -> None:
        self._recomputed = None
        if self._merges.changed(hooks.index):
            hooks.suspect = True
        self.acquire(hooks, self._travel.FORWARD_AROUND if around else self._travel.FORWARD)

    def recompute(self, hooks: UnitHooks) -> None:
        """Forward inside a backward: alone, or the next of a group that is recomputed."""
        self._release_at_end_of_backward()
        follows = self._recomputed is not None and hooks.index == self._recomputed + 1
        self._recomputed = hooks.index
        self.acquire(hooks, self._travel.FORWARD if follows else self._travel.BACKWARD)

    def backward(self, hooks: UnitHooks) -> None:
        self._release_at_end_of_backward()
        self.acquire(hooks, self._travel.BACKWARD)

    def acquire(self, hooks: UnitHooks, travel: _native.Travel) -> None:
        self._take_turn()
        if hooks is self._current:
            return
        self.release_current()
        if hooks.changed_at_rest():
            self._accept_changes(hooks)
        # Current before it is acquired: an interrupt in between must not leave it acquired for
        # ever. Releasing what was not acquired does nothing.
        self._current = hooks
        try:
            self.streamer.acquire(hooks.index, _CALLER_STREAM, travel)
            hooks.show_device()
        except BaseException:
            self.release_current()
            raise

    def _take_turn(self) -> None:
        """The current unit may be replaced, unless another thread is running it just now."""
        thread = threading.get_ident()
        current = self._current
        if current is not None and current.depth > 0 and thread != self._thread:
            raise TraeMemError(
                f"two threads run the model at once: unit '{current.unit.name}' is in use, and a "
                "model that streams uses one unit at a time. Hold a lock for each pass"
            )
        self._thread = thread

    def _accept_changes(self, hooks: UnitHooks) -> None:
        self.streamer.drain()
        moved = {id(tensor) for tensor in hooks.moved_at_rest()}
        hooks.accept_changes()
        self.streamer.invalidate(hooks.index)
        # Other units see that a tensor they share was written to, but not that it moved: now it
        # rests where it did before.
        for other in self.units if moved else ():
            if other is not hooks and any(id(packed.tensor) in moved for packed in other.tensors):
                other.suspect = True

    def release(self, hooks: UnitHooks) -> None:
        if hooks is self._current:
            self.release_current()

    def release_current(self) -> None:
        hooks = self._current
        if hooks is None:
            return
        self.written_back_bytes += hooks.keep_writes()
        hooks.show_host()
        hooks.depth = 0
        self.streamer.release(hooks.index, _CALLER_STREAM)
        self._current = None

    def _release_at_end_of_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._graph_task:
            return
        self._graph_task = task
        torch.autograd.Variable._execution_engine.queue_callback(self.release_current)

    def _before_pass(self, model: nn.Module, args: object) -> None:
        if not self._passed:
            self._passed = True
            self.started_ns = time.monotonic_ns()
        if not in_backward():
            self._take_turn()
            self.release_current()  # left over from a pass that an exception ended
            for callback in self.before_pass:
                callback()

    # --- reports --------------------------------------------------------------------------------

    def status(self) -> Status:
        stats = self.streamer.stats()
        elapsed = (time.monotonic_ns() - self.started_ns) / 1e9
        stalled = stats["stall_ns"] / 1e9
        return Status(
            units=len(self.packs),
            streamed_units=self.resident.count(False),
            resident_units=self.resident.count(True),
            slots=min(self.slots, self.resident.count(False)),
            prefetch=self.prefetch,
            source=self.store.native.name,
            device=self.device.name,
            bytes_on_device=self.streamer.bytes_on_device,
            unit_bytes=max(pack.bytes for pack in self.packs),
            total_bytes=sum(pack.bytes for pack in self.packs),
            acquires=stats["acquires"],
            loads=stats["loads"],
            load_bytes=stats["load_bytes"],
            load_seconds=stats["load_ns"] / 1e9,
            hits=stats["hits"],
            stalls=stats["stalls"],
            stall_seconds=stalled,
            stall_share=min(1.0, stalled / elapsed) if elapsed > 0 else 0.0,
            elapsed_seconds=elapsed,
            written_back_bytes=self.written_back_bytes,
        )

    # --- fork -----------------------------------------------------------------------------------

    def abandon(self) -> None:
        """In a forked child: the engine's threads stayed with the parent."""
        self.streamer.abandon()
        self.streamer = cast("_native.LayerStreamer", _ForkedStreamer())


class _ForkedStreamer:
    """Stands in for the engine in a forked child, where it cannot work but may be disabled."""

    def drain(self) -> None:
        """Nothing is in flight here."""

    def release(self, unit: int, stream: int) -> None:
        """The slots are the parent's."""

    def __getattr__(self, name: str) -> NoReturn:
        raise TraeMemError(
            f"this process (pid {os.getpid()}) was forked from one whose model streams; the "
            "threads that load weights did not come along. Start it with the 'spawn' method, "
            "or call trae_mem.disable and then trae_mem.enable in the child"
        )


def _abandon_all() -> None:
    for runtime in list(_runtimes):
        runtime.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def find_runtime(model: nn.Module) -> Runtime | None:
    """The runtime that streams ``model``, a part of it, or what it wraps."""
    for module in model.modules():
        reference = _runtime_of_module.get(module)
        if reference is not None and (runtime := reference()) is not None:
            return runtime
    return None


def _require_runtime(model: nn.Module) -> Runtime:
    runtime = find_runtime(model)
    if runtime is None:
        raise ConfigError(f"{type(model).__name__} does not stream: call trae_mem.enable(model)")
    return runtime


# --- the public functions -------------------------------------------------------------------------


def _native_device(device: torch.device | str | _native.Device | None) -> _native.Device:
    native = load_native()
    if isinstance(device, (str, torch.device)) and torch.device(device).type != "cpu":
        raise ConfigError(
            f"device={str(device)!r}: this version streams to the CPU's memory only; "
            "pass device='cpu' or leave it out"
        )
    if device is None or isinstance(device, (str, torch.device)):
        host: _native.Device = native.HostDevice.from_environment()
        return host
    return device


def enable(
    model: nn.Module,
    *,
    prefetch: int = 2,
    device: torch.device | str | _native.Device | None = None,
    source: str | os.PathLike[str] = "auto",
    budget: int | float | str | None = None,
    units: Wanted | None = None,
    slots: int | None = None,
    debug: str | None = None,
) -> nn.Module:
    """Streams the repeated blocks of ``model`` through a few slots of device memory.

    The model is changed in place: a block's frozen parameters and buffers are on the device while
    it runs, forward and backward, and rest in host memory or in their files otherwise. Parameter
    objects stay the same; trainable parameters stay on the device. Losses and gradients are
    bit-identical to those of the model without it.

    Args:
        model: any module with repeated blocks; a PEFT model too.
        prefetch: units that are loaded ahead of the running one, 0 or more.
        device: where the model computes. ``None``: the CPU, whose memory is then the device. A
            ``trae_mem.HostDevice`` chooses its capacity and the speed of its link.
        source: where weights rest. ``"ram"``: packed in host memory; ``"file"``: in the
            safetensors files they are mapped from, ``"auto"``: file where that is so, else ram. A
            path names the checkpoint that the model was loaded from.
        budget: device memory for the units' weights, in bytes, as ``"10GiB"``, or as a fraction
            of the device's memory (a float). As many units as fit stay there for good. ``None``:
            none do, only the slots are there.
        units: modules to stream: names, names of lists of modules, class names or classes.
            ``None``: the blocks in ``_no_split_modules``, else the ModuleList with most
            parameters.
        slots: units that fit on the device at a time. ``None``: ``prefetch + 2``.
        debug: ``"poison"`` fills a slot with NaN as soon as it is released, so that a use of
            weights that are no longer there shows. It costs extra loads.

    Returns:
        ``model``.

    Raises:
        ConfigError: enabled already, no repeated blocks, nothing frozen to stream, or an argument
            that makes no sense.
        BudgetError: the budget is below the minimum, which it carries.
        OutOfMemoryError: the device has no room for the slots.
        WeightFileError: a weight file is missing or broken.
        NativeLibraryError: the compiled part is missing.
    """
    if find_runtime(model) is not None:
        raise ConfigError(
            f"{type(model).__name__} streams already: call trae_mem.disable(model) first, or "
            "trae_mem.status(model) to see it"
        )
    if debug not in (None, "poison"):
        raise ConfigError(f"debug={debug!r}: expected None or 'poison'")
    source = os.fspath(source)
    native_device = _native_device(device)
    found = find_units(model, units)
    slots = slot_count(slots, prefetch, len(found))
    packs = plan_packs(model, found)
    resident = choose_resident(
        [pack.bytes for pack in packs], budget_bytes(budget, native_device), slots
    )
    bring_outside_to_ram(model, found, source)
    Runtime(
        model,
        packs,
        source,
        native_device,
        prefetch=prefetch,
        slots=slots,
        resident=resident,
        poison=debug == "poison",
    )
    return model


def disable(model: nn.Module) -> nn.Module:
    """Ends streaming: takes all hooks off and leaves every weight where it rests.

    Raises:
        ConfigError: the model does not stream.
    """
    _require_runtime(model).close()
    return model


@contextlib.contextmanager
def offloaded(
    model: nn.Module,
    *,
    prefetch: int = 2,
    device: torch.device | str | _native.Device | None = None,
    source: str | os.PathLike[str] = "auto",
    budget: int | float | str | None = None,
    units: Wanted | None = None,
    slots: int | None = None,
    debug: str | None = None,
) -> Iterator[nn.Module]:
    """``enable`` for the duration of a ``with`` block; the same arguments and errors."""
    enable(
        model,
        prefetch=prefetch,
        device=device,
        source=source,
        budget=budget,
        units=units,
        slots=slots,
        debug=debug,
    )
    try:
        yield model
    finally:
        disable(model)


def status(model: nn.Module) -> Status:
    """What streams, what is on the device, and how long compute has waited.

    Raises:
        ConfigError: the model does not stream.
    """
    return _require_runtime(model).status()


def refresh(model: nn.Module) -> None:
    """Loads every unit again before its next use.

    Changes of weights between steps are noticed by themselves: in-place operations, assignments
    to ``param.data``, ``load_state_dict``, merges of PEFT adapters. Not so a write *through*
    ``param.data`` (``param.data.mul_(2)``), of which PyTorch keeps no trace; call this after one.

    Raises:
        ConfigError: the model does not stream.
    """
    for hooks in _require_runtime(model).units:
        hooks.suspect = True
