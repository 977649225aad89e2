"""Pod Security as a real API server enforces it: what it refuses is told to whoever reads of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_pool.cluster.manifests import LEASE_LABEL
from gpu_pool_client import NotAllowed
from support.clusters import changing, hami
from support.control_plane import Cluster
from support.kernel_pods import backend_of, cluster_pool, command, held, notebook, running, volume
from support.pools import eventually

#: What a webhook of a system that shares GPUs may add to pods.
POLICY = "adds-the-host"
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


@pytest.fixture(scope="module")
def changed(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster in which something gives the kernels of one namespace their machine's network."""
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    node = hami("secure-1", count=50)
    node["status"]["allocatable"] |= {"nvidia.com/gpumem": "32768", "nvidia.com/gpucores": "100"}
    cluster.add(node)
    of = {"matchLabels": {"changed": "yes"}}
    change = "Object{spec: Object.spec{hostNetwork: true}}"
    cluster.apply(*changing(POLICY, LEASE_LABEL, change, namespaceSelector=of))
    yield cluster
    cluster.kubectl("delete", "mutatingadmissionpolicybinding,mutatingadmissionpolicy", POLICY)


async def test_a_kernel_that_pod_security_refuses_says_so_and_the_log_what_to_set(
    changed: Cluster, namespace: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = notebook("ada", namespace)
    changed.apply(*volume("claim-ada", namespace, "ReadWriteMany"), server, namespace=namespace)
    changed.kubectl("label", "namespace", namespace, RESTRICTED)
    async with cluster_pool(tmp_path / "store.db", changed.kubeconfig, namespace) as pool:
        await eventually(lambda: backend_of(pool).view.notebook("ada", ""))
        lease = await held(pool)
        # As it is made, it keeps the rules.
        await pool.launch(lease.id, command())
        await running(pool, lease.id)
        changed.kubectl("label", "namespace", namespace, "changed=yes")

        async def refused() -> str:
            try:
                await pool.launch(lease.id, command())
            except NotAllowed as error:
                return str(error)
            return ""

        told = ""
        while not told:  # the API server learns of the label a moment later
            told = await refused()
    assert told == (
        "The security rules of the cluster do not allow this kernel. Tell the administrator: "
        "the log of the pool's service has what to set."
    )
    assert "Pod Security (restricted) refuses the kernel's pod: host namespaces" in caplog.text
    assert "pod-security.kubernetes.io/enforce with a level that allows it" in caplog.text
