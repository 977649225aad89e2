"""Slices by classic MPS, NVIDIA's service that runs many processes on one device at once.

``facts`` is pure. ``control`` runs one daemon, ``questions`` talks to it,
``card`` looks at the device, ``probe`` tries whether it is closed, and ``tier``
puts them together.
"""

from gpu_pool.isolation.mps.probe import Outcome, attempt
from gpu_pool.isolation.mps.tier import MpsTier

__all__ = ["MpsTier", "Outcome", "attempt"]
