"""What streaming is doing, as figures and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from trae_mem.sizes import format_bytes

__all__ = ["Status"]


@dataclass(frozen=True)
class Status:
    """A model's streaming at one moment; ``str()`` makes a table of it.

    Bytes count weights only. Times count from the model's first pass; a stall is time that
    compute waited for a load.
    """

    units: int
    streamed_units: int
    resident_units: int
    slots: int
    prefetch: int
    source: str
    device: str
    bytes_on_device: int
    unit_bytes: int
    total_bytes: int
    acquires: int
    loads: int
    load_bytes: int
    load_seconds: float
    hits: int
    stalls: int
    stall_seconds: float
    stall_share: float
    elapsed_seconds: float
    written_back_bytes: int

    def __str__(self) -> str:
        rows = [
            ("units", f"{self.units}: {self.streamed_units} streamed, {self.resident_units} stay"),
            ("slots", f"{self.slots} of {format_bytes(self.unit_bytes)}, prefetch {self.prefetch}"),
            ("weights rest in", self.source),
            (
                "on the device",
                f"{format_bytes(self.bytes_on_device)} of {format_bytes(self.total_bytes)} "
                f"({self.device})",
            ),
            ("loads", f"{self.loads}, {format_bytes(self.load_bytes)}, {self.load_seconds:.2f} s"),
            ("hits", f"{self.hits} of {self.acquires} uses"),
            ("stalls", f"{self.stalls}, {self.stall_seconds:.2f} s"),
            ("stall share", f"{self.stall_share:.1%} of {self.elapsed_seconds:.2f} s"),
            ("written back", format_bytes(self.written_back_bytes)),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
