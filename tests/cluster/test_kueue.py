"""Kernels in Kueue's queues, over a served fake of the API: the test admits and evicts as Kueue does."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cluster import kueue, pod_starts
from gpu_pool.cluster.manifests import COMPONENT
from gpu_pool.cluster.pod_starts import KueuePositions
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import (
    BadRequest,
    EndReason,
    Holder,
    KernelPod,
    Lease,
    LeaseGone,
    LeaseState,
    NeverFits,
    NotAllowed,
    Place,
    PodPhase,
    parse_request,
)
from support.clusters import A100, V100, hami, plain
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import backend_of, claim, cluster_pool, command, notebook, running, until_pod
from support.pools import eventually, key

HUB = "hub"
GROUP = "/apis/kueue.x-k8s.io"
PENDING = "/apis/visibility.kueue.x-k8s.io/{}/namespaces/" + HUB + "/localqueues/gpu-pool-ml/pendingworkloads"
FULL = "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpumem"


def gated(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """Hold back what names a queue, as Kueue's webhook does."""
    if kind == "pods" and kueue.QUEUE_LABEL in found["metadata"].get("labels", {}):
        found["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    return found


@pytest.fixture(params=["v1beta2", "v1beta1"])
def version(request: pytest.FixtureRequest) -> str:
    """Return what the cluster serves: what came with Kueue 0.15, or what was before."""
    return str(request.param)


@pytest.fixture
async def fake(fake: FakeKubernetes, version: str) -> FakeKubernetes:
    fake.webhook = gated
    serve(fake, version)
    return fake


def serve(fake: FakeKubernetes, *versions: str) -> None:
    """Let the cluster serve Kueue's objects in these versions and no other."""
    group = {"name": "kueue.x-k8s.io", "versions": [{"version": each} for each in versions]}
    fake.pages["/apis"] = {"kind": "APIGroupList", "groups": [group] if versions else []}
    fake.absent |= {f"{GROUP}/{each}" for each in ("v1beta2", "v1beta1") if each not in versions}


@pytest.fixture
async def pool(fake: FakeKubernetes, tmp_path: Path) -> AsyncIterator[GpuPool]:
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    async with cluster_pool(tmp_path / "store.db", config, HUB, kueue=True, named={"ml": {}}) as pool:
        yield pool


async def ask(pool: GpuPool, text: str = "50%", course: str | None = "ml") -> Lease:
    return await pool.request(parse_request(text), Holder("ada", course), key())


async def queued(pool: GpuPool, text: str = "50%") -> tuple[Lease, KernelPod]:
    """Return a lease whose kernel waits in Kueue's queue."""
    lease = await ask(pool, text)
    return lease, await pool.launch(lease.id, command())


def name_of(lease: Lease) -> str:
    return f"gpu-pool-{lease.id}-1"


def admit(fake: FakeKubernetes, lease: Lease) -> None:
    found = fake.get("pods", name_of(lease))
    spec = {key: value for key, value in found["spec"].items() if key != "schedulingGates"}
    fake.put("pods", {**found, "spec": spec})


def say(fake: FakeKubernetes, lease: Lease, kind: str, status: str, message: str) -> None:
    owner = {"kind": "Pod", "uid": fake.get("pods", name_of(lease))["metadata"]["uid"]}
    metadata = {"name": f"pod-{lease.id}", "namespace": HUB, "ownerReferences": [owner]}
    condition = {"type": kind, "status": status, "message": message}
    fake.put_of(
        f"{GROUP}/v1beta2", "workloads", {"metadata": metadata, "status": {"conditions": [condition]}}
    )


async def until_state(pool: GpuPool, lease: Lease, state: LeaseState) -> Lease:
    await eventually(lambda: pool.get_lease(lease.id), lambda seen: seen.state is state)
    return await pool.get_lease(lease.id)


async def test_a_pod_is_made_at_once_and_its_lease_waits_while_kueue_says_why(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    """Three halves of one GPU: how many fit at once is not the pool's affair."""
    leases = [await queued(pool) for _ in range(3)]
    assert [pod.phase for _, pod in leases] == [PodPhase.QUEUED] * 3
    lease = leases[0][0]
    made = fake.get("pods", name_of(lease))
    assert made["metadata"]["labels"][kueue.QUEUE_LABEL] == "gpu-pool-ml"
    assert made["metadata"]["labels"]["app.kubernetes.io/component"] == COMPONENT
    assert "affinity" not in made["spec"]
    waiting = await pool.get_lease(lease.id)
    assert (waiting.state, waiting.slices) == (LeaseState.PARKED, ())
    say(fake, lease, "QuotaReserved", "False", FULL)
    found = await until_pod(pool, lease.id, lambda pod: FULL[:20] in pod.message)
    assert found.phase is PodPhase.QUEUED
    assert found.message.startswith("It waits in the cluster's own queue.")
    place = (await pool.get_lease(lease.id)).place
    assert place == Place(None, "its course", FULL)
    assert str(await pool.explain(lease.id)).endswith(f"the cluster's own queue. {FULL}")
    admit(fake, lease)
    assert (await until_pod(pool, lease.id, lambda pod: pod.phase is PodPhase.STARTING)).address is None
    admitted = await until_state(pool, lease, LeaseState.HELD)
    assert admitted.slices[0].milli == 500
    fake.run(name_of(lease))
    await running(pool, lease.id)


async def test_who_waits_is_told_the_place_where_kueue_tells_it(
    pool: GpuPool, fake: FakeKubernetes, version: str
) -> None:
    lease, _ = await queued(pool)
    uid = fake.get("pods", name_of(lease))["metadata"]["uid"]
    fake.pages[PENDING.format(version)] = {
        "items": [{"metadata": {"ownerReferences": [{"uid": uid}]}, "positionInLocalQueue": 2}]
    }
    await KueuePositions(backend_of(pool).api, backend_of(pool).kernels, backend_of(pool).log).refresh()
    assert "number 3 in the queue of its course" in (await pool.pod(lease.id)).message
    assert (await pool.explain(lease.id)).position == 3
    admit(fake, lease)
    await until_pod(pool, lease.id, lambda pod: pod.phase is PodPhase.STARTING)
    asked = fake.asked("GET", "pendingworkloads")
    await KueuePositions(backend_of(pool).api, backend_of(pool).kernels, backend_of(pool).log).refresh()
    assert fake.asked("GET", "pendingworkloads") == asked


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let positions be asked for often."""
    monkeypatch.setattr(pod_starts, "_POSITIONS_EVERY", 0.05)


@pytest.mark.usefixtures("often")
async def test_an_odd_answer_is_not_the_last_that_is_heard_of_positions(
    pool: GpuPool, fake: FakeKubernetes, version: str
) -> None:
    fake.pages[PENDING.format(version)] = ["odd"]
    lease, _ = await queued(pool)
    await eventually(lambda: fake.asked("GET", "pendingworkloads") > 1, within=30)
    uid = fake.get("pods", name_of(lease))["metadata"]["uid"]
    fake.pages[PENDING.format(version)] = {
        "items": [{"metadata": {"ownerReferences": [{"uid": uid}]}, "positionInLocalQueue": 2}]
    }
    await eventually(lambda: pool.explain(lease.id), lambda told: told.position == 3, within=30)


async def test_a_cluster_that_does_not_tell_positions_tells_the_rest(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease, _ = await queued(pool)
    await KueuePositions(backend_of(pool).api, backend_of(pool).kernels, backend_of(pool).log).refresh()
    assert (await pool.pod(lease.id)).message == "It waits in the cluster's own queue."


@pytest.mark.parametrize("version", ["v1beta2"], indirect=True)
@pytest.mark.parametrize(
    ("served", "words"),
    [
        (
            ["v1", "v1alpha2"],
            r"serves Kueue's objects \(kueue.x-k8s.io\) as v1, v1alpha2. .* v1beta2 or v1beta1",
        ),
        ([], r"has no Kueue. .* v1beta2 or v1beta1.* leave out c.KubernetesSettings.kueue"),
    ],
)
async def test_a_service_that_could_not_read_kueues_objects_does_not_begin(
    fake: FakeKubernetes, tmp_path: Path, served: list[str], words: str
) -> None:
    serve(fake, *served)
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    with pytest.raises(BadRequest, match=words):
        async with cluster_pool(tmp_path / "store.db", config, HUB, kueue=True, named={"ml": {}}):
            pass


async def test_the_time_in_kueues_queue_is_not_counted(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease, _ = await queued(pool)
    assert (await until_state(pool, lease, LeaseState.PARKED)).held_at is None
    before = time.time()
    admit(fake, lease)
    held = await until_state(pool, lease, LeaseState.HELD)
    assert held.held_at is not None
    assert held.held_at >= before


async def test_a_kernel_that_kueue_evicts_ends_its_lease_in_words(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease, _ = await queued(pool)
    admit(fake, lease)
    fake.run(name_of(lease))
    await running(pool, lease.id)
    words = "Preempted to accommodate a workload of higher priority"
    condition = {
        "type": "TerminationTarget",
        "status": "True",
        "reason": "WorkloadEvicted",
        "message": words,
    }
    fake.change("pods", name_of(lease), conditions=[condition])
    fake.remove("pods", name_of(lease))
    with pytest.raises(LeaseGone, match=f"queue took its place back: {words}"):
        await until_pod(pool, lease.id, lambda _: False)
    assert (await pool.get_lease(lease.id)).end_reason is EndReason.TAKEN


async def test_whoever_gives_up_leaves_kueues_queue(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease, _ = await queued(pool)
    await pool.release(lease.id)
    await eventually(lambda: fake.named("pods") == ["jupyter-ada"])


async def test_the_same_launch_finds_the_pod_that_waits(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease, kernel = await ask(pool), command()
    first = await pool.launch(lease.id, kernel)
    await until_state(pool, lease, LeaseState.PARKED)
    assert await pool.launch(lease.id, kernel) == first
    assert (await pool.get_lease(lease.id)).state is LeaseState.PARKED
    assert fake.asked("POST", "pods") == 1


async def test_a_service_that_comes_back_finds_who_was_admitted_meanwhile(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    config, store = fake.kubeconfig(tmp_path / "kubeconfig"), tmp_path / "store.db"
    async with cluster_pool(store, config, HUB, kueue=True, named={"ml": {}}) as pool:
        waits, admitted = (await queued(pool))[0], (await queued(pool))[0]
    admit(fake, admitted)
    async with cluster_pool(store, config, HUB, kueue=True, named={"ml": {}}) as pool:
        await until_state(pool, admitted, LeaseState.HELD)
        assert (await pool.get_lease(waits.id)).state is LeaseState.PARKED
        assert (await pool.pod(waits.id)).phase is PodPhase.QUEUED


async def test_who_names_no_course_has_no_queue(pool: GpuPool) -> None:
    with pytest.raises(NotAllowed, match="queues kernels by course"):
        await ask(pool, course=None)


async def test_what_no_machine_has_is_refused_and_not_queued(pool: GpuPool) -> None:
    with pytest.raises(NeverFits, match="no node has more than 1"):
        await ask(pool, "2")


async def test_of_several_kinds_the_one_that_was_granted_is_asked_for(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    fake.put("nodes", hami("n2", gpus=2, model=A100, memory=40960))
    await eventually(pool.status, lambda status: len(status.devices) == 3)
    lease, _ = await queued(pool, "2")
    assert {part.device.model for part in lease.slices} == {f"NVIDIA-{A100}"}
    annotations = fake.get("pods", name_of(lease))["metadata"]["annotations"]
    assert annotations["nvidia.com/use-gputype"] == f"NVIDIA-{A100}"
    other, _ = await queued(pool, "50% model=V100")
    annotations = fake.get("pods", name_of(other))["metadata"]["annotations"]
    assert annotations["nvidia.com/use-gputype"] == f"NVIDIA-{V100}"


async def test_a_home_on_one_machine_keeps_its_kernel_there(pool: GpuPool, fake: FakeKubernetes) -> None:
    fake.put("persistentvolumeclaims", claim("bob", HUB, "ReadWriteOnce"))
    fake.put("pods", notebook("bob", HUB, node="n1"))
    await eventually(lambda: backend_of(pool).view.notebook("bob", ""))
    lease = await pool.request(parse_request("2%"), Holder("bob", "ml"), "bobs")
    await pool.launch(lease.id, command())
    affinity = fake.get("pods", name_of(lease))["spec"]["affinity"]["nodeAffinity"]
    assert "'values': ['n1']" in str(affinity)


async def test_what_kueue_cannot_count_is_refused_in_words(fake: FakeKubernetes, tmp_path: Path) -> None:
    fake.remove("nodes", "n1")
    fake.put("nodes", plain("n1", gpus=1))
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    kai = {"dialect": "kai", "options": {"queue": "students"}}
    async with cluster_pool(tmp_path / "store.db", config, HUB, kueue=True, named={"ml": {}}, **kai) as pool:
        with pytest.raises(NotAllowed, match="cannot count slices of KAI"):
            await ask(pool)
        assert (await ask(pool, "1")).state is LeaseState.HELD


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        ([], ""),
        ([("QuotaReserved", "False", FULL)], FULL),
        (
            [("QuotaReserved", "True", "reserved")],
            "There is capacity for it, and its admission is being checked.",
        ),
        ([("QuotaReserved", "True", "reserved"), ("Admitted", "True", "")], ""),
    ],
)
def test_what_kueue_says_is_told(conditions: list[tuple[str, str, str]], words: str) -> None:
    made = [{"type": kind, "status": status, "message": message} for kind, status, message in conditions]
    assert kueue.said({"status": {"conditions": made}}) == words
    assert kueue.said(None) == ""
