"""The public functions: streaming on, off, for a while; what it does; weights that changed."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from trae_mem.devices import find_target
from trae_mem.errors import ConfigError
from trae_mem.packing import plan_packs
from trae_mem.placement import Placement
from trae_mem.residency import budget_bytes, choose_resident, slot_count
from trae_mem.runtime import Runtime, find_runtime, require_runtime
from trae_mem.stats import Status
from trae_mem.units import Wanted, find_units

if TYPE_CHECKING:
    from trae_mem import _native

__all__ = ["disable", "enable", "offloaded", "refresh", "status"]


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
        device: where the model computes: ``"cuda"``, ``"cuda:1"``, ``"cpu"``. ``None``: the GPU
            where there is one, else the CPU, whose memory is then the device. What does not
            stream is brought there, so the model may be built on the host. A
            ``trae_mem.HostDevice`` chooses its capacity and the speed of its link.
        source: where weights rest. ``"ram"``: packed in host memory; ``"file"``: in the
            safetensors files they are mapped from, ``"auto"``: file where that is so, else ram. A
            path names the checkpoint that the model was loaded from. ``"empty"``: weights on the
            meta device get host memory that is reserved and never touched, for dry runs of
            models whose values do not matter.
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
        TraeMemError: the GPU's driver or the container lacks what streaming needs.
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
    target = find_target(device, model)
    found = find_units(model, units)
    slots = slot_count(slots, prefetch, len(found))
    packs = plan_packs(model, found)
    resident = choose_resident(
        [pack.bytes for pack in packs], budget_bytes(budget, target.native), slots
    )
    streamed = (packed.tensor for pack in packs for packed in pack.tensors)
    placement = Placement(model, streamed, target.device)
    try:
        placement.adopt_meta(model, source)
        placement.place(model)
        Runtime(
            model,
            packs,
            source,
            target,
            placement,
            prefetch=prefetch,
            slots=slots,
            resident=resident,
            poison=debug == "poison",
        )
    except BaseException:
        placement.restore()
        raise
    if note := getattr(target.native, "pinning_note", ""):
        warnings.warn(note, stacklevel=2)
    return model


def disable(model: nn.Module) -> nn.Module:
    """Ends streaming: takes all hooks off, and every tensor is on the device where it was before.

    Weights that rested on the host stay where they rest.

    Raises:
        ConfigError: the model does not stream.
    """
    require_runtime(model).close()
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
    return require_runtime(model).status()


def refresh(model: nn.Module) -> None:
    """Loads every unit again before its next use.

    Changes of weights between steps are noticed by themselves: in-place operations, assignments
    to ``param.data``, ``load_state_dict``, merges of PEFT adapters. Not so a write *through*
    ``param.data`` (``param.data.mul_(2)``), of which PyTorch keeps no trace; call this after one.

    Raises:
        ConfigError: the model does not stream.
    """
    for hooks in require_runtime(model).units:
        hooks.suspect = True
