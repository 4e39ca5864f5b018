"""Every exception that trae_mem raises on purpose.

A message says what failed, with numbers and names, then why, then at most three fixes, each a
literal setting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "BudgetError",
    "ConfigError",
    "NativeLibraryError",
    "OutOfMemoryError",
    "TraeMemError",
    "TransferError",
    "WeightFileError",
]


class TraeMemError(Exception):
    """Base of all errors of trae_mem."""


class ConfigError(TraeMemError, ValueError):
    """An argument or a configuration key does not make sense."""


class BudgetError(TraeMemError):
    """The memory budget is smaller than streaming needs.

    Attributes:
        minimum: the smallest budget that would do, in bytes.
    """

    def __init__(self, message: str, *, minimum: int) -> None:
        super().__init__(message)
        self.minimum = minimum


class NativeLibraryError(TraeMemError, ImportError):
    """The compiled part is missing or belongs to another version of the Python part."""


class TransferError(TraeMemError):
    """The device or the operating system failed an operation, a copy for example.

    The step in which it is raised is lost; the next one starts clean.
    """


class WeightFileError(TraeMemError):
    """A file of weights is missing, truncated, changed or unreadable."""


if TYPE_CHECKING:
    import torch

    class OutOfMemoryError(TraeMemError, torch.OutOfMemoryError):
        """The device, or the limit that was set for it, has no room."""

else:

    def __getattr__(name: str) -> Any:
        # Made on first use: importing torch takes seconds, and most errors do not need it.
        if name != "OutOfMemoryError":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import torch

        class OutOfMemoryError(TraeMemError, torch.OutOfMemoryError):
            """The device, or the limit that was set for it, has no room."""

        OutOfMemoryError.__module__ = __name__
        OutOfMemoryError.__qualname__ = name
        globals()[name] = OutOfMemoryError
        return OutOfMemoryError
