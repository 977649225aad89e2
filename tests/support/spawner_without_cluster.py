"""A spawner for Kubernetes with KubeSpawner's own start, without a cluster and a Hub."""

from __future__ import annotations

from typing import ClassVar

import kubespawner.spawner
import pytest

from gpu_pool_spawner.kube import GPUPoolKubeSpawner
from gpu_pool_spawner.kube_cluster import ClusterSupply


class Reached(Exception):
    """The pod would be made now."""


class SpawnerWithoutCluster(GPUPoolKubeSpawner):
    """Looks at no cluster and no Hub; what they would say is said here."""

    supply: ClassVar[ClusterSupply | None] = None
    groups: ClassVar[frozenset[str]] = frozenset()

    async def _read_supply(self, *, fresh: bool = False) -> ClusterSupply | None:
        del fresh
        return self.supply

    async def _start_watching_pods(self, replace: bool = False) -> None: ...

    async def _start_watching_events(self, replace: bool = False) -> None: ...

    def _groups(self) -> frozenset[str]:
        return self.groups


def connect_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a spawner be made where there is no cluster to connect to."""
    monkeypatch.setattr(kubespawner.spawner, "load_config", lambda **_: None)
