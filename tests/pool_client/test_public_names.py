"""The names that other people's code may import: removing one is a breaking change."""

import pkgutil
from types import ModuleType

import gpu_pool_client

PUBLIC = [
    "ACCEPTED",
    "SIMULATED",
    "WHOLE",
    "Activity",
    "BadRequest",
    "Beginning",
    "Device",
    "DeviceStatus",
    "TakingEffect",
    "EndReason",
    "EndedLease",
    "Enforcement",
    "Failure",
    "Hibernation",
    "Filters",
    "GpuPoolError",
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
    "Place",
    "OverQuota",
    "PodPhase",
    "PodDeviceUse",
    "Pool",
    "PoolStatus",
    "PreparedStatus",
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
    "format_memory",
    "format_gpus",
    "format_share",
    "parse_duration",
    "parse_request",
]


def test_the_public_names_are_these() -> None:
    assert sorted(gpu_pool_client.__all__) == sorted(PUBLIC)


def test_every_public_name_is_there() -> None:
    for name in PUBLIC:
        assert getattr(gpu_pool_client, name) is not None


def test_nothing_else_looks_public() -> None:
    found = {
        name
        for name, value in vars(gpu_pool_client).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert found == set(PUBLIC)


def test_no_module_is_public() -> None:
    names = [module.name for module in pkgutil.iter_modules(gpu_pool_client.__path__)]
    assert [name for name in names if not name.startswith("_")] == []
