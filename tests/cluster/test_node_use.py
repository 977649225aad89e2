"""What node agents say is used: of their own node's pods alone, for a while, and never nonsense."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gpu_pool.cluster.node_use import NodeUseReports, PodOfToken, check_report, read_review
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.pool.pool import GpuPool
from gpu_pool.service.metrics import Metrics
from gpu_pool.store.usage import Measured
from gpu_pool_client import Activity, BadRequest, NotAllowed, PodDeviceUse, PoolUnreachable
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import backend_of, command, held, running, start
from support.pools import eventually

GPU = "GPU-11111111-2222-3333-4444-555555555555"
UID = "2c48913c-b29f-11e7-9350-020968147796"
LOG = logging.getLogger("gpu_pool.tests")


@dataclass
class Reports:
    """What agents have said to a pool, whose time stands still."""

    pool: GpuPool
    now: float = 1000.0

    def __post_init__(self) -> None:
        backend = backend_of(self.pool)
        settings = KubernetesSettings(node_agent="agents/agent")
        self.taken = NodeUseReports(backend.api, backend.view, settings, LOG, lambda: self.now)

    async def say(self, *uses: PodDeviceUse, node: str = "n1", complete: bool = True) -> None:
        await self.taken.report(node, [GPU], uses, complete=complete)

    def known(self, lease_id: str) -> Activity:
        return self.taken.activity(lease_id)


@pytest.fixture
def reports(pool: GpuPool) -> Reports:
    return Reports(pool)


def use(fake: FakeKubernetes, lease_id: str, memory_mib: int | None = 412, **more: Any) -> PodDeviceUse:
    """Return what a lease's pod uses."""
    uid = fake.get("pods", f"gpu-pool-{lease_id}-1")["metadata"]["uid"]
    return replace(PodDeviceUse(uid, "", GPU, memory_mib), **more)


async def test_until_an_agent_has_said_something_nothing_is_known(
    pool: GpuPool, fake: FakeKubernetes, reports: Reports
) -> None:
    lease = await start(pool, fake)
    assert reports.known(lease) == Activity()
    assert await pool.activity(lease) == Activity()
    assert reports.taken.memory_in_use() == {}


async def test_what_a_kernel_uses_is_what_the_agent_of_its_node_says(
    pool: GpuPool, fake: FakeKubernetes, reports: Reports
) -> None:
    lease = await start(pool, fake)
    await reports.say(use(fake, lease, utilisation=0.5))
    assert reports.known(lease) == Activity(initialised=True, working=True, memory_mib=412)
    assert reports.taken.memory_in_use() == {lease: {GPU: 412}}
    await reports.say(use(fake, lease, utilisation=0.0))
    assert reports.known(lease) == Activity(initialised=True, working=False, memory_mib=412)
    await reports.say(use(fake, lease, None))
    assert reports.known(lease) == Activity(initialised=True)
    assert reports.taken.memory_in_use() == {}


async def test_whether_a_mig_instance_works_can_never_be_said(
    pool: GpuPool, fake: FakeKubernetes, reports: Reports
) -> None:
    lease, mig = await start(pool, fake), "MIG-11111111-2222-3333-4444-555555555555"
    await reports.taken.report("n1", [mig], [use(fake, lease, device=mig)], complete=True)
    assert reports.known(lease) == Activity(initialised=True, memory_mib=412, unmeasured=True)
    await reports.say(use(fake, lease))  # another time the driver may say it
    assert reports.known(lease) == Activity(initialised=True, memory_mib=412)


