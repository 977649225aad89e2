"""A cluster whose Kueue the pool cannot read, by a real API server."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_pool.cli.checks import Check
from gpu_pool.cli.cluster import checks_of
from gpu_pool.cluster.snapshot import take_snapshot
from gpu_pool_client import BadRequest
from support.clusters import hami
from support.control_plane import Cluster
from support.kernel_pods import cluster_pool
from support.kueue import serving


async def said_of_kueue(cluster: Cluster) -> list[Check]:
    snapshot = await take_snapshot(str(cluster.kubeconfig))
    return [each for each in checks_of(snapshot) if each.name == "kueue"]


async def test_where_kueues_objects_cannot_be_read_no_service_begins_and_the_doctor_says_why(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    """Its kernels would wait for ever, and nobody would be told."""
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    cluster.add(hami("kueue-2", count=50))
    with serving(cluster, "v1alpha2"):
        with pytest.raises(BadRequest, match=r"kueue.x-k8s.io\) as v1alpha2. .* v1beta2 or v1beta1"):
            async with cluster_pool(tmp_path / "store.db", cluster.kubeconfig, namespace, kueue=True):
                pass
        (check,) = await said_of_kueue(cluster)
        assert check.state == "note"
        assert "v1alpha2" in check.text
    with pytest.raises(BadRequest, match="This cluster has no Kueue"):
        async with cluster_pool(tmp_path / "store.db", cluster.kubeconfig, namespace, kueue=True):
            pass
    assert not [
        each for each in checks_of(await take_snapshot(str(cluster.kubeconfig))) if each.name == "kueue"
    ]
