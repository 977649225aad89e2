"""A pod's kernel as its supervisor is told of it: which one is first, its connection, a pipe beside it."""

import contextlib
import errno
import json
import os
import socket
from pathlib import Path
from typing import (  # noqa: UP035 - for Python 3.8
    Any,
    Mapping,
    NamedTuple,
    Sequence,
)

#: Names the folder of the pipe to a kernel, and the pipe in it; ``burst`` knows both as well.
CHANGES_FOLDER, CHANGES = "GPU_POOL_RESIZE_DIR", "changes"
#: Bytes that are written to a pipe as one (PIPE_BUF), and the most that is read at once.
_MOST = 4096


class ConnectionFile:
    """The connection file, which a kernel that ends in good order removes."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._text = self._path.read_text()
        self.content = json.loads(self._text)  # type: dict[str, Any]

    def write(self, content: "Mapping[str, Any]") -> None:
        """Write another connection in its place, for this user alone."""
        self.content = dict(content)
        self._text = json.dumps(self.content)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self.restore()

    def restore(self) -> None:
        """Write it again where it is missing, for this user alone: a kernel would listen anywhere else."""
        with contextlib.suppress(OSError):  # it is there, mostly
            descriptor = os.open(str(self._path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as file:
                file.write(self._text)


class Ports:
    """The ports of a kernel, as its connection file has them."""

    def __init__(self, connection: "Mapping[str, Any]") -> None:
        self._ip = str(connection.get("ip") or "0.0.0.0")  # noqa: S104 - a pod's
        is_tcp = connection.get("transport", "tcp") == "tcp"
        found = {
            name: int(number) for name, number in connection.items() if name.endswith("_port") and is_tcp
        }
        self._all = list(found.values())
        #: Some kernels open the one for what is typed later, when they are asked nothing.
        self._at_once = [number for name, number in found.items() if name != "stdin_port"]

    def are_free(self) -> bool:
        """Whether nobody listens at any of them."""
        return not any(map(self._is_taken, self._all))

    def are_bound(self) -> bool:
        """Whether somebody listens at all that a kernel opens when it starts."""
        return all(map(self._is_taken, self._at_once))

    def _is_taken(self, port: int) -> bool:
        family = socket.AF_INET6 if ":" in self._ip else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Then only who listens is in the way, and it is in nobody's.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._ip, port))
            except OSError as error:
                return error.errno == errno.EADDRINUSE
        return False


class SliceChanges:
    """Tells the kernel what changes in the variables of its slice, also while a cell runs; see ``burst``."""

    def __init__(self, folder: str, environment: "dict[str, str]") -> None:
        """Make the pipe in this folder, and follow what the next kernel finds in its environment."""
        self._environment = environment
        self._pipe = None  # type: int | None
        path = os.path.join(folder, CHANGES)  # noqa: PTH118 - as os.open
        with contextlib.suppress(OSError):  # then a kernel knows what it was told at its start
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            # For reading as well, so that it can be written to before the kernel reads.
            self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
            environment[CHANGES_FOLDER] = folder

    def forget(self) -> None:
        """Drop what the last kernel has not read: the next one has it in its environment."""
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                while True:
                    os.read(self._pipe, _MOST)

    def tell(self, changed: "Mapping[str, Sequence[str | None]]") -> None:
        """Change variables, each from a value to another; None is for one that is not set."""
        for name, (before, now) in changed.items():
            if not name.startswith("GPU_POOL_") and self._environment.get(name) != before:
                continue  # the kernelspec has its own
            if now is None:
                self._environment.pop(name, None)
            else:
                self._environment[name] = now
        line = json.dumps(changed).encode() + b"\n"
        if self._pipe is not None and len(line) <= _MOST:
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(self._pipe, line)


def are_changes(told: object) -> bool:
    """Whether these are variables that can be said to a process, each with its value before and now."""
    if not isinstance(told, dict):
        return False
    if not all(isinstance(values, list) and len(values) == 2 for values in told.values()):
        return False
    texts = [*told, *(each for values in told.values() for each in values if each is not None)]
    can_be_said = all(isinstance(each, str) and "\0" not in each and each.isprintable() for each in texts)
    return can_be_said and all(name and "=" not in name for name in told)


class FirstKernel(NamedTuple):
    """The first kernel of a pod."""

    #: What its connection file says.
    connection: "Mapping[str, Any]"
    argv: "Sequence[str]"
    #: Its own variables, besides those of the pod.
    environment: "Mapping[str, str]"
    #: Where it starts; None for where the pod does.
    folder: "str | None"

    @classmethod
    def read(cls, content: bytes) -> "FirstKernel":
        """Read JSON with these names. Raises ``ValueError``. A folder that is not there is left out."""
        try:
            told = json.loads(content)
        except RecursionError as error:
            raise ValueError("too deep") from error
        told = told if isinstance(told, dict) else {}
        connection, argv, variables = (told.get(name) for name in ("connection", "argv", "environment"))
        if not isinstance(connection, dict) or not connection.get("key"):
            raise ValueError("a kernel without a key would carry out what anybody sends it")
        if not isinstance(argv, list) or not argv or not isinstance(variables, dict):
            raise ValueError("there is no command, or there are no variables")
        texts = [*argv, *variables, *variables.values()]
        if not all(map(_can_be_said, texts)) or any(not name or "=" in name for name in variables):
            raise ValueError("that cannot be said to a process")
        folder = told.get("folder")
        is_there = isinstance(folder, str) and Path(folder).is_dir()
        return cls(connection, argv, variables, folder if is_there else None)


def _can_be_said(text: object) -> bool:
    """Whether a process can have it as a word or a variable. Raises ``ValueError`` for what has no bytes."""
    return isinstance(text, str) and b"\0" not in os.fsencode(text)
