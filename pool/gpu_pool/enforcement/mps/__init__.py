"""Slices by classic MPS, NVIDIA's service that runs many processes on one device at once.

``daemon`` runs and asks one daemon, ``probe`` tries whether a device is closed, ``programs`` are NVIDIA's,
and ``classic`` is the tier, with what it keeps of each device.
"""

from gpu_pool.enforcement.mps.classic import MpsTier
from gpu_pool.enforcement.mps.probe import ProbeOutcome, attempt

__all__ = ["MpsTier", "ProbeOutcome", "attempt"]
