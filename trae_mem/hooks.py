"""A unit's hooks: when it is acquired, what its parameters show, when it is released.

[Note: where backward begins] A module's own backward hooks are of no use here: the pre-hook wraps
the module's outputs (which forbids in-place changes of them), the post-hook fires before the
parameters' gradients exist when the module's input needs none. Instead each node of the autograd
graph that made an output of the unit gets a pre-hook. Every path of gradients into the unit goes
through one of them, except from tensors that the unit handed out on the side. Those are behind
the unit's outputs in autograd's order all the same, as long as an output takes part in the loss.

An output that is a view hides a second node: an in-place change of it leads gradients past the
view's node to its base's. An input that was changed in place is an output too, and so are the
keys and values that a block leaves in a cache, for a later forward to use. And a node that
another unit's output has already belongs to that unit: one that is handed through.

[Note: late release] Nothing tells when a unit's backward has ended. But autograd runs nodes in
the reverse order of their making, so when another unit is acquired, all of this one's work is
behind us. Hence one unit is current, and acquiring another releases it. In plain forward the
post-forward hook releases sooner; inside a backward it does not, since the recomputed unit's own
backward follows. The end of the graph task releases the last unit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trae_mem.compiled import Seat
from trae_mem.errors import TraeMemError

if TYPE_CHECKING:
    from torch import nn

    from trae_mem.packing import Pack
    from trae_mem.runtime import Runtime

__all__ = ["Uncopyable", "UnitHooks", "in_backward"]

_graph_task = torch._C._current_graph_task_id
_OWNED = "trae_mem.unit"  # in the metadata of a node that has a unit's pre-hook


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread; recomputation counts."""
    return bool(_graph_task() != -1)


class Uncopyable:
    """Hangs on a model's hooks, and so keeps the model from being copied while it streams."""

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TraeMemError(
            "a model whose layers stream cannot be copied: the copy's weights would alias this "
            "one's windows. Call trae_mem.disable(model), copy it, and enable both"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TraeMemError(
            "a model whose layers stream cannot be pickled. Save its state_dict(), or call "
            "trae_mem.disable(model) first"
        )


class UnitHooks(Uncopyable):
    """One unit of a runtime: its tensors' two places, and the hooks on its module."""

    def __init__(
        self,
        runtime: Runtime,
        index: int,
        pack: Pack,
        windows: list[Tensor],
        place: tuple[nn.Module, str] | None,
    ) -> None:
        unit, tensors = pack.unit, pack.tensors
        self.runtime = runtime
        self.index = index
        self.unit = unit
        self.tensors = tensors
        self.depth = 0  # how many calls of the module are running
        number = unit.name.rpartition(".")[2]
        self._number = int(number) if number.isdecimal() else None  # among the model's layers
        self.suspect = False  # its bytes at rest may have changed without a trace
        self._to_device = [(t.tensor, w) for t, w in zip(tensors, windows, strict=True)]
        self._to_host: list[tuple[Tensor, Tensor]] = []
        # (tensor, its version, its address) as they were when it was last put to rest
        self._at_rest: list[tuple[Tensor, int, int]] = []
        self.refresh_hosts()
        self.seat = Seat(unit.module, place, self.before_forward, self.after_forward)

    def remove(self) -> None:
        self.seat.leave()
        del self.seat  # it keeps us; without it we go, and the device's memory, with the last graph

    # --- what the parameters show ---------------------------------------------------------------

    def refresh_hosts(self) -> None:
        """Takes over the store's host tensors, and their state as the one to compare with."""
        hosts = self.runtime.store.hosts[self.index]
        self._to_host = [(t.tensor, host) for t, host in zip(self.tensors, hosts, strict=True)]
        self._note_rest()

    def _note_rest(self) -> None:
        self._at_rest = [(t, t._version, host.data_ptr()) for t, host in self._to_host]

    def show_device(self) -> None:
        for tensor, window in self._to_device:
            tensor.data = window

    def show_host(self) -> None:
        for (tensor, host), (_, window) in zip(self._to_host, self._to_device, strict=True):
            # Other memory: given to it while it was in use, after an interrupted step perhaps.
            if tensor.data_ptr() == window.data_ptr():
                tensor.data = host

    def require_frozen(self) -> None:
        """For a device that is not the host: a gradient has to be where its parameter is."""
        for tensor, _ in self._to_device:
            if tensor.requires_grad:
                name = next(t.name for t in self.tensors if t.tensor is tensor)
                raise TraeMemError(
                    f"'{name}' was made trainable while it streams: its gradient would be on the "
                    "GPU, and it rests on the host. Call trae_mem.disable(model) and "
                    "trae_mem.enable(model) again: what is trainable then stays on the GPU"
                )

    def changed_at_rest(self) -> bool:
        """Whether a tensor was written in place or given other memory since it was released."""
        if self.suspect:
            return True
        for tensor, version, address in self._at_rest:
            if tensor._version != version or tensor.data_ptr() != address:
                return True
        return False

    def moved_at_rest(self) -> list[Tensor]:
        """The tensors that were given other memory since the unit was released."""
        return [t for t, _, address in self._at_rest if t.data_ptr() != address]

    def accept_changes(self) -> None:
        """Makes what the tensors show now the unit's bytes at rest.

        No load of the unit may be in flight: memory that it reads may go.
        """
        for index in range(len(self.tensors)):
            self.runtime.store.accept(self.index, index)
        self.refresh_hosts()
        self.suspect = False

    def keep_writes(self) -> int:
        """Copies what the unit wrote to its own tensors back to where they rest; bytes copied.

        Running statistics, for example. Call before ``show_host``.
        """
        written = 0
        for index, (tensor, version, _) in enumerate(self._at_rest):
            if tensor._version != version:
                self.runtime.store.keep(self.index, index)
                written += self.tensors[index].bytes
        if written:
            self._note_rest()
        return written

    # --- the hooks ------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: Any) -> None:
        runtime = self.runtime
        if in_backward():
            runtime.recompute(self)
        else:
            training = self.unit.module.training or torch.is_grad_enabled()
            runtime.forward(self, around=not training)
        self.depth += 1

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.depth = max(0, self.depth - 1)
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                self._watch_backward(tensor)
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor):
                    self._watch_backward(value)
                elif hasattr(value, "layers"):
                    self._watch_cache(value.layers)
        if self.depth == 0 and not in_backward():
            self.runtime.release(self)

    def _watch_backward(self, tensor: Tensor) -> None:
        node: Any = tensor.grad_fn
        if node is None or _OWNED in node.metadata:
            return
        node.metadata[_OWNED] = True
        node.register_prehook(self.before_backward)
        if tensor._base is not None:
            self._watch_backward(tensor._base)

    def _watch_cache(self, layers: Any) -> None:
        """For the caches of transformers: lists of layers, numbered as the model's are."""
        if self._number is not None and self._number < len(layers):
            for name in ("keys", "values"):
                tensor = getattr(layers[self._number], name, None)
                if isinstance(tensor, Tensor):
                    self._watch_backward(tensor)

    def before_backward(self, gradients: Any) -> None:
        if torch.is_grad_enabled():
            raise TraeMemError(
                f"backward through streamed unit '{self.unit.name}' with create_graph=True: "
                "second derivatives would read weights that are no longer there. "
                "Call trae_mem.disable(model) for them"
            )
        self.runtime.backward(self)


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in (value,) if isinstance(value, Tensor) else pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _tensors(getattr(leaf, field.name))
