"""Slices by classic MPS, NVIDIA's service that runs many processes on one device at once.

``facts`` is pure. ``control`` runs one daemon, ``questions`` talks to it,
``card`` looks at the device, ``probe`` tries whether it is closed, and ``tier``
puts them together.
"""

from gpu_pool.enforcement.mps.classic import MpsTier
from gpu_pool.enforcement.mps.probe import ProbeOutcome, attempt

__all__ = ["MpsTier", "ProbeOutcome", "attempt"]
