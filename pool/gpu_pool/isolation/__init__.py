"""How slices are enforced on a machine, and the truth about it: tiers behind one interface."""

from gpu_pool.isolation.machine import Isolation
from gpu_pool.isolation.tier import Statement, Tier, TierFailed

__all__ = ["Isolation", "Statement", "Tier", "TierFailed"]
