"""Where the real kernel listens: ports and a connection file of its own, which nobody else is given."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from jupyter_client.connect import port_names
from jupyter_core.paths import secure_write

from gpu_pool_provisioner.ports import PortReservation

#: Loopback TCP, which kernels of every language speak.
_IP: Final = "127.0.0.1"


class BackendConnection:
    """The connection between the proxy and the real kernel; keys are those of the frontends' connection.

    The file lies in a private folder beside the frontends' connection file and
    has its name, by which programs in a kernel find out the kernel's id.
    """

    def __init__(self, outer_file: str) -> None:
        """Reserve the ports and write the file. Raises ``OSError``."""
        outer = Path(outer_file).resolve()
        self._ports = PortReservation(_IP, len(port_names))
        self._folder = Path(tempfile.mkdtemp(prefix=".gpu-pool-", dir=outer.parent))
        #: What the file says.
        self.connection: dict[str, Any] = {
            **json.loads(outer.read_text()),
            "ip": _IP,
            "transport": "tcp",
            **dict(zip(port_names, self._ports.ports, strict=True)),
        }
        self.file = str(self._folder / outer.name)
        with secure_write(self.file) as file:
            json.dump(self.connection, file)
        #: How a command may name the frontends' file, which may lie behind a link. The longest first, since
        #: what is relative may be a part of the others.
        names = {str(outer), str(Path(outer_file).absolute()), outer_file}
        self._outer_names = sorted(names, key=len, reverse=True)

    def command(self, command: list[str]) -> list[str]:
        """Return a kernel's command with this connection file in place of the frontends'."""
        return [self._with_own_file(word) for word in command]

    def _with_own_file(self, word: str) -> str:
        name = next((name for name in self._outer_names if name in word), None)
        return word if name is None else word.replace(name, self.file)

    def close(self) -> None:
        """Remove the file and let go of the ports. May be repeated."""
        self._ports.close()
        shutil.rmtree(self._folder, ignore_errors=True)
