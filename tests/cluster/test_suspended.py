"""Kernels in pods that keep memory on their device are parked: their node's agent moves it away.

The agent is real, over a stand-in for the driver, and so are the processes; the cluster is the fake one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.audit.callers import Caller
from gpu_pool.cluster.node_agent.sampling import Container
from gpu_pool.cluster.node_agent.suspending import MoveLoop, PodSuspender
from gpu_pool.cluster.settings import ClusterTimes
from gpu_pool.cluster.suspension import SUSPENDED
from gpu_pool.pool.for_caller import PoolForCaller
from gpu_pool.pool.pool import GpuPool
from gpu_pool.settings import PoolSettings
from gpu_pool.tuning import Tuning
from gpu_pool_client import (
    BadRequest,
    Device,
    EndReason,
    LeaseGone,
    LeaseState,
    MemoryMove,
    MoveOutcome,
    MoveResult,
    MoveVerb,
    NotAllowed,
    PodDeviceUse,
    PoolUnreachable,
    Process,
)
from support.cuda_stub import Driver
from support.fake_kubernetes import FakeKubernetes
from support.fixtures import cuda_libraries, driver
from support.kernel_pods import cluster_pool, held
from support.pools import eventually
from support.whole_devices import start_whole

__all__ = ["cuda_libraries", "driver"]

HUB, GPU = "hub", "GPU-gpu-0"
CARD = Device(GPU, 0, "NVIDIA H100", 81559, driver="580.95.05")
#: An agent is away after it has not asked for so long.
HOLDS = 2.0


@dataclass
class Node:
    """The node n1, and its agent."""

    folder: Path
    driver: Driver
    fake: FakeKubernetes
    #: Whose container each process is in.
    containers: dict[int, Container] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def suspender(self) -> PodSuspender:
        tuning = Tuning(cuda_device=str(self.driver.uvm), memory_free_within=0)
        settings = PoolSettings(checkpoint="on", tuning=tuning, **self.settings)
        return PodSuspender(self.folder / "suspended", settings, self.containers.get)

    @asynccontextmanager
    async def agent(self, pool: GpuPool, card: Device = CARD) -> AsyncIterator[None]:
        """Run an agent. It ends at once, in the middle of anything."""
        suspender, asked = self.suspender(), asyncio.Event()

        def asks() -> PoolForCaller:
            asked.set()
            return as_agent(pool)

        running = asyncio.create_task(MoveLoop(suspender, asks, lambda: [card], 0.05).run())
        try:
            await asked.wait()
            yield
            assert not running.done(), running.exception()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await asyncio.to_thread(suspender.close)

    def records(self) -> list[str]:
        return [each.name for each in (self.folder / "suspended").glob("[!.]*")]


def as_agent(pool: GpuPool, node: str = "n1") -> PoolForCaller:
    """Return the pool as the agent of a node sees it."""
    me = Process.current()
    return pool.for_caller(Caller(f"node/{node}", False, f"node/{node}", me, node=node))


@pytest.fixture
def fake(dra: FakeKubernetes) -> FakeKubernetes:
    return dra


@pytest.fixture
def node(driver: Driver, fake: FakeKubernetes, tmp_path: Path) -> Node:
    return Node(tmp_path, driver, fake)


@asynccontextmanager
async def opened(fake: FakeKubernetes, folder: Path, **settings: Any) -> AsyncIterator[GpuPool]:
    config = fake.kubeconfig(folder / "kubeconfig")
    shared = {"dialect": "shared", "node_agent": "agents/agent", "times": ClusterTimes(use_holds=HOLDS)}
    async with cluster_pool(folder / "store.db", config, HUB, watchdog=settings, **shared) as pool:
        yield pool


@pytest.fixture
async def pool(fake: FakeKubernetes, tmp_path: Path) -> AsyncIterator[GpuPool]:
    async with opened(fake, tmp_path) as pool:
        yield pool


@pytest.fixture
def pid(driver: Driver) -> Iterator[int]:
    """A process that has initialised CUDA, and holds 512 MiB."""
    with driver.process() as pid:
        yield pid


async def started(pool: GpuPool, node: Node, pid: int, text: str = "1") -> str:
    """Start a kernel of ada's whose process that is, and return its lease's id."""
    lease_id = await start_whole(pool, node.fake, text)
    node.containers[pid] = Container(node.fake.get("pods", f"gpu-pool-{lease_id}-1")["metadata"]["uid"], "")
    await says(pool, node, lease_id)
    return lease_id


async def says(pool: GpuPool, node: Node, *leases: str) -> None:
    """Let the agent report that the kernels of these leases use the device, and no others."""
    pods = [node.fake.get("pods", f"gpu-pool-{each}-1")["metadata"]["uid"] for each in leases]
    uses = [PodDeviceUse(uid, "", GPU, 512, utilisation=0.0) for uid in pods]
    await as_agent(pool).report_use([GPU], uses)


def is_marked(node: Node, lease_id: str) -> bool:
    metadata = node.fake.get("pods", f"gpu-pool-{lease_id}-1")["metadata"]
    return SUSPENDED in metadata.get("annotations", {})


async def can_be_moved(pool: GpuPool, lease_id: str) -> None:
    await eventually(lambda: pool.activity(lease_id), lambda activity: activity.movable)


async def test_what_a_kernel_keeps_is_moved_away_and_back(pool: GpuPool, node: Node, pid: int) -> None:
    lease_id = await started(pool, node, pid)
    assert not (await pool.activity(lease_id)).movable
    async with node.agent(pool):
        await can_be_moved(pool, lease_id)
        assert (await pool.park(lease_id)).state is LeaseState.PARKED
        assert node.driver.state(pid) == "checkpointed"
        assert is_marked(node, lease_id)
        other = await held(pool, "1")
        assert (await pool.resume(lease_id)).state is LeaseState.WAITING
        assert node.driver.state(pid) == "checkpointed"
        await pool.release(other.id)
        assert (await pool.wait(lease_id, 60)).state is LeaseState.HELD
        assert node.driver.state(pid) == "running"
        assert not is_marked(node, lease_id)
        # What was reported while it was parked says nothing of it now.
        assert (await pool.activity(lease_id)).initialised is None
    assert node.driver.calls(pid) == ["lock", "checkpoint", "restore", "unlock"]
    assert node.records() == []


async def test_nothing_is_lent_before_its_memory_is_free(pool: GpuPool, node: Node, pid: int) -> None:
    lease_id = await started(pool, node, pid)
    async with node.agent(pool):
        await can_be_moved(pool, lease_id)
        node.driver.scenario(f"hold checkpoint {pid}")
        parking = asyncio.ensure_future(pool.park(lease_id))
        await eventually(lambda: "checkpoint" in node.driver.calls(pid))
        await pool.core.reconciler.once()
        assert (await pool.get_lease(lease_id)).state is LeaseState.HELD
        assert not parking.done()
        node.driver.scenario()
        assert (await parking).state is LeaseState.PARKED


@pytest.mark.parametrize(
    ("scenario", "why"),
    [
        ("fail lock {} 600", "it was busy on its GPU"),
        ("fail checkpoint {} 801", "the driver does not support it"),
        ("keep checkpoint {}", "its device memory is still taken"),
        ("unseen {}", "NVML sees none of its processes"),
    ],
)
async def test_a_kernel_that_cannot_be_suspended_goes_on_with_its_slice(
    pool: GpuPool, node: Node, pid: int, scenario: str, why: str
) -> None:
    lease_id = await started(pool, node, pid)
    async with node.agent(pool):
        await can_be_moved(pool, lease_id)
        node.driver.scenario(scenario.format(pid))
        with pytest.raises(NotAllowed, match=f"not moved away from its pod, since .*{why}"):
            await pool.park(lease_id)
        assert (await pool.get_lease(lease_id)).state is LeaseState.HELD
        assert node.driver.state(pid) == "running"
        await eventually(lambda: not is_marked(node, lease_id))
        assert node.driver.state(pid) == "running"


async def test_what_a_second_agent_is_at_is_not_taken_for_kept(pool: GpuPool, node: Node, pid: int) -> None:
    """While an agent is replaced there may be two of them on a node."""
    lease_id = await started(pool, node, pid)
    async with node.agent(pool), node.agent(pool):
        await can_be_moved(pool, lease_id)
        node.driver.scenario(f"hold checkpoint {pid}")
        parking = asyncio.ensure_future(pool.park(lease_id))
        await eventually(lambda: "checkpoint" in node.driver.calls(pid))
        with pytest.raises(NotAllowed, match="being suspended or restored by another process"):
            await parking
        node.driver.scenario()
        await eventually(lambda: node.driver.state(pid) == "running" and not is_marked(node, lease_id))
        assert (await pool.get_lease(lease_id)).state is LeaseState.HELD


async def test_memory_that_the_pod_may_not_have_is_not_taken(pool: GpuPool, node: Node, pid: int) -> None:
    """What is moved counts towards the limit of the pod, and a process that exceeds it is ended."""
    lease_id = await started(pool, node, pid)
    name = f"gpu-pool-{lease_id}-1"
    found = node.fake.get("pods", name)
    found["spec"]["containers"][0]["resources"]["limits"]["memory"] = "400Mi"
    node.fake.put("pods", found)
    async with node.agent(pool):
        await can_be_moved(pool, lease_id)
        with pytest.raises(
            NotAllowed, match="holds 512 MiB on its GPU, and 3.. MiB of host memory are available"
        ):
            await pool.park(lease_id)
    assert node.driver.calls(pid) == []


async def test_all_suspended_kernels_have_no_more_than_the_agent_may_give_them(
    pool: GpuPool, node: Node, pid: int
) -> None:
    node.settings["checkpoint_host_mib"] = 600
    with node.driver.process() as other:
        first, second = [await started(pool, node, each, "50%") for each in (pid, other)]
        async with node.agent(pool):
            await says(pool, node, first, second)
            await pool.park(first)
            with pytest.raises(
                NotAllowed, match="88 of the 600 MiB of host memory for parked kernels are left"
            ):
                await pool.park(second)
            await pool.resume(first)
            await pool.park(second)
    assert [node.driver.state(each) for each in (pid, other)] == ["running", "checkpointed"]


@pytest.mark.parametrize(
    ("card", "why"),
    [
        (replace(CARD, driver="550.54.15"), "it needs driver 570 or newer, and this is 550.54.15"),
        (replace(CARD, mig_profile="1g.10gb"), "the device is a MIG instance"),
        (replace(CARD, uuid="GPU-of-another"), "the agent of its node does not see its GPU"),
    ],
)
async def test_what_the_agent_cannot_do_is_said_before_it_is_tried(
    pool: GpuPool, node: Node, pid: int, card: Device, why: str
) -> None:
    lease_id = await started(pool, node, pid)
    async with node.agent(pool, card):

        async def is_told() -> bool:
            with pytest.raises(NotAllowed, match="The kernel is not parked") as refused:
                await pool.park(lease_id)
            return why in str(refused.value)

        await eventually(is_told)
        assert not (await pool.activity(lease_id)).movable
    assert node.driver.calls(pid) == []


async def test_no_kernel_is_suspended_without_an_agent_that_does_it(
    pool: GpuPool, node: Node, pid: int
) -> None:
    lease_id = await started(pool, node, pid)
    with pytest.raises(NotAllowed, match="moves nothing, or has not been heard of lately"):
        await pool.park(lease_id)


async def test_none_is_suspended_where_that_is_switched_off(
    fake: FakeKubernetes, node: Node, pid: int, tmp_path: Path
) -> None:
    async with opened(fake, tmp_path, checkpoint="off") as pool, node.agent(pool):
        lease_id = await started(pool, node, pid)
        with pytest.raises(NotAllowed, match=r"switched off \(c\.PoolSettings\.checkpoint\)"):
            await pool.park(lease_id)


async def test_an_agent_that_falls_silent_while_it_suspends_lends_nothing(
    pool: GpuPool, node: Node, pid: int
) -> None:
    """Whether it is suspended nobody knows: it keeps its slice, and the next agent moves all back."""
    lease_id = await started(pool, node, pid)
    agent = as_agent(pool)
    assert await agent.move_memory({GPU: ""}) == ()
    parking = asyncio.ensure_future(pool.park(lease_id))
    (move,) = await agent.move_memory({GPU: ""}, seconds=60)
    assert (move.verb, move.device) == (MoveVerb.SUSPEND, GPU)
    suspender = node.suspender()
    assert (await asyncio.to_thread(suspender.move, move)).outcome is MoveOutcome.DONE
    await asyncio.to_thread(suspender.close)
    with pytest.raises(NotAllowed, match="has not said that it is done"):
        await parking
    assert (await pool.get_lease(lease_id)).state is LeaseState.HELD
    assert node.driver.state(pid) == "checkpointed"
    async with node.agent(pool):
        await eventually(lambda: node.driver.state(pid) == "running" and not is_marked(node, lease_id))
    # What it says after that of the first move is of no interest to anybody.
    await agent.move_memory({GPU: ""}, [MoveResult(move.id, MoveOutcome.LOST, "anything")])
    assert (await pool.get_lease(lease_id)).state is LeaseState.HELD


async def test_an_agent_that_is_replaced_meanwhile_restores_what_the_first_one_suspended(
    pool: GpuPool, node: Node, pid: int
) -> None:
    lease_id = await started(pool, node, pid)
    async with node.agent(pool):
        await can_be_moved(pool, lease_id)
        await pool.park(lease_id)
    async with node.agent(pool):
        assert (await pool.resume(lease_id)).state is LeaseState.HELD
    assert node.driver.state(pid) == "running"


async def test_a_kernel_whose_agent_is_away_waits_for_it_and_is_told_so(
    pool: GpuPool, node: Node, pid: int
) -> None:
    lease_id = await started(pool, node, pid)
    async with node.agent(pool):
        await can_be_moved(pool, lease_id)
        await pool.park(lease_id)
    with pytest.raises(PoolUnreachable, match="in the memory of that machine, and comes back") as told:
        await pool.resume(lease_id)
    assert "its variables are kept" in str(told.value)
    assert node.driver.state(pid) == "checkpointed"
    async with node.agent(pool):
        assert (await pool.resume(lease_id)).state is LeaseState.HELD
        assert node.driver.state(pid) == "running"


async def test_a_service_that_is_restarted_knows_what_is_suspended(
    fake: FakeKubernetes, node: Node, pid: int, tmp_path: Path
) -> None:
    async with opened(fake, tmp_path) as pool:
        lease_id = await started(pool, node, pid)
        async with node.agent(pool):
            await can_be_moved(pool, lease_id)
            await pool.park(lease_id)
    async with opened(fake, tmp_path) as pool, node.agent(pool):
        for _ in range(3):
            await pool.core.reconciler.once()
        assert node.driver.state(pid) == "checkpointed"
        assert (await pool.resume(lease_id)).state is LeaseState.HELD
        assert node.driver.state(pid) == "running"


async def test_a_service_that_ends_before_the_slice_is_lent_has_all_moved_back_by_the_next_one(
    fake: FakeKubernetes, node: Node, pid: int, tmp_path: Path
) -> None:
    async with opened(fake, tmp_path) as pool:
        lease_id = await started(pool, node, pid)
        async with node.agent(pool):
            await can_be_moved(pool, lease_id)
            node.driver.scenario(f"hold checkpoint {pid}")
            parking = asyncio.ensure_future(pool.park(lease_id))
            await eventually(lambda: "checkpoint" in node.driver.calls(pid))
            parking.cancel()
            with suppress(asyncio.CancelledError):
                await parking
            node.driver.scenario()
    async with opened(fake, tmp_path) as pool, node.agent(pool):
        await eventually(lambda: node.driver.state(pid) == "running" and not is_marked(node, lease_id))
        assert (await pool.get_lease(lease_id)).state is LeaseState.HELD


async def test_a_kernel_that_cannot_be_brought_back_ends_and_says_why(
    pool: GpuPool, node: Node, pid: int
) -> None:
    lease_id = await started(pool, node, pid)
    async with node.agent(pool):
        await can_be_moved(pool, lease_id)
        await pool.park(lease_id)
        node.driver.scenario(f"break restore {pid} 999")
        with pytest.raises(LeaseGone, match="could not be brought back, so it is ended"):
            await pool.resume(lease_id)
    lease = await pool.get_lease(lease_id)
    assert lease.end_reason is EndReason.NOT_RESTORED
    assert "could not be brought back" in lease.notice
    await eventually(lambda: f"gpu-pool-{lease_id}-1" not in node.fake.named("pods"))
    assert len(await pool.history()) == 1


async def test_memory_that_somebody_else_has_is_waited_for(pool: GpuPool, node: Node, pid: int) -> None:
    lease_id = await started(pool, node, pid)
    async with node.agent(pool):
        await can_be_moved(pool, lease_id)
        await pool.park(lease_id)
        node.driver.scenario("memory 600", "others 400")
        with pytest.raises(PoolUnreachable, match="not enough free memory for it on its GPU"):
            await pool.resume(lease_id)
        assert node.driver.state(pid) == "checkpointed"
        node.driver.scenario()
        # Nobody asks again, and its slice is held.
        await eventually(lambda: node.driver.state(pid) == "running" and not is_marked(node, lease_id))
        assert (await pool.resume(lease_id)).state is LeaseState.HELD


async def test_a_kernel_that_was_started_anew_meanwhile_has_nothing_to_be_moved_back(
    pool: GpuPool, node: Node
) -> None:
    with node.driver.process() as pid:
        lease_id = await started(pool, node, pid)
        async with node.agent(pool):
            await can_be_moved(pool, lease_id)
            await pool.park(lease_id)
    async with node.agent(pool):
        await eventually(lambda: node.records() == [])
        assert (await pool.resume(lease_id)).state is LeaseState.HELD
        assert not is_marked(node, lease_id)


async def test_a_pod_that_goes_while_it_is_suspended_leaves_nothing(pool: GpuPool, node: Node) -> None:
    with node.driver.process() as pid:
        lease_id = await started(pool, node, pid)
        async with node.agent(pool):
            await can_be_moved(pool, lease_id)
            await pool.park(lease_id)
            node.fake.remove("pods", f"gpu-pool-{lease_id}-1")
            await eventually(lambda: pool.get_lease(lease_id), lambda lease: lease.state is LeaseState.ENDED)
    async with node.agent(pool):
        await eventually(lambda: node.records() == [])
        assert await as_agent(pool).move_memory({GPU: ""}) == ()


async def test_what_keeps_nothing_there_is_parked_without_an_agent_that_suspends(
    pool: GpuPool, node: Node, pid: int
) -> None:
    lease_id = await started(pool, node, pid)
    await says(pool, node)
    assert (await pool.park(lease_id)).state is LeaseState.PARKED
    assert not is_marked(node, lease_id)
    assert (await pool.resume(lease_id)).state is LeaseState.HELD
    assert node.driver.calls(pid) == []


async def test_an_agent_is_told_of_nothing_but_moves_on_its_own_node(
    pool: GpuPool, node: Node, pid: int
) -> None:
    """And what another one says of them counts for nothing."""
    lease_id = await started(pool, node, pid)
    agent, other = as_agent(pool), as_agent(pool, "n2")
    await agent.move_memory({GPU: ""})
    parking = asyncio.ensure_future(pool.park(lease_id))
    (move,) = await agent.move_memory({GPU: ""}, seconds=60)
    assert await other.move_memory({GPU: ""}) == ()
    await other.move_memory({GPU: ""}, [MoveResult(move.id, MoveOutcome.DONE)])
    assert await agent.move_memory({GPU: ""}, known=[move.id]) == (move,)
    assert not parking.done()
    await agent.move_memory({GPU: ""}, [MoveResult(move.id, MoveOutcome.KEPT, "x" * 10_000 + "\n\x1b[2J")])
    with pytest.raises(NotAllowed) as refused:
        await parking
    assert len(str(refused.value)) < 1_000
    with pytest.raises(NotAllowed, match="Only a node agent"):
        await pool.move_memory({})


@pytest.mark.parametrize(
    "told",
    [
        ({f"GPU-{number}": "" for number in range(257)}, (), ()),
        ({"": ""}, (), ()),
        ({GPU: ""}, [MoveResult("a b", MoveOutcome.DONE)], ()),
        ({GPU: ""}, (), ["m"] * 1_025),
    ],
)
async def test_what_cannot_be_so_is_refused(pool: GpuPool, told: tuple[Any, Any, Any]) -> None:
    unmovable, results, known = told
    with pytest.raises(BadRequest):
        await as_agent(pool).move_memory(unmovable, results, known=known)


async def test_a_pool_that_parks_no_pods_says_so_to_an_agent(fake: FakeKubernetes, tmp_path: Path) -> None:
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    async with cluster_pool(
        tmp_path / "store.db", config, HUB, dialect="dra", node_agent="agents/agent"
    ) as pool:
        with pytest.raises(NotAllowed, match="with the dialect 'shared' alone"):
            await as_agent(pool).move_memory({})


def test_only_processes_of_that_pod_are_touched(node: Node, pid: int) -> None:
    """By the uid of the pod or, where no cgroup says that, by its containers."""
    with node.driver.process() as of_another, node.driver.process() as by_container:
        node.containers |= {
            pid: Container("uid-1", "c1"),
            of_another: Container("uid-2", "c1"),
            by_container: Container("", "c9"),
        }
        suspender = node.suspender()
        for move in (
            MemoryMove("1", MoveVerb.SUSPEND, "uid-1", ("c1",), GPU),
            MemoryMove("2", MoveVerb.SUSPEND, "uid-9", ("c9",), GPU),
        ):
            assert suspender.move(move).outcome is MoveOutcome.DONE
        states = [node.driver.state(each) for each in (pid, of_another, by_container)]
        suspender.close()
    assert states == ["checkpointed", "running", "checkpointed"]
