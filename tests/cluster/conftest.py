"""A cluster with one node of HAMi's and the notebook server of ada, over the fake of the API."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gpu_pool.cluster.settings import ClusterTimes
from gpu_pool.pool.pool import GpuPool
from support.clusters import hami
from support.control_plane import Cluster
from support.fake_kubernetes import FakeKubernetes, fake_kubernetes
from support.kernel_pods import claim, cluster_pool, notebook
from support.whole_devices import has_dra

HUB = "hub"


@pytest.fixture
async def fake() -> AsyncIterator[FakeKubernetes]:
    async with fake_kubernetes() as fake:
        fake.put("nodes", hami("n1"))
        fake.put("pods", notebook("ada", HUB, node="n1"))
        fake.put("persistentvolumeclaims", claim("ada", HUB))
        yield fake


@pytest.fixture
async def dra() -> AsyncIterator[FakeKubernetes]:
    """Such a cluster, whose one GPU NVIDIA's DRA driver lists, for a pool that claims it whole."""
    async with fake_kubernetes() as fake:
        has_dra(fake, "gpu-0")
        fake.asker = {"username": f"system:serviceaccount:{HUB}:gpu-pool", "uid": "u-account"}
        fake.put("pods", notebook("ada", HUB, node="n1"))
        fake.put("persistentvolumeclaims", claim("ada", HUB))
        yield fake


@pytest.fixture
def second_node(fake: FakeKubernetes) -> None:
    fake.put("nodes", hami("n2"))


@pytest.fixture
def times() -> ClusterTimes:
    """For how long the pool waits for the cluster."""
    return ClusterTimes()


@pytest.fixture
async def pool(fake: FakeKubernetes, times: ClusterTimes, tmp_path: Path) -> AsyncIterator[GpuPool]:
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    async with cluster_pool(tmp_path / "store.db", config, HUB, times=times) as pool:
        yield pool


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """Return the name of a fresh namespace, which goes with the test; for those with a ``cluster``."""
    name = f"test-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
