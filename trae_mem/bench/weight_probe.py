"""How many bytes of a model's weights are on the device at a time, for offloading that is not ours.

On a GPU the allocator would tell; where the device is the CPU, the tensors themselves do: what is
offloaded is on the meta device, and what autograd saved for backward is kept alive by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class WeightProbe(TorchFunctionMode):
    """Watches the modules' own parameters during a call. Slow: not for a call that is timed."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self._modules = modules
        self._seen: dict[int, int] = {}  # address -> bytes of each weight that was used
        self._saved: dict[int, int] = {}  # the same, of those that autograd keeps
        self._peak = 0

    def peak_bytes(self, call: Callable[[], Any]) -> int:
        """The most bytes at a time during the call; what autograd saved counts until its end."""
        self._seen, self._saved, self._peak = {}, {}, 0
        with torch.autograd.graph.saved_tensors_hooks(self._note_saved, lambda held: held), self:
            result = call()  # its graph lives until here, as it would until backward
        del result
        return self._peak

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is nn.functional.linear:
            self._sample()
        return function(*args, **(kwargs or {}))

    def _sample(self) -> None:
        present = {}
        for module in self._modules:
            for parameter in module._parameters.values():
                if parameter is not None and not parameter.is_meta:
                    storage = parameter.untyped_storage()
                    present[storage.data_ptr()] = storage.nbytes()
        self._seen.update(present)
        self._peak = max(self._peak, sum({**self._saved, **present}.values()))

    def _note_saved(self, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            address = tensor.untyped_storage().data_ptr()
            if address in self._seen:
                self._saved[address] = self._seen[address]
                self._peak = max(self._peak, sum(self._saved.values()))
        return tensor
