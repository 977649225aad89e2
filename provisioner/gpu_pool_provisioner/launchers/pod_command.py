"""What a kernel's pod is told: its command, its variables, its folder, and where it listens."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePath
from string import Template
from typing import Any, Final

import zmq
from jupyter_client.connect import port_names

from gpu_pool_provisioner.environment import kernel_command

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
