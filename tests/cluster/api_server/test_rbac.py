"""The service's rights are enough for all that it does, and for nothing else."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.clusters import hami
from support.control_plane import ASSETS, Cluster
from support.kernel_pods import backend_of, cluster_pool, command, held, notebook, running, volume
from support.pools import eventually

RULES = Path(__file__).parents[3] / "examples" / "kubernetes" / "service" / "rbac.yaml"
ACCOUNT = "system:serviceaccount:{}:gpu-pool"

MAY = [
    ("list nodes", False),
    ("watch nodes", False),
    ("list pods", False),
    ("watch pods", False),
    ("watch customresourcedefinitions.apiextensions.k8s.io", False),
    ("watch runtimeclasses.node.k8s.io", False),
    ("watch resourceslices.resource.k8s.io", False),
    ("create pods", True),
    ("delete pods", True),
    ("get pods", True),
    ("create secrets", True),
    ("create configmaps", True),
    ("list events", True),
    ("get persistentvolumeclaims", True),
    ("create resourceclaimtemplates.resource.k8s.io", True),
    ("list events", True),
]
MUST_NOT = [
    ("get secrets", True),
    ("list secrets", True),
    ("watch secrets", True),
    ("delete secrets", True),
    ("update pods", True),
    ("patch pods", True),
    ("deletecollection pods", True),
    ("create pods --subresource=exec", True),
    ("create pods --subresource=attach", True),
    ("create pods --subresource=eviction", True),
    ("create pods --subresource=binding", True),
    ("get pods --subresource=log", True),
    ("create serviceaccounts --subresource=token", True),
    ("impersonate users", True),
    ("create rolebindings.rbac.authorization.k8s.io", True),
    ("escalate roles.rbac.authorization.k8s.io", True),
    ("create persistentvolumeclaims", True),
    ("delete persistentvolumeclaims", True),
    ("get configmaps", True),
    ("update configmaps", True),
    ("delete configmaps", True),
    ("create services", True),
    ("create events", True),
    ("list events", False),
    ("create networkpolicies.networking.k8s.io", True),
    ("list events", False),
    ("create pods", False),
    ("delete pods", False),
    ("create secrets", False),
    ("create configmaps", False),
    ("get secrets", False),
    ("patch nodes", False),
    ("update nodes", False),
    ("delete nodes", False),
    ("get nodes --subresource=proxy", False),
    ("create namespaces", False),
    # Where there are node agents alone.
    ("create tokenreviews.authentication.k8s.io", False),
    ("create clusterrolebindings.rbac.authorization.k8s.io", False),
    ("create validatingwebhookconfigurations.admissionregistration.k8s.io", False),
]


@pytest.fixture
def rights(cluster: Cluster, namespace: str) -> Iterator[str]:
    """Give the rights to an account in a namespace of the test's own, and take them back."""
    # A fresh API server makes its own roles after it has begun to answer.
    cluster.kubectl("wait", "--for=create", "clusterrolebinding/system:basic-user", "--timeout=60s")
    rules = RULES.read_text().replace("namespace: jupyterhub", f"namespace: {namespace}")
    cluster.kubectl("apply", "-f", "-", stdin=rules)
    yield namespace
    cluster.kubectl("delete", "clusterrole,clusterrolebinding", "gpu-pool")


def can(cluster: Cluster, namespace: str, what: str, *, inside: bool) -> bool:
    """Ask the API server; ``inside`` asks for the namespace of the servers, else for all of the cluster."""
    where = ["--namespace", namespace] if inside else ["--all-namespaces"]
    command = [ASSETS / "kubectl", "--kubeconfig", cluster.kubeconfig, "auth", "can-i", *what.split(), *where]
    asked = [*map(str, command), f"--as={ACCOUNT.format(namespace)}"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    answer = done.stdout.strip().splitlines()[-1:] or [done.stderr]
    assert answer[0] in ("yes", "no"), done
    return answer[0] == "yes"


def test_the_service_may_what_it_needs_and_nothing_else(cluster: Cluster, rights: str) -> None:
    assert [each for each in MAY if not can(cluster, rights, each[0], inside=each[1])] == []
    assert [each for each in MUST_NOT if can(cluster, rights, each[0], inside=each[1])] == []


async def test_with_these_rights_alone_a_kernel_lives_and_ends(
    cluster: Cluster, rights: str, tmp_path: Path
) -> None:
    """What the service does is done by the very account, so a right that is missing would be seen."""
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    node = hami("rbac-1", count=50)
    node["status"]["allocatable"] |= {"nvidia.com/gpumem": "32768", "nvidia.com/gpucores": "100"}
    cluster.add(node)
    home = volume("claim-ada", rights, "ReadWriteMany")
    cluster.apply(*home, notebook("ada", rights), namespace=rights)
    kubeconfig = _as_the_service(cluster, rights, tmp_path)
    supervisor = {"launch.py": "import os, sys\nos.execvp('sleep', ['sleep', '600'])\n"}
    async with cluster_pool(tmp_path / "store.db", kubeconfig, rights, supervisor=supervisor) as pool:
        await eventually(lambda: backend_of(pool).view.notebook("ada", ""))
        assert [each.problem for each in backend_of(pool).view._more.values() if each.problem] == []
        lease = await held(pool)
        await pool.launch(lease.id, command())
        await running(pool, lease.id)
        found = cluster.get("configmaps", "-n", rights)["items"]
        assert supervisor in [each["data"] for each in found]
        await pool.release(lease.id)
        await eventually(lambda: not backend_of(pool).view.own.of(lease.id))


def _as_the_service(cluster: Cluster, namespace: str, folder: Path) -> Path:
    """Write down how to reach the API server with the service's own token."""
    token = cluster.kubectl("create", "token", "gpu-pool", "-n", namespace).strip()
    known = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json"))
    known["users"] = [{"name": each["name"], "user": {"token": token}} for each in known["users"]]
    path = folder / "service-kubeconfig"
    path.write_text(json.dumps(known))
    return path
