"""Which GPU is simulated, and how: the arguments of ``activate`` and the command's options.

The simulator itself reads numbers from one environment variable; here are the names and units that
people write.
"""

from __future__ import annotations

from dataclasses import dataclass

from trae_mem.errors import ConfigError
from trae_mem.gpus import find_gpu
from trae_mem.sizes import parse_bytes

__all__ = ["MODES", "Settings", "parse_rate"]

MODES = ("numeric", "dry")


def parse_rate(rate: float | str) -> float:
    """Bytes a second from a number or from text such as ``"25GB/s"``; 0 means no limit.

    Raises:
        ConfigError: for a negative number, or text that is not a rate.
    """
    if isinstance(rate, str):
        try:
            return float(parse_bytes(rate.strip().removesuffix("/s")))
        except ConfigError:
            raise ConfigError(f"not a rate: {rate!r}; write bytes/s or '25GB/s'") from None
    if rate < 0:
        raise ConfigError(f"a rate cannot be negative: {rate}")
    return float(rate)


@dataclass(frozen=True)
class Settings:
    """One simulated machine; all of its GPUs are alike.

    Args:
        gpu: a card's name, see :mod:`trae_mem.gpus`.
        devices: how many of them.
        memory: bytes or text ("24GiB"); default: the card's.
        link: bytes/s or text ("25GB/s") in each direction, 0 for no limit; default: the card's.
            Only paced copies take time.
        mode: "numeric" runs kernels on the CPU; "dry" runs none, and memory is only counted.
        seed: of the random delays.
        delay_us: the longest random delay before each copy, kernel and completion of an event.
        poison: fill fresh, unmapped and freed device memory with 0xFF, which reads as NaN.
        pace: copies and kernels take the time that the card would need.
    """

    gpu: str = "A10"
    devices: int = 1
    memory: int | str | None = None
    link: float | str | None = None
    mode: str = "numeric"
    seed: int = 0
    delay_us: int = 0
    poison: bool = False
    pace: bool = False

    def text(self) -> str:
        """What the environment variable ``TRAE_MEM_SIM`` says.

        Raises:
            ConfigError: a setting makes no sense.
        """
        if self.mode not in MODES:
            raise ConfigError(f"mode {self.mode!r}; there are {' and '.join(MODES)}")
        if self.devices < 1 or self.delay_us < 0:
            raise ConfigError(
                f"devices={self.devices}, delay_us={self.delay_us}: at least 1, at least 0"
            )
        try:
            card = find_gpu(self.gpu)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        memory = card.memory_bytes if self.memory is None else parse_bytes(self.memory)
        link = card.link_bytes_per_second if self.link is None else parse_rate(self.link)
        major, minor = card.compute_capability
        values = {
            "gpu": card.name,
            "devices": self.devices,
            "memory": memory,
            "link": f"{link:.0f}",
            "flops": f"{card.flops:.0f}",
            "bandwidth": f"{card.memory_bytes_per_second:.0f}",
            "major": major,
            "minor": minor,
            "sms": card.multiprocessors,
            "mode": self.mode,
            "seed": self.seed,
            "delay_us": self.delay_us,
            "poison": int(self.poison),
            "pace": int(self.pace),
        }
        return ",".join(f"{key}={value}" for key, value in values.items())
