"""What a kernel is told of its slice: its command, and the variables of the slice while it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Final

from gpu_pool_client import Enforcement, Holder, Lease, LeaseState, PoolStatus, SliceRequest
from gpu_pool_client._framework_caps import slice_environment
from gpu_pool_client._free import cut

#: What a kernel is to show its user below the first cell; see gpu_pool_kernels.inkernel.extension.
NOTICE_VARIABLE: Final = "GPU_POOL_NOTICE"
#: The entry-point group of callables that add to a kernel's command what it loads for its user,
#: and what sets the limits of frameworks that read none from the environment.
LAUNCHERS: Final = "gpu_pool.kernel_launchers"
#: By which a kernel knows the process that has started it, with which it ends.
PARENT_VARIABLE: Final = "JPY_PARENT_PID"


class SliceEnvironment:
    """The command of a kernel on its slice, and the variables of the slice while it runs."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], lease: Lease) -> None:
        """Take the kernel's command, and what its environment is without a slice.

        The frameworks beside the first word of its command decide which memory
        caps are set. Kernels of other languages get none.
        """
        #: The command, with what an IPython kernel loads for its user.
        self.command = kernel_command(list(command))
        self._python = command[0]
        self._environment = dict(environment)
        #: Whether the running kernel can be told of other variables.
        self.takes_changes = self.command != list(command)
        self.variables: Mapping[str, str] = slice_environment(
            lease, self._python, self._environment, hook=self.takes_changes
        )

    def change(self, lease: Lease) -> dict[str, tuple[str | None, str | None]]:
        """Return the variables that change, each with its value before and now; None where it is unset."""
        before = self.variables
        now = slice_environment(lease, self._python, self._environment, hook=self.takes_changes)
        self.variables = now
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return {name: (before.get(name), now.get(name)) for name in names}


def expected_lease(request: SliceRequest, holder: Holder, status: PoolStatus) -> Lease:
    """Return what a request would probably be granted: of each device the same, and enforced as others are.

    It serves to foresee a slice's environment, and nothing else. Nothing is asked of the pool.
    """
    devices = [each.device for each in status.devices][: request.count]
    slices = tuple(cut(request, device) for device in devices)
    enforcement = next((each.enforcement for each in status.leases if each.slices), Enforcement())
    return Lease("", "", request, holder, LeaseState.HELD, 0.0, slices=slices, enforcement=enforcement)


def kernel_command(command: list[str], *, installed: bool = False) -> list[str]:
    """Return the command with what an IPython kernel loads for its user, if that is installed.

    With ``installed`` the kernel is to find it where it runs, in an image.
    """
    prepare = launcher("ipykernel")
    prepared: list[str] = prepare(command, installed=installed) if prepare else command
    return prepared


def is_ipython(command: Sequence[str]) -> bool:
    """Whether a command starts an IPython kernel, as far as that can be seen."""
    return kernel_command(list(command), installed=True) != list(command)


@functools.cache
def launcher(name: str) -> Callable[..., Any] | None:
    """Return what is installed under this name of the group of :data:`LAUNCHERS`; None where nothing is."""
    for point in entry_points(group=LAUNCHERS, name=name):
        found: Callable[..., Any] = point.load()
        return found
    return None