async def test_it_is_told_by_the_pool(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease, agents = await start(pool, fake), pool.backend.agents
    assert agents is not None
    await agents.report("n1", [GPU], [use(fake, lease)], complete=True)
    assert await pool.activity(lease) == Activity(initialised=True, memory_mib=412)
    assert pool.backend.memory_in_use() == {lease: {GPU: 412}}
    assert list(agents.ages()) == ["n1"]


async def test_courses_have_the_memory_that_their_leases_use(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease, agents, metrics = await start(pool, fake), pool.backend.agents, Metrics(pool, lambda: ())
    assert agents is not None
    name = 'gpu_pool_used_memory_bytes{course="none"}'
    assert name not in (await metrics.page())[0].decode()
    await agents.report("n1", [GPU], [use(fake, lease)], complete=True)
    text = (await metrics.page())[0].decode()
    assert f"{name} 4.32013312e+08" in text
    assert 'gpu_pool_leases_seen{course="none"} 1.0' in text
    assert 'gpu_pool_node_report_age_seconds{node="n1"}' in text


async def test_containers_and_devices_are_added_up(
    pool: GpuPool, fake: FakeKubernetes, reports: Reports
) -> None:
    lease, other = await start(pool, fake), GPU.replace("1", "2")
    one = use(fake, lease)
    uses = [replace(one, container="a"), replace(one, container="b", memory_mib=8)]
    uses += [replace(one, container="a", device=other, memory_mib=30)]
    await reports.taken.report("n1", [GPU, other], uses, complete=True)
    assert reports.known(lease).memory_mib == 450
    assert reports.taken.memory_in_use() == {lease: {GPU: 420, other: 30}}


async def test_where_pods_have_no_cgroups_the_container_says_whose_it_is(
    pool: GpuPool, fake: FakeKubernetes, reports: Reports
) -> None:
    lease = await start(pool, fake)
    status = {"state": {"running": {}}, "containerID": f"containerd://{'a' * 64}"}
    fake.change("pods", f"gpu-pool-{lease}-1", containerStatuses=[status])
    own = backend_of(pool).view.own
    await eventually(lambda: own.of(lease)[0]["status"]["containerStatuses"] == [status])
    await reports.say(PodDeviceUse("", "a" * 64, GPU, 412))
    assert reports.known(lease).memory_mib == 412


async def test_a_kernel_that_is_not_told_of_uses_nothing_if_all_was_looked_at(
    pool: GpuPool, fake: FakeKubernetes, reports: Reports
) -> None:
    lease = await start(pool, fake)
    await reports.say(PodDeviceUse(UID, "", GPU, 30_000))  # somebody else's
    # It may have opened the driver, which nobody sees; parking it is not for certain.
    assert reports.known(lease) == Activity(working=False, memory_mib=0)
    await reports.say(complete=False)
    assert reports.known(lease) == Activity()


async def test_what_was_said_holds_for_a_while(pool: GpuPool, fake: FakeKubernetes, reports: Reports) -> None:
    lease = await start(pool, fake)
    await reports.say(use(fake, lease))
    reports.now += 30.0
    assert reports.known(lease).memory_mib == 412
    reports.now += 0.1
    assert reports.known(lease) == Activity()
    assert reports.taken.memory_in_use() == {}
    await reports.say(use(fake, lease, 7))
    assert reports.known(lease).memory_mib == 7


@pytest.mark.usefixtures("second_node")
async def test_an_agent_that_speaks_of_another_node_s_pod_is_believed_nothing(
    pool: GpuPool, fake: FakeKubernetes, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    here = await start(pool, fake)
    there = await held(pool)
    await pool.launch(there.id, command())
    fake.run(f"gpu-pool-{there.id}-1", node="n2")
    await running(pool, there.id)
    await reports.say(use(fake, there.id, 9), node="n2")
    await reports.say(use(fake, here))
    for _ in range(2):
        with pytest.raises(NotAllowed, match="is not on node 'n1'"):
            await reports.say(use(fake, here), use(fake, there.id, 30_000))
    # What it has said before of its own node counts no more, and what the other one says still does.
    assert (reports.known(here), reports.known(there.id).memory_mib) == (Activity(), 9)
    told = [each.message for each in caplog.records if "not believed" in each.message]
    assert len(told) == 1
    await reports.say(use(fake, here))
    assert reports.known(here).memory_mib == 412


async def test_by_another_node_s_container_nothing_can_be_said_of_it(
    pool: GpuPool, fake: FakeKubernetes, reports: Reports
) -> None:
    lease = await start(pool, fake)
    await reports.say(PodDeviceUse("", "a" * 64, GPU, 30_000), node="n2")
    assert reports.known(lease) == Activity()


async def test_what_is_seen_is_added_up_for_the_history(
    pool: GpuPool, fake: FakeKubernetes, reports: Reports
) -> None:
    lease = await start(pool, fake)
    leases = (await pool.status()).leases
    await reports.say(use(fake, lease, 400))  # for how long, nobody knows
    reports.now += 5.0
    assert reports.taken.news(leases) == {}
    await reports.say(use(fake, lease, 600))
    reports.now += 5.0
    assert reports.taken.news(leases) == {lease: Measured(600, 3000.0, 5.0, 5.0)}
    # However long an agent was away, what it did not see is not counted.
    reports.now += 3600.0
    await reports.say(use(fake, lease, 10))
    assert reports.taken.news(leases) == {lease: Measured(10, 300.0, 30.0, 30.0)}


async def test_a_kernel_that_never_uses_its_gpu_is_known_to_be_measured(
    pool: GpuPool, fake: FakeKubernetes, reports: Reports
) -> None:
    lease = await start(pool, fake)
    leases = (await pool.status()).leases
    reports.now += 10.0
    assert reports.taken.news(leases) == {}
    await reports.say()
    reports.now += 10.0
    assert reports.taken.news(leases) == {lease: Measured()}
    await reports.say()
    reports.now += 10.0
    assert reports.taken.news(leases) == {}  # written down once, and not every few seconds


async def test_where_the_cluster_does_not_say_the_node_it_is_that_of_the_agent_s_pod(
    fake: FakeKubernetes, pool: GpuPool, reports: Reports
) -> None:
    """Before Kubernetes 1.30."""
    bound = {name: value for name, value in EXTRA.items() if "node" not in name}
    user = {"username": "system:serviceaccount:agents:agent", "extra": bound}
    fake.tokens["token"] = review(user=user)["status"]
    view = backend_of(pool).view
    # One of the same name that was there before it is not it.
    fake.put("pods", agent_pod("another", "n2"))
    await eventually(lambda: view.pods.get("agents", "agent-x"))
    with pytest.raises(PoolUnreachable, match="not known yet"):
        await reports.taken.node_of("token")
    fake.remove("pods", "agent-x")
    fake.put("pods", agent_pod("uid-1", "n1"))

    async def is_known() -> bool:
        with suppress(PoolUnreachable):
            return await reports.taken.node_of("token") == "n1"
        return False

    await eventually(is_known)


def agent_pod(uid: str, node: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"nodeName": node, "containers": []}
    return {"metadata": {"name": "agent-x", "namespace": "agents", "uid": uid}, "spec": spec}


def nonsense() -> Iterator[tuple[list[str], list[PodDeviceUse], str]]:
    right = PodDeviceUse(UID, "a" * 64, GPU, 412, 2, 0.5)
    yield [GPU], [replace(right, memory_mib=-1)], "is -1 MiB"
    yield [GPU], [replace(right, memory_mib=10**12)], "MiB"
    yield [GPU], [replace(right, processes=0)], "0 processes"
    yield [GPU], [replace(right, utilisation=math.nan)], "utilisation of nan"
    yield [GPU], [replace(right, utilisation=1.01)], "from 0 to 1"
    yield [GPU], [replace(right, pod="../x")], "no uid"
    yield [GPU], [replace(right, pod="", container="")], "no uid of a pod, and no container"
    yield [GPU], [replace(right, container="a/b")], "no uid of a pod, and no container"
    yield [GPU], [replace(right, device="GPU-2")], "was not looked at"
    yield ["GPU 1"], [], "not the uuid"
    yield [GPU], [right, right], "told twice"
    yield [f"GPU-{each}" for each in range(257)], [], "257 devices"
    yield [GPU], [replace(right, container=str(each)) for each in range(1025)], "1025 uses"


@pytest.mark.parametrize(("devices", "uses", "said"), list(nonsense()))
def test_what_cannot_be_so_is_refused_in_words(
    devices: list[str], uses: list[PodDeviceUse], said: str
) -> None:
    with pytest.raises(BadRequest, match=said):
        check_report(devices, uses)


ACCOUNT = "agents/gpu-pool-node-agent"
EXTRA = {
    "authentication.kubernetes.io/pod-name": ["agent-x"],
    "authentication.kubernetes.io/pod-uid": ["uid-1"],
    "authentication.kubernetes.io/node-name": ["n1"],
}


def review(**more: Any) -> dict[str, Any]:
    """Return what an API server answers about a token of an agent's pod."""
    user = {"username": "system:serviceaccount:agents:gpu-pool-node-agent", "extra": EXTRA}
    status = {"authenticated": True, "audiences": ["gpu-pool"], "user": {**user, **more.pop("user", {})}}
    return {"status": {**status, **more}}


def test_the_cluster_says_which_pod_and_node_a_token_is_bound_to() -> None:
    assert read_review(review(), ACCOUNT) == PodOfToken("agents", "agent-x", "uid-1", "n1")
    without = {name: value for name, value in EXTRA.items() if "node" not in name}
    assert read_review(review(user={"extra": without}), ACCOUNT).node == ""


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"status": {"authenticated": False}},
        review(authenticated=False),
        review(authenticated="true"),
        review(audiences=["https://kubernetes.default.svc"]),
        review(audiences=None),
        review(user={"username": "system:serviceaccount:jupyterhub:gpu-pool-node-agent"}),
        review(user={"username": "system:serviceaccount:agents:default"}),
        review(user={"username": "agents/gpu-pool-node-agent"}),
        review(user={"extra": {}}),
        review(user={"extra": {**EXTRA, "authentication.kubernetes.io/pod-uid": []}}),
    ],
)
def test_any_other_token_is_no_agent_s(answer: dict[str, Any]) -> None:
    with pytest.raises(NotAllowed):
        read_review(answer, ACCOUNT)
