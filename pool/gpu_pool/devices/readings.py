"""What a device was seen to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """What one device does now. None is what it does not tell."""

    #: In bytes, without what the driver keeps for itself.
    memory_used: int | None = None
    #: The part of the last moments (1/6 s to 1 s, by the card) in which anything computed, 0 to 1.
    utilisation: float | None = None
    #: In degrees Celsius.
    temperature: float | None = None
    #: In watts.
    power: float | None = None
