"""One model's streaming: units, store and engine together."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, cast

import torch
from torch import Tensor, nn

from trae_mem.errors import ConfigError, TraeMemError
from trae_mem.hooks import Uncopyable, UnitHooks, in_backward
from trae_mem.integrations.peft import MergeWatch
from trae_mem.native import load_native
from trae_mem.packing import Pack, view
from trae_mem.stats import Status
from trae_mem.store import build_store
from trae_mem.units import find_places

if TYPE_CHECKING:
    from trae_mem import _native
    from trae_mem.devices import Target
    from trae_mem.placement import Placement

__all__ = ["Runtime", "find_runtime", "require_runtime"]

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
        target: Target,
        placement: Placement,
        *,
        prefetch: int,
        slots: int,
        resident: list[bool],
        poison: bool,
    ) -> None:
        native = load_native()
        self.prefetch, self.slots, self.resident = prefetch, slots, resident
        self.device = target.native
        self.target = target
        self.placement = placement
        self.packs = packs
        self.before_pass: list[Callable[[], None]] = []  # called before each pass of the model
        self.written_back_bytes = 0
        self.started_ns = time.monotonic_ns()
        self._travel = native.Travel
        self._current: UnitHooks | None = None
        self._streams: list[int] = []  # in which the current unit was acquired
        self._recomputed: int | None = None  # the unit that a recomputation ran last
        self._still_shown: list[UnitHooks] = []  # released in a recomputation, see recompute
        self._graph_task = -1  # the backward whose end will release the current unit
        self._passed = False
        self._thread = 0  # that acquired a unit last, or had a backward do so
        self._backward = False  # the current unit was acquired inside of a backward
        self.pool = native.PagePool(self.device)
        # Should there be no room for the slots, the model keeps working from where it rests.
        self.store = build_store(packs, source, self.device)
        self.streamer: _native.LayerStreamer = native.LayerStreamer(
            self.pool,
            self.store.native,
            slots=slots,
            prefetch=prefetch,
            resident=resident,
            poison=poison,
        )
        self.units: list[UnitHooks] = []
        try:
            self._hook(model)
        except BaseException:
            for hooks in self.units:
                hooks.remove()
            raise
        _runtimes.add(self)
        for pack in packs:
            _runtime_of_module[pack.unit.module] = weakref.ref(self)

    def _hook(self, model: nn.Module) -> None:
        places = find_places(model)
        for index, pack in enumerate(self.packs):
            windows, place = self._windows(index, pack), places.get(pack.unit.module)
            self.units.append(UnitHooks(self, index, pack, windows, place))
        self._merges = MergeWatch(model, self.units)
        self._root_handle = model.register_forward_pre_hook(self._before_pass, prepend=True)

    def _windows(self, index: int, pack: Pack) -> list[Tensor]:
        memory = self.streamer.window(index, pack.bytes)
        return [view(memory, packed.offset, packed) for packed in pack.tensors]

    def close(self) -> None:
        """Takes the hooks off; every tensor shows its resting bytes afterwards."""
        self.end_pass()
        self._root_handle.remove()
        self._merges.close()
        for hooks in self.units:
            hooks.remove()
            _runtime_of_module.pop(hooks.unit.module, None)
        # The hooks keep the runtime. Without the other direction, all of it goes, and the device's
        # memory with it, as soon as no graph needs the hooks for a backward that is still to come.
        self.units = []
        _runtimes.discard(self)
        try:
            self.streamer.drain()
        finally:
            self.placement.restore()

    # --- the current unit, see hooks.py [Note: late release] ------------------------------------

    def forward(self, hooks: UnitHooks, *, around: bool) -> None:
        self._recomputed = None
        self._rest_those_still_shown()
        if self.target.device.type != "cpu":
            hooks.require_frozen()
        if self._merges.changed(hooks.index):
            hooks.suspect = True
        self.acquire(hooks, self._travel.FORWARD_AROUND if around else self._travel.FORWARD)

    def recompute(self, hooks: UnitHooks) -> None:
        """Forward inside a backward: alone, or the next of a group that is recomputed.

        When all of a group is recomputed, a non-reentrant checkpoint compares where the tensors
        that it saved are with where those of the first forward were. Among them are parameters of
        units that were released meanwhile: these go on showing their windows until then.
        """
        self._release_at_end_of_backward()
        current = self._current
        if current is not None and current is not hooks and current.index == self._recomputed:
            self._still_shown.append(current)
        follows = self._recomputed is not None and hooks.index == self._recomputed + 1
        self._recomputed = hooks.index
        self.acquire(hooks, self._travel.FORWARD if follows else self._travel.BACKWARD)

    def backward(self, hooks: UnitHooks) -> None:
        self._release_at_end_of_backward()
        self._recomputed = None
        if hooks is not self._current:
            self._rest_those_still_shown()
        self.acquire(hooks, self._travel.BACKWARD)

    def acquire(self, hooks: UnitHooks, travel: _native.Travel) -> None:
        self._take_turn()
        stream = self.target.stream()
        if hooks is self._current:
            if stream not in self._streams:
                self._streams.append(stream)
                self.streamer.acquire(hooks.index, stream, travel)
            return
        self.release_current()
        if hooks in self._still_shown:
            self._rest_those_still_shown()
        if hooks.changed_at_rest():
            self._accept_changes(hooks)
        # Current before it is acquired: an interrupt in between must not leave it acquired for
        # ever. Releasing what was not acquired does nothing.
        self._current = hooks
        self._backward = in_backward()
        self._streams = [stream]
        try:
            self.streamer.acquire(hooks.index, stream, travel)
            hooks.show_device()
        except BaseException:
            self.release_current()
            raise

    def _take_turn(self) -> None:
        """The current unit may be replaced, unless another thread is running it just now.

        On a GPU a backward runs on a thread of autograd's own, for a caller that waits for it: when
        that caller is back, an interrupted backward is over, whatever it left behind.
        """
        thread, current = threading.get_ident(), self._current
        for_caller = self.target.device.type == "cuda" and in_backward()
        theirs = not self._backward if for_caller else thread != self._thread
        if current is not None and current.depth > 0 and theirs:
            raise TraeMemError(
                f"two threads run the model at once: unit '{current.unit.name}' is in use, and a "
                "model that streams uses one unit at a time. Hold a lock for each pass"
            )
        if not for_caller:
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
        if hooks not in self._still_shown:
            hooks.show_host()
        hooks.depth = 0
        for stream in self._streams:
            self.streamer.release(hooks.index, stream)
        self._current = None

    def end_pass(self) -> None:
        """Nothing is in use: at the end of a backward, and before a forward."""
        self.release_current()
        self._rest_those_still_shown()
        self._recomputed = None

    def _rest_those_still_shown(self) -> None:
        for hooks in self._still_shown:
            hooks.show_host()
        self._still_shown = []

    def _release_at_end_of_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._graph_task:
            return
        self._graph_task = task
        torch.autograd.Variable._execution_engine.queue_callback(self.end_pass)

    def _before_pass(self, model: nn.Module, args: object) -> None:
        if not self._passed:
            self._passed = True
            self.started_ns = time.monotonic_ns()
        if not in_backward():
            self._take_turn()
            self.end_pass()  # left over from a pass that an exception ended
            self.placement.place_arrivals(model)
            for hooks in self.units:
                hooks.seat.follow()
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


def require_runtime(model: nn.Module) -> Runtime:
    """That runtime.

    Raises:
        ConfigError: the model does not stream.
    """
    runtime = find_runtime(model)
    if runtime is None:
        raise ConfigError(f"{type(model).__name__} does not stream: call trae_mem.enable(model)")
    return runtime
