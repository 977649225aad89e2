"""What comes of a kernel's wish for another size, in words and in variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpu_pool_client import (
    BadRequest,
    GpuPoolError,
    Lease,
    NotAllowed,
    SliceRequest,
    format_memory,
    parse_request,
)
from gpu_pool_provisioner.environment import slice_environment
from gpu_pool_provisioner.kernel_slice import KernelSlice

_USED: Final = (
    "The size cannot change while this kernel runs: it has used the GPU, or may have, and what it keeps "
    "there would be in the way."
)
_THEN: Final = "it then changes to {}, if that is free."


class SliceEnvironment:
    """The variables of its slice that a running kernel has."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], lease: Lease) -> None:
        """Take the kernel's command and what its environment is without a slice."""
        self._command = command
        self._environment = dict(environment)
        self.variables: Mapping[str, str] = slice_environment(lease, command, environment)

    def change(self, lease: Lease) -> dict[str, tuple[str | None, str | None]]:
        """Return what changes with the lease: by name the value before and now, None for none."""
        before, now = self.variables, slice_environment(lease, self._command, self._environment)
        self.variables = now
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return {name: (before.get(name), now.get(name)) for name in names}


async def grant(
    claim: KernelSlice, slice_variables: SliceEnvironment, size: str, *, can_restart: bool = True
) -> dict[str, Any]:
    """Change a running kernel's slice; return what the kernel does and says about it.

    ``granted`` is whether it has, or will have, what was wished for; ``words``
    are for its user; ``variables`` is what changes in its environment.
    ``can_restart`` is whether a restart of the kernel keeps its slice.
    """
    try:
        request_resize = parse_request(size)
        lease = await claim.resize(request_resize)
    except NotAllowed as error:
        if not await _is_in_use(claim):
            return _refused(error)
        return _later(claim, request_resize, can_restart)
    except GpuPoolError as error:
        return _refused(error)
    until = "" if can_restart else " A restart brings back the size it was started with."
    return {"granted": True, "words": _has(lease) + until, "variables": slice_variables.change(lease)}


def request_resize(claim: KernelSlice, size: str) -> str:
    """Keep a wish for another size until the kernel, in its pod, is restarted; return what its user reads."""
    try:
        wanted = parse_request(size)
    except GpuPoolError as error:
        return str(_refused(error)["words"])
    claim.wish = wanted
    return f"A pod cannot change its size while it runs. Restart the kernel: {_THEN.format(wanted)}"


async def _is_in_use(claim: KernelSlice) -> bool:
    """Whether it is the kernel itself that stands in the way."""
    try:
        assert claim.lease_id is not None
        return (await claim.pool.activity(claim.lease_id)).initialised is not False
    except GpuPoolError:
        return False


def _later(claim: KernelSlice, wish: SliceRequest, can_restart: bool) -> dict[str, Any]:
    if not can_restart:
        return {"granted": False, "words": f"{_USED} Start a kernel of that size instead."}
    claim.wish = wish
    return {"granted": True, "words": f"{_USED} Restart the kernel: {_THEN.format(wish)}"}


def _refused(error: GpuPoolError) -> dict[str, Any]:
    example = " Write, say, %gpu use 10%." if isinstance(error, BadRequest) else ""
    return {"granted": False, "words": f"{error}{example}"}


def _has(lease: Lease) -> str:
    if not lease.slices:
        return f"This kernel will have {lease.request.of_gpus} when its slice is back."
    names = ", ".join(part.device.label for part in lease.slices)
    memory = format_memory(lease.memory_mib)
    return f"This kernel now has {lease.request.of_gpus}: {memory} on {names}."
