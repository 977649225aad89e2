"""What a kernel is launched with: its slice's variables, its framework caps, its command."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Final

from gpu_pool_client import Lease, Limit, Strength
from gpu_pool_client.framework_caps import caps, installed_frameworks, limit_words

#: The entry-point group of callables that add to a kernel's command what it loads for its user.
LAUNCHERS: Final = "gpu_pool.kernel_launchers"


def slice_environment(lease: Lease, python: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a kernel on ``lease`` needs in addition to its ``environment``.

    ``python`` is the first word of its command: the frameworks beside it decide
    which memory caps are set. Kernels of other languages get none.
    """
    limits = caps(
        installed_frameworks(python, environment),
        memory_mib=lease.memory_mib,
        device_memory_mib=lease.slices[0].device.memory_mib,
        environment=environment,
    )
    return {**with_caps(lease, limits).environment, **limits}


def with_caps(lease: Lease, limits: Mapping[str, str]) -> Lease:
    """State in the lease that framework caps hold its memory, where nothing firmer does."""
    words = limit_words(limits)
    if not words or lease.enforcement.memory.strength is not Strength.NONE:
        return lease
    memory = Limit(Strength.COOPERATIVE, words)
    return dataclasses.replace(lease, enforcement=dataclasses.replace(lease.enforcement, memory=memory))


def kernel_command(command: list[str]) -> list[str]:
    """Return the command with what an IPython kernel loads for its user, if that is installed."""
    prepare = _ipykernel_launcher()
    return prepare(command) if prepare else command


@functools.cache
def _ipykernel_launcher() -> Callable[[list[str]], list[str]] | None:
    for point in entry_points(group=LAUNCHERS, name="ipykernel"):
        launcher: Callable[[list[str]], list[str]] = point.load()
        return launcher
    return None
