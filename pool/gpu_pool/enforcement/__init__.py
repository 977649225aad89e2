"""How slices are enforced on a machine, and the truth about it: tiers behind one interface."""

from gpu_pool.enforcement.machine import Isolation
from gpu_pool.enforcement.tiers import NOT_ON_HARDWARE, Tier, TierContext, TierFailed, TierStatement

__all__ = ["NOT_ON_HARDWARE", "Isolation", "Tier", "TierContext", "TierFailed", "TierStatement"]
