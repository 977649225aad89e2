"""The small part that needs root: ``program`` runs as root, ``client`` is how the pool calls it.

``program`` imports nothing of ours, so that it can be read and installed alone.
"""

from gpu_pool.enforcement.privileged.client import PROGRAM, Privileged

__all__ = ["PROGRAM", "Privileged"]
