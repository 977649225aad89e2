"""Moves what parked kernels keep on their GPUs to host memory, and back: CUDA checkpoint.

The driver does it (``cuCheckpointProcess*``, driver 570 or newer). All calls of
it are made by a program of their own, :mod:`gpu_pool.enforcement.checkpoint.program`,
for as long as one suspension or restoration takes: CUDA must never be
initialised in a Jupyter server, whose forked children it would break.
"""

from gpu_pool.enforcement.checkpoint.driver_calls import Broken, NotRestored, NotSuspended, Suspended
from gpu_pool.enforcement.checkpoint.eligibility import Hindrance
from gpu_pool.enforcement.checkpoint.probe import CheckpointProbe
from gpu_pool.enforcement.checkpoint.suspension import Checkpoint, folder_beside

__all__ = [
    "Broken",
    "Checkpoint",
    "CheckpointProbe",
    "Hindrance",
    "NotRestored",
    "NotSuspended",
    "Suspended",
    "folder_beside",
]
