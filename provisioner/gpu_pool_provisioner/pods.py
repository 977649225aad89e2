"""What of a kernelspec goes into a pod, where nothing is as it is on this machine.

Of this server's environment nothing goes there but what is named: it holds tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePath
from string import Template
from typing import Final

from gpu_pool_provisioner.environment import kernel_command

#: Stands in a command for where the pod finds its connection file.
CONNECTION_FILE: Final = "{connection_file}"
#: The name under which images have Python; not all have "python".
_PYTHON: Final = "python3"
_ANY_PYTHON: Final = re.compile(r"python[0-9.]*t?")
#: What proves to a JupyterHub who this server is: never a kernel's, whatever a kernelspec names.
_SECRETS: Final = ("JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN")


def command_in_pod(command: Sequence[str], connection_file: str) -> tuple[str, ...]:
    """Return a kernel's command as a pod is to run it.

    Where its program lies on this machine means nothing there: it is found by
    its name, and every Python is ``python3``.
    """
    name = PurePath(command[0]).name
    program = _PYTHON if _ANY_PYTHON.fullmatch(name) else name
    words = [word.replace(connection_file, CONNECTION_FILE) for word in command[1:]]
    return tuple(kernel_command([program, *words], installed=True))


def variables_in_pod(
    of_kernelspec: Mapping[str, str], here: Mapping[str, str], passed_on: Collection[str]
) -> dict[str, str]:
    """Return the variables of a kernel in a pod: the kernelspec's own, and those of ``here`` that are named.

    ``${NAME}`` in the kernelspec's stands for a variable that is passed on.
    """
    known = {name: here[name] for name in passed_on if name in here and name not in _SECRETS}
    own = {name: Template(value).safe_substitute(known) for name, value in of_kernelspec.items()}
    return {**known, **own}


def folder_in_pod(folder: str | None, home: str) -> str | None:
    """Return where a kernel is to start, seen from the home; None for the home, and for what is elsewhere."""
    if not folder:
        return None
    path = Path(folder).resolve()
    base = Path(home).resolve()
    return str(path.relative_to(base)) if path != base and path.is_relative_to(base) else None
