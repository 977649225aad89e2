"""How slices are enforced on a machine, and the truth about it: tiers behind one interface."""

from gpu_pool.isolation.tier import Statement, Tier, TierFailed

__all__ = ["Statement", "Tier", "TierFailed"]
