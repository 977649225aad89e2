"""The kernels of this process that hold a slice and do nothing, for one beside them that waits.

They are its user's own, and the nearest remedy: nobody else needs to end anything.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, Protocol

from gpu_pool_provisioner.driver import SessionDriver
from gpu_pool_provisioner.session import texts
from gpu_pool_provisioner.session.view import SlicePhase
from gpu_pool_provisioner.settings import kernel_name


class SliceKernel(Protocol):
    """What is to be known of a kernel of this process: its provisioner."""

    notebook: str
    kernel_spec: Any

    @property
    def url(self) -> str:
        """The URL of its pool."""

    @property
    def driver(self) -> SessionDriver | None:
        """Its session; None where nothing is known of it."""


#: Kernels that are named at most.
_MOST_NAMED: Final = 3

_kernels: weakref.WeakSet[SliceKernel] = weakref.WeakSet()


def remember(kernel: SliceKernel) -> None:
    """Count a kernel among those of this process, for as long as it is there."""
    _kernels.add(kernel)


def say_idle_others(kernel: SliceKernel) -> str:
    """Name the other kernels of this process that hold what ``kernel`` may wait for, and do nothing.

    May be called by any thread. Empty where there are none.
    """
    others = [each for each in list(_kernels) if each is not kernel]
    found = [idle for each in others if (idle := _idle(each, kernel)) is not None]
    return texts.idle_others(sorted(found)[:_MOST_NAMED])


def _idle(other: SliceKernel, kernel: SliceKernel) -> tuple[str, str] | None:
    """Return a kernel's name and the size that it holds, if it does nothing with it; None otherwise."""
    driver = other.driver
    if driver is None or other.url != kernel.url:
        return None
    state = driver.state
    if state.phase is not SlicePhase.HELD or state.lease is None:
        return None
    name = other.notebook or kernel_name(other.kernel_spec.display_name)
    return (name, state.lease.request.size) if state.idle.idle_since is not None else None
