"""What a kernel is launched with: its slice's variables, its framework caps, its command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Final

from gpu_pool_client import Lease
from gpu_pool_client.framework_caps import installed_frameworks, lease_caps, with_caps

#: The entry-point group of callables that add to a kernel's command what it loads for its user.
LAUNCHERS: Final = "gpu_pool.kernel_launchers"


def slice_environment(lease: Lease, python: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a kernel on ``lease`` needs in addition to its ``environment``.

    ``python`` is the first word of its command: the frameworks beside it decide
    which memory caps are set. Kernels of other languages get none.
    """
    limits = lease_caps(installed_frameworks(python, environment), lease, environment)
    return {**with_caps(lease, limits).environment, **limits}


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
