"""Slices of any size by MPS version 3 and control groups, for driver R615 and newer.

``daemon`` talks to MPS, ``tier`` puts it together with the control groups.
"""

from gpu_pool.enforcement.mps_namespaces.cgroup_tier import CgroupTier

__all__ = ["CgroupTier"]
