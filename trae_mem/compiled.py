"""Blocks that torch.compile compiled: their hooks stay outside of what is traced.

[Note: hooks and torch.compile] A hook that is traced breaks the graph in two. With a block that
was wrapped by ``torch.compile(block)`` first, or whose ``forward`` was compiled, our hooks are
outside already. But ``block.compile()`` compiles ``_call_impl``, hooks included, and a block that
is wrapped after its hooks were registered is called inside of the wrapper's trace. So before each
pass of the model, which is outside of every block, a :class:`Seat` looks where its block is entered
now: in the module itself, in the wrapper that took its place, or in the compiled call, which it
then encloses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Seat"]

_COMPILED_CALL = "_compiled_call_impl"  # what Module.compile sets and Module.__call__ calls


class _EnclosedCall:
    """A compiled call between the two hooks of its block."""

    def __init__(
        self,
        module: nn.Module,
        inner: Callable[..., Any],
        before: Callable[[nn.Module, Any], None],
        after: Callable[[nn.Module, Any, Any, Any], None],
    ) -> None:
        self.module, self.inner, self._before, self._after = module, inner, before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before(self.module, args)
        output = None
        try:
            output = self.inner(*args, **kwargs)
        finally:
            self._after(self.module, args, kwargs, output)
        return output


class Seat:
    """Where the hooks of one block are.

    Args:
        module: the block.
        place: its parent, and its key there; ``None`` for a block that has no parent.
        before: called as a forward pre-hook is.
        after: called as a forward hook with keyword arguments is, after an exception too.
    """

    def __init__(
        self,
        module: nn.Module,
        place: tuple[nn.Module, str] | None,
        before: Callable[[nn.Module, Any], None],
        after: Callable[[nn.Module, Any, Any, Any], None],
    ) -> None:
        self._module, self._place = module, place
        self._before, self._after = before, after
        self._handles: list[Any] = []
        self._entered: nn.Module | None = None  # whose hooks or compiled call we are in
        self._enclosed: _EnclosedCall | None = None
        self.follow()

    def follow(self) -> None:
        """Moves the hooks to where the block is entered now; cheap when that is where they are."""
        entered = self._module
        if self._place is not None:
            parent, key = self._place
            wrapper = parent._modules.get(key)
            if wrapper is not entered and getattr(wrapper, "_orig_mod", None) is entered:
                assert wrapper is not None
                entered = wrapper
        if entered is self._entered and entered.__dict__.get(_COMPILED_CALL) is self._enclosed:
            return
        self.leave()
        self._entered = entered
        compiled = entered.__dict__.get(_COMPILED_CALL)
        if compiled is not None:
            self._enclosed = _EnclosedCall(entered, compiled, self._before, self._after)
            entered.__dict__[_COMPILED_CALL] = self._enclosed
            return
        self._handles = [
            entered.register_forward_pre_hook(self._before, prepend=True),
            entered.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def leave(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._enclosed is not None:
            attributes, inner = self._enclosed.module.__dict__, self._enclosed.inner
            if attributes.get(_COMPILED_CALL) is self._enclosed:
                attributes[_COMPILED_CALL] = inner
            self._enclosed = None
