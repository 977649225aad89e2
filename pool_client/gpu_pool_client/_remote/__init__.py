"""Pools that another process serves: ``gpu-pool serve``, on a Unix socket or behind a JupyterHub.

Service and client share one definition of what travels between them, ``bodies``. tornado and pydantic are
imported here and in the service only, by the first ``connect`` to such a pool: importing ``gpu_pool_client``
costs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_pool_client._remote.client import RemotePool


def open_unix(url: str) -> RemotePool:
    """Return the pool at ``unix:[path]``; see :func:`gpu_pool_client.connect`."""
    from gpu_pool_client._remote.client import RemotePool
    from gpu_pool_client._remote.endpoints import unix_endpoint

    return RemotePool(unix_endpoint(url))


def open_http(url: str) -> RemotePool:
    """Return the pool at ``http(s)://host[:port]/services/NAME``; see :func:`gpu_pool_client.connect`."""
    from gpu_pool_client._remote.client import RemotePool
    from gpu_pool_client._remote.endpoints import http_endpoint

    return RemotePool(http_endpoint(url))
