"""Moves what parked kernels keep on their GPUs to host memory, and back: CUDA checkpoint.

The driver does it (``cuCheckpointProcess*``, driver 570 or newer). All calls of
it are made by a program of their own, :mod:`gpu_pool.enforcement.checkpoint.program`,
in a process for each device: CUDA must never be initialised in a Jupyter server,
whose forked children it would break.
"""

from gpu_pool.enforcement.checkpoint.driver_worker import DriverWorkers
from gpu_pool.enforcement.checkpoint.eligibility import CheckpointProbe, Hindrance
from gpu_pool.enforcement.checkpoint.suspension import (
    Broken,
    Checkpoint,
    NotRestored,
    NotSuspended,
    folder_beside,
)

__all__ = [
    "Broken",
    "Checkpoint",
    "CheckpointProbe",
    "DriverWorkers",
    "Hindrance",
    "NotRestored",
    "NotSuspended",
    "folder_beside",
]
