"""The connection of a pod's kernel: its file, and the ports that are named in it."""

import contextlib
import errno
import json
import os
import socket
from pathlib import Path
from typing import Any, Mapping  # noqa: UP035 - for Python 3.8


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
