"""What a kernel is launched with: its slice's variables, its framework caps, its command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Final

from gpu_pool_client import Lease
from gpu_pool_client.framework_caps import installed_frameworks, lease_caps, with_caps

#: The entry-point group of callables that add to a kernel's command what it loads for its user,
#: and what sets the limits of frameworks that read none from the environment.
LAUNCHERS: Final = "gpu_pool.kernel_launchers"


def slice_environment(lease: Lease, command: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a kernel on ``lease`` needs in addition to its ``environment``.

    The frameworks beside the first word of its command decide which memory caps
    are set. Kernels of other languages get none.
    """
    command = list(command)
    found = installed_frameworks(command[0], environment)
    limits = lease_caps(found, lease, environment, hook=kernel_command(command) != command)
    return {**with_caps(lease, limits).environment, **limits}


def kernel_command(command: list[str], *, installed: bool = False) -> list[str]:
    """Return the command with what an IPython kernel loads for its user, if that is installed.

    With ``installed`` the kernel is to find it where it runs, in an image.
    """
    prepare = _ipykernel_launcher()
    return prepare(command, installed=installed) if prepare else command


@functools.cache
def _ipykernel_launcher() -> Callable[..., list[str]] | None:
    for point in entry_points(group=LAUNCHERS, name="ipykernel"):
        launcher: Callable[..., list[str]] = point.load()
        return launcher
    return None
