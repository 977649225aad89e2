"""What this process has open.

By what it is and not by how much: a thread of another test may still talk to
a service that is gone, and opens and closes sockets of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path


def open_below(folder: Path) -> list[str]:
    """Return what is open of a folder: files in it, and itself."""
    found = []
    for file in _descriptors():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{file}"))
    return [path for path in found if Path(path).is_relative_to(folder)]


def connections_to(path: Path) -> int:
    """Return how many connections to a Unix socket are open."""
    return sum(_told(file, socket.socket.getpeername) == str(path) for file in _descriptors())


def sockets_at(port: int) -> int:
    """Return how many sockets are bound to a port of this machine alone."""
    return sum(_told(file, socket.socket.getsockname) == ("127.0.0.1", port) for file in _descriptors())


def _descriptors() -> Iterator[int]:
    return (int(each.name) for each in Path("/proc/self/fd").iterdir())


def _told(file: int, ask: Callable[[socket.socket], object]) -> object:
    # It is no socket, not connected, or closed since it was listed.
    with contextlib.suppress(OSError):
        same = socket.socket(fileno=file)
        try:
            return ask(same)
        finally:
            same.detach()
    return None
