"""The kernels of this process that hold a slice and do nothing, for one beside them that waits.

They are its user's own, and the nearest remedy: nobody else needs to end anything.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

from gpu_pool_provisioner.kernel_slice import kernel_name
from gpu_pool_provisioner.session import texts
from gpu_pool_provisioner.slice_state import SlicePhase

if TYPE_CHECKING:
    from gpu_pool_provisioner.provisioner import GPUPoolProvisioner

#: Kernels that are named at most.
_MOST_NAMED: Final = 3

_kernels: weakref.WeakSet[GPUPoolProvisioner] = weakref.WeakSet()


def remember(kernel: GPUPoolProvisioner) -> None:
    """Count a kernel among those of this process, for as long as it is there."""
    _kernels.add(kernel)


def say_idle_others(kernel: GPUPoolProvisioner) -> str:
    """Name the other kernels of this process that hold what ``kernel`` may wait for, and do nothing.

    May be called by any thread. Empty where there are none.
    """
    others = [each for each in list(_kernels) if each is not kernel]
    found = [idle for each in others if (idle := _idle(each, kernel)) is not None]
    return texts.idle_others(sorted(found)[:_MOST_NAMED])


def _idle(other: GPUPoolProvisioner, kernel: GPUPoolProvisioner) -> tuple[str, str] | None:
    """Return a kernel's name and the size that it holds, if it does nothing with it; None otherwise."""
    control, own = other.slice_control, kernel.slice_control
    if control is None or own is None:
        return None
    state = control.state
    if state.url != own.state.url or state.proxy.phase is not SlicePhase.HELD or state.lease is None:
        return None
    is_idle = state.proxy.idle.idle_since is not None
    name = other.notebook or kernel_name(other.kernel_spec.display_name)
    return (name, state.lease.request.size) if is_idle else None
