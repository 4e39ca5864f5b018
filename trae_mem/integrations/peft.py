"""PEFT: notices when an adapter is merged into the weights that stream, or taken out again.

PEFT merges through ``weight.data += delta``, of which PyTorch keeps no trace. But each of its
layers lists the adapters that are merged into it (``merged_adapters``). A list that counts its
changes takes that list's place, since a merge that was taken back shows in the list no more, yet
has rounded the weights. A layer that was wrapped, merged and unwrapped again has no list left: so
each registration of a module counts that puts a layer or its wrapper in place. Nothing of PEFT is
imported.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from trae_mem.units import find_places

if TYPE_CHECKING:
    from trae_mem.hooks import UnitHooks

__all__ = ["MergeWatch"]

_LIST = "merged_adapters"


class _CountedList(list[str]):
    """A layer's list of merged adapters, and how often it was changed in the ways of PEFT."""

    changes = 0

    def append(self, adapter: str) -> None:
        self.changes += 1
        super().append(adapter)

    def pop(self, index: Any = -1) -> str:
        self.changes += 1
        return super().pop(index)

    def remove(self, adapter: str) -> None:
        self.changes += 1
        super().remove(adapter)

    def clear(self) -> None:
        self.changes += 1
        super().clear()


class _Watched:
    """The module at one place in the tree, and the changes of its list so far."""

    __slots__ = ("_changes", "_key", "_list", "_module", "_siblings")

    def __init__(self, siblings: dict[str, nn.Module | None], key: str) -> None:
        self._siblings, self._key = siblings, key
        self._note(siblings.get(key))

    def _note(self, module: nn.Module | None) -> None:
        self._module = module
        found = None if module is None else module.__dict__.get(_LIST)
        if module is not None and type(found) is list:
            found = _CountedList(found)
            module.__dict__[_LIST] = found
        self._list = found
        self._changes = getattr(found, "changes", 0)

    def changed(self) -> bool:
        """Whether adapters may have been merged or unmerged since the last call.

        Another module at the place counts: ``merge_and_unload`` merges and then puts the plain
        layer there, and a wrapper may have been merged before it was ever seen.
        """
        module = self._siblings.get(self._key)
        if module is self._module:
            found = None if module is None else module.__dict__.get(_LIST)
            if found is None and self._list is None:
                return False
            if found is self._list and getattr(found, "changes", 0) == self._changes:
                return False
        self._note(module)
        return True

    def restore(self) -> None:
        if self._module is not None and isinstance(self._list, _CountedList):
            self._module.__dict__[_LIST] = list(self._list)


class MergeWatch:
    """Watches the layers that own streamed weights, and what wraps them."""

    def __init__(self, model: nn.Module, units: list[UnitHooks]) -> None:
        places = find_places(model)
        self._watched: list[list[_Watched]] = []
        self._units: dict[nn.Module, UnitHooks] = {}  # by each module that is watched
        for unit in units:
            owners = dict.fromkeys(packed.owner for packed in unit.tensors)
            wrappers = dict.fromkeys(places[owner][0] for owner in owners if owner in places)
            modules = [m for m in dict.fromkeys((*owners, *wrappers)) if m in places]
            found = [places[module] for module in modules]
            self._watched.append([_Watched(parent._modules, key) for parent, key in found])
            self._units.update(dict.fromkeys(modules, unit))
        # The hook is global: it must not keep the model, and must go with it.
        reference = weakref.ref(self)

        def registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
            if (watch := reference()) is not None:
                watch._registered(parent, child)

        handle = register_module_module_registration_hook(registered)
        self._remove_hook = weakref.finalize(self, handle.remove)

    def _registered(self, parent: nn.Module, child: nn.Module | None) -> None:
        if isinstance(parent, (nn.ModuleList, nn.Sequential)):
            return  # a slice of the blocks is a new list of them: models take one in each forward
        for module in (parent, child):
            if module is not None and (unit := self._units.get(module)) is not None:
                unit.suspect = True

    def changed(self, unit: int) -> bool:
        """Whether an adapter was merged into the unit's weights, or taken out of them."""
        changed = False
        for place in self._watched[unit]:  # to the end: each change is told of once
            changed |= place.changed()
        return changed

    def close(self) -> None:
        """Gives PEFT its own lists back."""
        self._remove_hook()
        for watched in self._watched:
            for place in watched:
                place.restore()
        self._units, self._watched = {}, []
