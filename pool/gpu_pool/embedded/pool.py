"""Opens the pool of this machine: its store in the caller's own process, no daemon."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

from gpu_pool.devices import Inventory, discover
from gpu_pool.embedded.allocation import Allocation
from gpu_pool.embedded.backend import LocalBackend
from gpu_pool.enforcement import Isolation
from gpu_pool.pool.core import PoolCore
from gpu_pool.pool.pool import GpuPool
from gpu_pool.settings import PoolSettings, load_settings
from gpu_pool.store import files
from gpu_pool_client import BadRequest
from gpu_pool_client._home import expanded
from gpu_pool_client._pool import split_url


def local_pool(
    path: Path,
    settings: PoolSettings | None = None,
    find_devices: Callable[[], Inventory] = discover,
    isolation: Isolation | None = None,
    *,
    owner: bool = False,
) -> GpuPool:
    """Return the pool of this machine's devices, with its store at ``path``; see :class:`LocalBackend`."""
    settings = settings or PoolSettings()
    backend = LocalBackend(path, settings, find_devices, isolation, owner=owner)
    return GpuPool(PoolCore(path, backend, settings))


def open_embedded(url: str) -> GpuPool:
    """Return the pool at ``embedded:[path]``; see :func:`gpu_pool_client.connect`.

    For one Unix user on one machine. Several processes may open the same store; every decision is one
    transaction, so none of them needs to be in charge.
    """
    return local_pool(store_path(url), load_settings())


def store_path(url: str) -> Path:
    """Return the store's file that an ``embedded:`` URL names; without a path, this user's or this job's."""
    parts = split_url(url)
    text = "" if parts is None else unquote(parts.netloc + parts.path)
    if parts is None or parts.query or parts.fragment or (text and not text.isprintable()):
        raise BadRequest(f"{url[:200]!a} is not the URL of an embedded pool.", "Accepted: embedded:[path].")
    path = expanded(text) if text else _default_path()
    # What SQLite and we keep beside it is beside the file itself, by whichever name it is found.
    return path.resolve() if path.is_symlink() else path.absolute()


def _default_path() -> Path:
    """Return this user's store; in a Slurm job that job's, whose GPUs are of one node and nobody else's."""
    job = Allocation.of(os.environ)
    return job.store(os.environ) if job else files.default_path()
