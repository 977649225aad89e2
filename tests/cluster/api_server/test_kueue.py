"""Kernels in Kueue's queue, over a real API server. Kueue itself is not there: the test decides in its place.

Its webhook is a policy of the API server that holds the same pods back by the
same gate; its Workload has the parts that are read.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cli.cluster import checks_of
from gpu_pool.cluster.kueue import QUEUE_LABEL
from gpu_pool.cluster.snapshot import take_snapshot
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import (
    EndReason,
    Holder,
    Lease,
    LeaseGone,
    LeaseState,
    PodPhase,
    parse_request,
)
from support.clusters import changing, hami
from support.control_plane import Cluster
from support.kernel_pods import backend_of, cluster_pool, command, notebook, running, until_pod, volume
from support.kueue import GROUP, serving
from support.pools import eventually

NAME = "kueue-stand-in"
FULL = "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpumem"
EVICTED = "Preempted to accommodate a workload of another course"


def policy() -> list[dict[str, Any]]:
    """Return what holds back pods that name a queue, as Kueue's webhook does."""
    gate = f'Object.spec.schedulingGates{{name: "{GROUP}/admission"}}'
    return changing(NAME, QUEUE_LABEL, f"Object{{spec: Object.spec{{schedulingGates: [{gate}]}}}}")


#: What Kueue serves since 0.15, and before.
SINCE_0_15, BEFORE = ("v1beta1", "v1beta2"), ("v1beta1",)


@pytest.fixture(scope="module", params=[SINCE_0_15, BEFORE], ids="+".join)
def served(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Return the versions of Kueue's objects that the cluster serves."""
    return tuple(request.param)


@pytest.fixture(scope="module")
def kueue(cluster: Cluster, served: tuple[str, ...]) -> Iterator[Cluster]:
    """A cluster with a node, and Kueue's two objects."""
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    node = hami(f"kueue-of-{len(served)}", count=50)
    node["status"]["allocatable"] |= {"nvidia.com/gpumem": "32768", "nvidia.com/gpucores": "100"}
    cluster.add(node)
    cluster.apply(*policy())
    with serving(cluster, *served):
        yield cluster
    kinds = "mutatingadmissionpolicybinding,mutatingadmissionpolicy"
    cluster.kubectl("delete", kinds, NAME)


@pytest.fixture
async def pool(kueue: Cluster, namespace: str, tmp_path: Path) -> AsyncIterator[GpuPool]:
    objects = [*volume("claim-ada", namespace, "ReadWriteMany"), notebook("ada", namespace)]
    kueue.apply(*objects, namespace=namespace)
    await eventually(lambda: holds_back(kueue, namespace))
    store = tmp_path / "store.db"
    async with cluster_pool(store, kueue.kubeconfig, namespace, kueue=True, named={"ml": {}}) as pool:
        await eventually(lambda: backend_of(pool).view.notebook("ada", ""))
        yield pool


def holds_back(cluster: Cluster, namespace: str) -> bool:
    """Whether the policy is in force, which takes the API server a moment."""
    probe = notebook("probe", namespace, claim="")
    probe["metadata"]["labels"] = {QUEUE_LABEL: "any"}
    text = cluster.kubectl(
        "create", "-n", namespace, "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(probe)
    )
    return "schedulingGates" in json.loads(text)["spec"]


def say(cluster: Cluster, namespace: str, name: str, message: str) -> None:
    """Let Kueue say that there is no room for a pod."""
    uid = cluster.get("pod", "-n", namespace, name)["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}
    condition = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": message}
    made = {
        "apiVersion": f"{GROUP}/v1beta1",
        "kind": "Workload",
        "metadata": {"name": f"pod-{name}", "ownerReferences": [owner]},
        "status": {"conditions": [condition]},
    }
    cluster.apply(made, namespace=namespace)


def admit(cluster: Cluster, namespace: str, name: str) -> None:
    patch = json.dumps([{"op": "remove", "path": "/spec/schedulingGates"}])
    cluster.kubectl("patch", "pod", "-n", namespace, name, "--type=json", f"-p={patch}")


def evict(cluster: Cluster, namespace: str, name: str) -> None:
    condition = {"type": "TerminationTarget", "status": "True", "reason": "WorkloadEvicted"}
    patch = json.dumps({"status": {"conditions": [{**condition, "message": EVICTED}]}})
    where = ("pod", "-n", namespace, name)
    cluster.kubectl("patch", *where, "--subresource=status", "--type=strategic", f"-p={patch}")
    cluster.kubectl("delete", *where, "--wait=false")


async def queued(pool: GpuPool, number: int) -> Lease:
    lease = await pool.request(parse_request("60%"), Holder("ada", "ml"), f"key-{number}")
    assert (await pool.launch(lease.id, command())).phase is PodPhase.QUEUED
    return lease


async def test_kernels_wait_for_kueue_run_and_are_evicted(
    pool: GpuPool, kueue: Cluster, namespace: str
) -> None:
    first, second = await queued(pool, 1), await queued(pool, 2)
    assert (await pool.get_lease(first.id)).state is LeaseState.PARKED
    name = f"gpu-pool-{first.id}-1"
    assert kueue.get("pod", "-n", namespace, name)["metadata"]["labels"][QUEUE_LABEL] == "gpu-pool-ml"
    say(kueue, namespace, name, FULL)
    await until_pod(pool, first.id, lambda pod: FULL in pod.message)
    assert FULL in (await pool.explain(first.id)).why
    admit(kueue, namespace, name)
    assert (await running(pool, first.id)).address
    await eventually(lambda: pool.get_lease(first.id), lambda lease: lease.state is LeaseState.HELD)
    assert (await pool.pod(second.id)).phase is PodPhase.QUEUED
    evict(kueue, namespace, name)
    with pytest.raises(LeaseGone, match=EVICTED):
        await until_pod(pool, first.id, lambda _: False)
    assert (await pool.get_lease(first.id)).end_reason is EndReason.TAKEN
    await pool.release(second.id)
    await eventually(lambda: not backend_of(pool).view.own.leases())


async def test_the_doctor_says_in_which_version_kueues_objects_are_read(
    kueue: Cluster, served: tuple[str, ...]
) -> None:
    snapshot = await take_snapshot(str(kueue.kubeconfig))
    (check,) = (each for each in checks_of(snapshot) if each.name == "kueue")
    assert check.state == "ok"
    assert check.text.endswith(f"read as {served[-1]}")
    assert all(each in check.text for each in served)
