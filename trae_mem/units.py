"""Which modules of a model are streamed: its repeated blocks, or what the caller names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from trae_mem.errors import ConfigError

__all__ = ["Unit", "find_places", "find_units"]

Wanted = Sequence[str | type[nn.Module]]


@dataclass(frozen=True)
class Unit:
    """Modules that are loaded together: one decoder layer, usually."""

    name: str
    module: nn.Module


def find_places(model: nn.Module) -> dict[nn.Module, tuple[nn.Module, str]]:
    """The parent of each module in ``model``, and its key there; the first of several."""
    places: dict[nn.Module, tuple[nn.Module, str]] = {}
    for parent in model.modules():
        for key, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, (parent, key))
    return places


def find_units(model: nn.Module, wanted: Wanted | None = None) -> list[Unit]:
    """The units of ``model``, in the order in which they are registered.

    Args:
        model: any module.
        wanted: ``None`` takes each ``ModuleList`` of the blocks that the model declares as
            indivisible (``_no_split_modules``, as transformers models do), or, without such a
            declaration, the ``ModuleList`` that holds most parameters. Otherwise names of
            modules, names of lists of modules (each element is a unit), class names or classes.

    Raises:
        ConfigError: no unit was found (names the candidates), or one lies inside another.
    """
    found = _repeated_blocks(model) if wanted is None else _named(model, wanted)
    outermost: list[Unit] = []
    for unit in found:
        if any(unit.module is other.module for other in outermost):
            continue
        for other in outermost:
            if unit.name.startswith(other.name + "."):
                raise ConfigError(
                    f"unit '{unit.name}' lies inside unit '{other.name}': "
                    "name either the one or the other"
                )
        outermost.append(unit)
    return outermost


def _lists(model: nn.Module) -> list[tuple[str, nn.ModuleList | nn.Sequential]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 0
    ]


def _elements(name: str, modules: Iterable[tuple[str, nn.Module]]) -> list[Unit]:
    prefix = f"{name}." if name else ""
    return [Unit(prefix + child, module) for child, module in modules]


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _repeated_blocks(model: nn.Module) -> list[Unit]:
    declared = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    lists = [(name, blocks) for name, blocks in _lists(model) if isinstance(blocks, nn.ModuleList)]
    units: list[Unit] = []
    for name, blocks in lists:
        if all(type(block).__name__ in declared for block in blocks):
            inside = any(name.startswith(unit.name + ".") for unit in units)
            units += [] if inside else _elements(name, blocks.named_children())
    if units:
        return units
    # Lists inside another list are parts of its blocks; the outer one comes first.
    largest = max(lists, key=lambda item: _bytes(item[1]), default=None)
    if largest is None or _bytes(largest[1]) == 0:
        raise ConfigError(_no_blocks(model))
    return _elements(largest[0], largest[1].named_children())


def _no_blocks(model: nn.Module) -> str:
    named = [(name, module) for name, module in model.named_modules() if name]
    heaviest = sorted(named, key=lambda item: _bytes(item[1]), reverse=True)[:5]
    candidates = ", ".join(f"'{name}' ({type(module).__name__})" for name, module in heaviest)
    return (
        f"{type(model).__name__} has no repeated blocks: no ModuleList holds parameters. "
        f"Name the modules to stream with units=[...]; candidates: {candidates or 'none'}"
    )


def _named(model: nn.Module, wanted: Wanted) -> list[Unit]:
    if isinstance(wanted, (str, type)):
        wanted = [wanted]
    if len(wanted) == 0:
        raise ConfigError("units=[] names no module; units=None finds the repeated blocks")
    modules = dict(model.named_modules(remove_duplicate=True))
    matched: set[str] = set()
    for item in wanted:
        names = [name for name, module in modules.items() if _matches(item, name, module)]
        if not names:
            text = item if isinstance(item, str) else item.__name__
            raise ConfigError(
                f"units={text!r} matches no module of {type(model).__name__}. {_no_blocks(model)}"
                if not _lists(model)
                else f"units={text!r} matches no module of {type(model).__name__}; it has lists of "
                f"modules at: {', '.join(repr(name) for name, _ in _lists(model)[:5])}"
            )
        matched.update(names)
    units: list[Unit] = []
    for name, module in modules.items():
        if name in matched:
            is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
            units += _elements(name, module.named_children()) if is_list else [Unit(name, module)]
    return units


def _matches(item: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if isinstance(item, type):
        return isinstance(module, item)
    return name == item or name.endswith("." + item) or type(module).__name__ == item
