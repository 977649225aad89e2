"""How slices are enforced on a machine, and the truth about it: tiers behind one interface."""

from gpu_pool.enforcement.machine import Isolation
from gpu_pool.enforcement.tiers import Tier, TierFailed, TierStatement

__all__ = ["Isolation", "Tier", "TierFailed", "TierStatement"]
