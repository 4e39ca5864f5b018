"""What does not stream is where the model computes: adapters, embeddings, the head, buffers.

Streamed weights rest on the host, wherever they were before. Everything else of the model has to
be on the device. A :class:`Placement` brings it there and remembers from where, so that ``disable``
and a failed ``enable`` put each tensor back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from trae_mem.errors import ConfigError
from trae_mem.loading import Checkpoint, find_span, forget, like_parameter, swap_tensors

__all__ = ["Placement"]


class _Arrivals:
    """Notices modules and parameters that come into a model: adapters, a new head."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = weakref.WeakSet(model.modules())
        self._any = False
        # The hooks are global: they must not keep the model, and must go with it.
        reference = weakref.ref(self)

        def registered(parent: nn.Module, name: str, child: object) -> None:
            if (arrivals := reference()) is not None and parent in arrivals._modules:
                arrivals._any = True
                if isinstance(child, nn.Module):
                    arrivals._modules.update(child.modules())

        for register in (
            register_module_module_registration_hook,
            register_module_parameter_registration_hook,
        ):
            weakref.finalize(self, register(registered).remove)

    def take(self) -> bool:
        """Whether any came since the last call."""
        found, self._any = self._any, False
        return found


class Placement:
    """The tensors of one model that do not stream, on the device while streaming is enabled.

    Args:
        model: the model.
        streamed: the tensors that the engine moves; they are left alone, but where they were is
            remembered.
        device: where the model computes.
    """

    def __init__(self, model: nn.Module, streamed: Iterable[Tensor], device: torch.device) -> None:
        self.device = device
        self._arrivals: _Arrivals | None = _Arrivals(model)
        self._streamed = {id(tensor): tensor for tensor in streamed}
        self._moved: list[tuple[Tensor, torch.device]] = []
        self._homes = [
            (tensor, tensor.device)
            for tensor in self._streamed.values()
            if tensor.device.type not in ("cpu", "meta")
        ]

    def adopt_meta(self, model: nn.Module, source: str) -> None:
        """Gives the tensors on the meta device, which do not stream, their values.

        Args:
            model: the model.
            source: as in ``enable``: the path of a checkpoint, or ``"empty"`` for zeros.

        Raises:
            ConfigError: there is nothing behind them.
        """
        meta = [(name, tensor) for name, tensor in self._outside(model) if tensor.is_meta]
        if source == "empty":
            for _, tensor in meta:
                zeros = torch.zeros_like(tensor, device=self.device)
                swap_tensors(tensor, like_parameter(tensor, zeros))
        elif meta and source not in ("auto", "ram", "file"):
            Checkpoint(source).adopt(meta)
        for name, tensor in meta:
            if tensor.is_meta:
                raise ConfigError(
                    f"'{name}' is on the meta device, with no file behind it. Load the model, or "
                    "pass source='PATH' of its safetensors checkpoint"
                )

    def place(self, model: nn.Module) -> None:
        """Brings what does not stream to the device.

        Weights that are mapped from files are read once: they are used all the time, and a
        mapping need not be aligned.
        """
        for _, tensor in self._outside(model):
            if tensor.device != self.device:
                mapped = tensor.data if find_span(tensor) is not None else None
                self._moved.append((tensor, tensor.device))
                _move(tensor, self.device)
                if mapped is not None:
                    forget(mapped)
            elif find_span(tensor) is not None:
                mapped = tensor.data
                tensor.data = mapped.clone()
                forget(mapped)

    def place_arrivals(self, model: nn.Module) -> None:
        """Brings what came into the model since the last call: made where the weights rest."""
        if self._arrivals is not None and self._arrivals.take():
            self.place(model)

    def restore(self) -> None:
        """Puts every tensor back to where it was; tensors that streamed must be at rest."""
        self._arrivals = None
        for tensor, device in (*self._moved, *self._homes):
            if tensor.device != device:
                _move(tensor, device)
        self._moved, self._homes = [], []

    def _outside(self, model: nn.Module) -> Iterable[tuple[str, Tensor]]:
        for named in (model.named_parameters(), model.named_buffers()):
            for name, tensor in named:
                if id(tensor) not in self._streamed:
                    yield name, tensor


def _move(tensor: Tensor, device: torch.device) -> None:
    gradient = tensor.grad
    tensor.grad = None  # a gradient must be where its parameter is, at any moment
    tensor.data = tensor.data.to(device)
    if gradient is not None:
        tensor.grad = gradient.to(device)
