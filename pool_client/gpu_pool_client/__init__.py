"""How everybody talks to a pool of GPUs: the values, the errors, and ``connect``.

This package depends on nothing else of the project. It does no I/O of its own
beyond reading ``/proc`` to identify processes.
"""

from gpu_pool_client.durations import format_duration, parse_duration
from gpu_pool_client.errors import (
    BadRequest,
    GpuPoolError,
    LeaseGone,
    NeverFits,
    NotAllowed,
    OverQuota,
    PoolUnreachable,
    TimedOut,
)
from gpu_pool_client.outlook import Outlook
from gpu_pool_client.pods import KernelCommand, KernelPod, PodPhase
from gpu_pool_client.pool import Pool, connect
from gpu_pool_client.processes import Process
from gpu_pool_client.requests import (
    ACCEPTED,
    WHOLE,
    Filters,
    SliceRequest,
    format_gpus,
    format_memory,
    format_share,
    parse_request,
)
from gpu_pool_client.terms import Activity, Terms, WhenIdle
from gpu_pool_client.values import (
    SIMULATED,
    Device,
    DeviceStatus,
    EndedLease,
    EndReason,
    Enforcement,
    Failure,
    Holder,
    Lease,
    LeaseState,
    Limit,
    PoolStatus,
    Slice,
    Strength,
)

__all__ = [
    "ACCEPTED",
    "SIMULATED",
    "WHOLE",
    "Activity",
    "BadRequest",
    "Device",
    "DeviceStatus",
    "EndReason",
    "EndedLease",
    "Enforcement",
    "Failure",
    "Filters",
    "GpuPoolError",
    "Holder",
    "KernelCommand",
    "KernelPod",
    "Lease",
    "LeaseGone",
    "LeaseState",
    "Limit",
    "NeverFits",
    "NotAllowed",
    "Outlook",
    "OverQuota",
    "PodPhase",
    "Pool",
    "PoolStatus",
    "PoolUnreachable",
    "Process",
    "Slice",
    "SliceRequest",
    "Strength",
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
