"""The spawners that come with JupyterHub, for courses."""

from __future__ import annotations

from jupyterhub.spawner import LocalProcessSpawner, SimpleLocalProcessSpawner

from gpu_pool_spawner.mixin import GPUPoolSpawnerMixin


class GPUPoolLocalProcessSpawner(GPUPoolSpawnerMixin, LocalProcessSpawner):  # type: ignore[misc]
    """Starts every user's server as a process of the system's user of the same name."""


class GPUPoolSimpleLocalProcessSpawner(GPUPoolSpawnerMixin, SimpleLocalProcessSpawner):  # type: ignore[misc]
    """For demos only: starts all servers as one and the same user of the system.

    To the system, and so to a pool on a Unix socket, all are one user: everybody
    could end everybody's kernels, read their files, and use up their quota.
    """
