"""One open pool per URL and process, shared by all kernels that the process starts."""

from __future__ import annotations

import functools
import os

from gpu_pool_client import Pool, connect
from gpu_pool_client.pool import DEFAULT_URL, URL_VARIABLE


def resolve_url(url: str) -> str:
    """Return ``url``, or, if it is empty, the one that :func:`gpu_pool_client.connect` would use."""
    return url or os.environ.get(URL_VARIABLE) or DEFAULT_URL


def shared_pool(url: str) -> Pool:
    """Return this process's pool for ``url``, opened at the first call and open until the process ends.

    Raises what :func:`gpu_pool_client.connect` raises; a failure is not remembered.
    """
    return _open(url, os.getpid())


@functools.cache
def _open(url: str, pid: int) -> Pool:  # noqa: ARG001 - a forked child must not use its parent's pool
    return connect(url)
