"""Where the socket of a pool's service is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from gpu_pool_client._errors import BadRequest
from gpu_pool_client._pool import split_url

_NAME: Final = "gpu-pool/gpu-pool.sock"
#: The socket of a machine's service, which root runs.
SYSTEM_SOCKET: Final = Path("/run", _NAME)
#: Bytes of the longest path that a socket can have (unix(7): sun_path, with its end).
LONGEST_PATH: Final = 107


def own_socket() -> Path | None:
    """Return where a service of this user listens by default; None where there is no place for it."""
    if os.geteuid() == 0:
        return SYSTEM_SOCKET
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, _NAME) if runtime else None


def socket_path(url: str) -> Path:
    """Return the socket that a ``unix:`` URL names; without a path, this user's own or the machine's."""
    parts = split_url(url)
    text = "" if parts is None else unquote(parts.netloc + parts.path)
    if parts is None or parts.query or parts.fragment or (text and not text.isprintable()):
        raise BadRequest(f"{url[:200]!a} is not the URL of a pool's service.", "Accepted: unix:[path].")
    if text:
        return check_length(Path(text).expanduser().absolute())
    own = own_socket()
    return own if own is not None and own.exists() else SYSTEM_SOCKET


def check_length(path: Path) -> Path:
    """Return the path of a socket. Raises ``BadRequest`` if it is longer than sockets' paths can be."""
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise BadRequest(
            f"The path of a socket has at most {LONGEST_PATH} bytes; {str(path)[:200]!a} has more.",
            "Choose a folder with a shorter path.",
        )
    return path
