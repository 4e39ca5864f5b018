"""PEFT: notices when an adapter is merged into the weights that stream, or taken out again.

PEFT merges through ``weight.data += delta``, of which PyTorch keeps no trace. But each of its
layers lists the adapters that are merged into it (``merged_adapters``), so comparing the lengths
of those lists before each pass of the model tells. Nothing of PEFT is imported or patched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from trae_mem.hooks import UnitHooks

__all__ = ["MergeWatch"]


def _merged(module: nn.Module | None) -> int:
    return len(getattr(module, "merged_adapters", ()))


class _Watched:
    """The module at one place in the tree, and how many adapters were merged into it."""

    __slots__ = ("_key", "_merged", "_module", "_siblings")

    def __init__(self, siblings: dict[str, nn.Module | None], key: str) -> None:
        self._siblings, self._key = siblings, key
        self._module = siblings.get(key)
        self._merged = _merged(self._module)

    def changed(self) -> bool:
        """Whether adapters were merged or unmerged since the last call.

        ``merge_and_unload`` merges and then puts the plain layer in the wrapper's place: look at
        the module that was there, then at the one that is.
        """
        changed = _merged(self._module) != self._merged
        module = self._siblings.get(self._key)
        if module is not self._module:
            self._module = module
            self._merged = _merged(module)
        elif changed:
            self._merged = _merged(module)
        return changed


class MergeWatch:
    """Watches the layers that own streamed weights, and what wraps them."""

    def __init__(self, model: nn.Module, units: list[UnitHooks]) -> None:
        places: dict[nn.Module, tuple[dict[str, nn.Module | None], str]] = {}
        parents: dict[nn.Module, nn.Module] = {}
        for parent in model.modules():
            for key, child in parent._modules.items():
                if child is not None:
                    places.setdefault(child, (parent._modules, key))
                    parents.setdefault(child, parent)
        self._watched: list[tuple[UnitHooks, list[_Watched]]] = []
        for unit in units:
            owners = dict.fromkeys(packed.owner for packed in unit.tensors)
            wrappers = dict.fromkeys(parents[owner] for owner in owners if owner in parents)
            modules = [m for m in (*owners, *wrappers) if m in places]
            self._watched.append((unit, [_Watched(*places[module]) for module in modules]))

    def mark_changed(self) -> None:
        """Marks the units whose weights an adapter was merged into, or taken out of."""
        for unit, watched in self._watched:
            for place in watched:
                if place.changed():
                    unit.suspect = True
