"""What a kernel is told, here and in a pod: its command, its variables, its folder, and where it listens."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path, PurePath
from string import Template
from typing import Any, Final

import zmq
from jupyter_client.connect import port_names

from gpu_pool_client import Enforcement, Holder, Lease, LeaseState, PoolStatus, SliceRequest
from gpu_pool_client._framework_caps import slice_environment
from gpu_pool_client._free import cut

#: Where kernels listen in their pods. Always the same, since a pod has an address of its own: so a
#: cluster's rules can let exactly these through. Below what systems give to outgoing connections.
PORTS: Final = dict(zip(port_names, range(9751, 9751 + len(port_names)), strict=True))
#: Stands in a command for where the pod finds its connection file.
CONNECTION_FILE: Final = "{connection_file}"
#: The name under which images have Python; not all have "python".
_PYTHON: Final = "python3"
_ANY_PYTHON: Final = re.compile(r"python[0-9.]*t?")
#: What proves to a JupyterHub who this server is: never a kernel's, whatever a kernelspec names.
_SECRETS: Final = ("JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN")
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
        self._at_start = self.variables
        self._has_changed: set[str] = set()

    @property
    def changed(self) -> dict[str, tuple[str | None, str | None]]:
        """All variables that have changed since the kernel's start, each with its value then and now.

        Also those that are as they were then: the kernel may have heard of them meanwhile.
        """
        names = sorted(self._has_changed)
        return {name: (self._at_start.get(name), self.variables.get(name)) for name in names}

    def change(self, lease: Lease) -> dict[str, tuple[str | None, str | None]]:
        """Return the variables that change, each with its value before and now; None where it is unset."""
        before = self.variables
        now = slice_environment(lease, self._python, self._environment, hook=self.takes_changes)
        self.variables = now
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        self._has_changed.update(names)
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


def pod_connection(outer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a connection file in a pod says, but for its ``ip``.

    ``outer`` is the frontends' connection: messages pass as they are, so the
    key that signs them is the same. The keys that encrypt are new every time.
    """
    public, secret = zmq.curve_keypair()
    kept = {name: outer[name] for name in ("key", "signature_scheme", "kernel_name") if outer.get(name)}
    keys = {"curve_publickey": public.decode(), "curve_secretkey": secret.decode()}
    return {**kept, **keys, "transport": "tcp", **PORTS}


def command_in_pod(command: Sequence[str], connection_file: str) -> tuple[str, ...]:
    """Return a kernel's command as a pod is to run it.

    Where its program lies on this machine means nothing there: it is found by
    its name, and every Python is ``python3``.
    """
    name = PurePath(command[0]).name
    program = _PYTHON if _ANY_PYTHON.fullmatch(name) else name
    arguments = [word.replace(connection_file, CONNECTION_FILE) for word in command[1:]]
    return tuple(kernel_command([program, *arguments], installed=True))


def command_here(command: Sequence[str], connection_file: str) -> tuple[str, ...]:
    """Return a kernel's command as a machine with the same files as this one is to run it."""
    return tuple(word.replace(connection_file, CONNECTION_FILE) for word in command)


def variables_in_pod(
    of_kernelspec: Mapping[str, str], here: Mapping[str, str], passed_on: Collection[str]
) -> dict[str, str]:
    """Return the variables of a kernel in a pod: the kernelspec's own, and those of ``here`` that are named.

    ``${NAME}`` in the kernelspec's stands for a variable that is passed on.
    """
    known = {name: here[name] for name in passed_on if name in here and name not in _SECRETS}
    own = {name: Template(value).safe_substitute(known) for name, value in of_kernelspec.items()}
    return {**known, **own}


def folder_in_pod(folder: str | None, home: Path | None) -> str | None:
    """Return where a kernel is to start, seen from the home; None for the home, and for what is elsewhere."""
    if not folder or home is None:
        return None
    path = Path(folder).resolve()
    base = home.resolve()
    return str(path.relative_to(base)) if path != base and path.is_relative_to(base) else None
