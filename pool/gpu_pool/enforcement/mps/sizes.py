"""What is known of classic MPS by card, driver and slice. Pure.

The sources are named in docs/explanation/isolation-mps.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from gpu_pool_client import WHOLE, Device, Slice

#: CUDA contexts at once: before Volta, from Volta on, and from CUDA 13.1 (driver R590) on.
_BEFORE_VOLTA: Final = 16
_SINCE_VOLTA: Final = 48
_SINCE_R590: Final = 60
_R590: Final = 590

#: Models of Fermi, Kepler, Maxwell and Pascal, the last of which came out in 2018: the list is complete.
_OLD_MODEL: Final = re.compile(
    r"\b(?:[CKMP][0-9]{1,4}[A-Z]{0,2}|GP100|GT[XS]? ?(?:[1-9][0-9]{2}|10[0-9]{2})[A-Z]*|TITAN X[Pp]?|"
    r"TITAN Black|TITAN Z|GTX TITAN)\b",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class MpsSize:
    """What each process on a device may use at most."""

    memory_mib: int
    #: Of the device's threads, 1 to 100.
    percent: int


#: While nobody holds a slice of a device, nobody can use it either: no context fits.
SHUT: Final = MpsSize(1, 1)


def is_old(device: Device) -> bool:
    """Whether the card is older than Volta: MPS then limits neither memory nor threads."""
    return _OLD_MODEL.search(device.model) is not None


def contexts(device: Device) -> int:
    """Return how many CUDA contexts one MPS server admits on this card with this driver."""
    if is_old(device):
        return _BEFORE_VOLTA
    branch = re.match(r"[0-9]+", device.driver)
    return _SINCE_R590 if branch and int(branch[0]) >= _R590 else _SINCE_VOLTA


def size_of(part: Slice) -> MpsSize:
    """Return the limits of a slice. Percentages are whole: 2.5% is held to 2%, 0.5% to 1%."""
    return MpsSize(part.memory_mib, max(1, part.milli * 100 // WHOLE))
