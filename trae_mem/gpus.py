"""The cards that `resource.gpu_type` knows, so that a run can be held to the memory of one of them.

Memory is the nominal size in GiB; a real card shows a little less, and the runtime never plans
with more than the device reports. Link: what a pinned copy from the host reaches in practice on
the card's PCIe generation, in bytes/s (about 80 % of the nominal rate). Compute: dense bf16 (fp16
where there is no bf16) FLOP/s of the data sheet, accumulated in fp32, without sparsity. Device
memory's bandwidth is the data sheet's too; where a card is sold in several forms, the SXM one's.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

GIB = 1 << 30

_PCIE_3 = 12_500_000_000.0
_PCIE_4 = 25_000_000_000.0
_PCIE_5 = 52_000_000_000.0


@dataclass(frozen=True)
class Gpu:
    """One card."""

    name: str  # as the table below writes it
    memory_bytes: int  # nominal
    link_bytes_per_second: float  # host to device, from pinned memory
    flops: float  # dense bf16, or fp16 where there is none, per second
    memory_bytes_per_second: float  # of the device's own memory
    compute_capability: tuple[int, int]  # (8, 6) means sm_86
    multiprocessors: int  # SMs


def _gpu(
    name: str, gib: int, link: float, teraflops: float, gb_per_second: float, sm: str, count: int
) -> Gpu:
    capability = int(sm[:-1]), int(sm[-1])
    return Gpu(name, gib * GIB, link, teraflops * 1e12, gb_per_second * 1e9, capability, count)


GPUS: tuple[Gpu, ...] = (
    _gpu("P100", 16, _PCIE_3, 21, 732, "60", 56),
    _gpu("V100", 16, _PCIE_3, 112, 900, "70", 80),
    _gpu("V100-32GB", 32, _PCIE_3, 112, 900, "70", 80),
    _gpu("T4", 16, _PCIE_3, 65, 300, "75", 40),
    _gpu("A10", 24, _PCIE_4, 125, 600, "86", 72),
    _gpu("A30", 24, _PCIE_4, 165, 933, "80", 56),
    _gpu("A40", 48, _PCIE_4, 150, 696, "86", 84),
    _gpu("A100-40GB", 40, _PCIE_4, 312, 1555, "80", 108),
    _gpu("A100-80GB", 80, _PCIE_4, 312, 2039, "80", 108),
    _gpu("L4", 24, _PCIE_4, 121, 300, "89", 58),
    _gpu("L40S", 48, _PCIE_4, 362, 864, "89", 142),
    _gpu("H100", 80, _PCIE_5, 989, 3350, "90", 132),
    _gpu("H200", 140, _PCIE_5, 989, 4800, "90", 132),
    _gpu("GH200", 96, 400_000_000_000.0, 989, 4000, "90", 132),
    _gpu("B200", 180, _PCIE_5, 2250, 8000, "100", 148),
    _gpu("RTX 2080 Ti", 11, _PCIE_3, 54, 616, "75", 68),
    _gpu("RTX 3060", 12, _PCIE_4, 26, 360, "86", 28),
    _gpu("RTX 3080", 10, _PCIE_4, 60, 760, "86", 68),
    _gpu("RTX 3090", 24, _PCIE_4, 71, 936, "86", 82),
    _gpu("RTX 4070", 12, _PCIE_4, 58, 504, "89", 46),
    _gpu("RTX 4080", 16, _PCIE_4, 97, 717, "89", 76),
    _gpu("RTX 4090", 24, _PCIE_4, 165, 1008, "89", 128),
    _gpu("RTX 5080", 16, _PCIE_5, 113, 960, "120", 84),
    _gpu("RTX 5090", 32, _PCIE_5, 210, 1792, "120", 170),
    _gpu("RTX A4000", 16, _PCIE_4, 77, 448, "86", 48),
    _gpu("RTX A5000", 24, _PCIE_4, 111, 768, "86", 64),
    _gpu("RTX A6000", 48, _PCIE_4, 155, 768, "86", 84),
    _gpu("RTX 6000 Ada", 48, _PCIE_4, 364, 960, "89", 142),
    _gpu("RTX PRO 6000", 96, _PCIE_5, 504, 1792, "120", 188),
)

# What people write for a card, beside its name with any case, spaces, dashes and vendor words.
# A bare "A100" is the smaller card: a run that fits there fits both.
_ALIASES = {
    "a10g": "A10",
    "a100": "A100-40GB",
    "a10040g": "A100-40GB",
    "a10080g": "A100-80GB",
    "a100pcie80gb": "A100-80GB",
    "a100sxm80gb": "A100-80GB",
    "a100sxm480gb": "A100-80GB",
    "a100pcie40gb": "A100-40GB",
    "a100sxm440gb": "A100-40GB",
    "v10016gb": "V100",
    "v100sxm216gb": "V100",
    "v100sxm232gb": "V100-32GB",
    "h10080gb": "H100",
    "h10080gbhbm3": "H100",
    "h100sxm": "H100",
    "h100pcie": "H100",
    "h200sxm": "H200",
    "h200141gb": "H200",
    "2080ti": "RTX 2080 Ti",
    "3060": "RTX 3060",
    "3080": "RTX 3080",
    "3090": "RTX 3090",
    "rtx3090ti": "RTX 3090",
    "4070": "RTX 4070",
    "4080": "RTX 4080",
    "4090": "RTX 4090",
    "5080": "RTX 5080",
    "5090": "RTX 5090",
    "a4000": "RTX A4000",
    "a5000": "RTX A5000",
    "a6000": "RTX A6000",
    "6000ada": "RTX 6000 Ada",
}


def _normalise(name: str) -> str:
    text = name.lower()
    for word in ("nvidia", "geforce", "tesla"):
        text = text.replace(word, "")
    return "".join(letter for letter in text if letter.isalnum())


def find_gpu(name: str) -> Gpu:
    """The card of that name.

    Args:
        name: "A10", "NVIDIA GeForce RTX 4090", "a100-80gb"; case, spaces and dashes do not matter.

    Raises:
        ValueError: no such card in the table; the message names the closest ones.
    """
    by_key = {_normalise(gpu.name): gpu for gpu in GPUS}
    by_key |= {key: by_key[_normalise(full)] for key, full in _ALIASES.items()}
    key = _normalise(name)
    if key in by_key:
        return by_key[key]
    close = difflib.get_close_matches(key, by_key, n=3, cutoff=0.6)
    names = list(dict.fromkeys(by_key[match].name for match in close))
    if names:
        raise ValueError(f"unknown card {name!r}; did you mean {' or '.join(names)}?")
    known = ", ".join(gpu.name for gpu in GPUS)
    raise ValueError(f"unknown card {name!r}; known are {known}")
