"""Pools that another process serves: ``gpu-pool serve`` on a Unix socket.

Service and client share one definition of what travels between them, ``wire``
and ``problems``. tornado and pydantic are imported here and in the service
only, by the first ``connect`` to such a pool: importing ``gpu_pool_client``
costs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_pool_client.remote.client import UnixPool


def open_unix(url: str) -> UnixPool:
    """Return the pool at ``unix:[path]``; see :func:`gpu_pool_client.connect`."""
    from gpu_pool_client.remote.addresses import socket_path
    from gpu_pool_client.remote.client import UnixPool

    return UnixPool(socket_path(url))
