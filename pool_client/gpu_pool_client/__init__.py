"""How everybody talks to a pool of GPUs: the values, the errors, and ``connect``.

This package depends on nothing else of the project. It does no I/O of its own
beyond reading ``/proc`` to identify processes.
"""

from gpu_pool_client._devices import SIMULATED, Device, DeviceStatus, Enforcement, Limit, Slice, Strength
from gpu_pool_client._durations import format_duration, parse_duration
from gpu_pool_client._errors import (
    BadRequest,
    GpuPoolError,
    LeaseGone,
    NeverFits,
    NotAllowed,
    OverQuota,
    PoolUnreachable,
    TimedOut,
)
from gpu_pool_client._leases import (
    Activity,
    EndedLease,
    EndReason,
    Failure,
    Hibernation,
    Holder,
    Lease,
    LeaseState,
    Outlook,
    Place,
    PoolStatus,
    PreparedStatus,
    TakingEffect,
    Terms,
    WhenIdle,
)
from gpu_pool_client._pods import MemoryMove, MoveOutcome, MoveResult, MoveVerb, PodDeviceUse
from gpu_pool_client._pods import Beginning, KernelCommand, KernelPod, PodPhase
from gpu_pool_client._pool import Pool, connect
from gpu_pool_client._processes import Process
from gpu_pool_client._requests import (
    ACCEPTED,
    WHOLE,
    Filters,
    SliceRequest,
    format_gpus,
    format_memory,
    format_share,
    parse_request,
)

__all__ = [
    "ACCEPTED",
    "SIMULATED",
    "WHOLE",
    "Activity",
    "BadRequest",
    "Beginning",
    "Device",
    "DeviceStatus",
    "EndReason",
    "EndedLease",
    "Enforcement",
    "Failure",
    "Filters",
    "GpuPoolError",
    "Hibernation",
    "Holder",
    "KernelCommand",
    "KernelPod",
    "Lease",
    "LeaseGone",
    "LeaseState",
    "Limit",
    "MemoryMove",
    "MoveOutcome",
    "MoveResult",
    "MoveVerb",
    "NeverFits",
    "NotAllowed",
    "Outlook",
    "OverQuota",
    "Place",
    "PodDeviceUse",
    "PodPhase",
    "Pool",
    "PoolStatus",
    "PoolUnreachable",
    "PreparedStatus",
    "Process",
    "Slice",
    "SliceRequest",
    "Strength",
    "TakingEffect",
    "Terms",
    "TimedOut",
    "WhenIdle",
    "connect",
    "format_duration",
    "format_gpus",
    "format_memory",
    "format_share",
    "parse_duration",
    "parse_request",
]
