"""A group of nodes at zero: asked for, told of, and used once it has grown. Over the fake of the API.

The autoscaler is a stand-in that adds a node when a test tells it to; ``tests/cluster/api_server`` has one
that goes by the pods, and a real scheduler.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import Holder, LeaseState, NeverFits, parse_request
from support.clusters import hami, node
from support.fake_kubernetes import FakeKubernetes, fake_kubernetes, trouble
from support.kernel_pods import backend_of, claim, cluster_pool, command, held, notebook
from support.pools import eventually, take

HUB = "hub"
ADA = Holder("ada")


def of_group(name: str, **more: Any) -> dict[str, Any]:
    found = hami(name, **more)
    found["metadata"]["labels"]["pool"] = "gpu"
    return found


@pytest.fixture
async def fake() -> AsyncIterator[FakeKubernetes]:
    """A cluster whose only node has no GPU."""
    async with fake_kubernetes() as fake:
        bare = hami("cpu-1", gpus=0)
        bare["metadata"] |= {"annotations": {}, "labels": {}}
        fake.put("nodes", bare)
        fake.put("pods", notebook("ada", HUB, node="cpu-1"))
        fake.put("persistentvolumeclaims", claim("ada", HUB))
        fake.webhook = lambda _, found: _made(found, ago=0)
        yield fake


def _made(found: dict[str, Any], *, ago: float) -> dict[str, Any]:
    """Return an object as the API server does that was asked to create it so long ago."""
    at = datetime.now(timezone.utc) - timedelta(seconds=ago)
    return {**found, "metadata": {**found["metadata"], "creationTimestamp": f"{at:%Y-%m-%dT%H:%M:%SZ}"}}


@asynccontextmanager
async def pool_of(fake: FakeKubernetes, folder: Path, **group: Any) -> AsyncIterator[GpuPool]:
    """Serve the cluster with a group of nodes that can grow from none."""
    example = folder / "node.json"
    example.write_text(json.dumps({"kind": "Node", **of_group("old")}))
    groups = {"v100": {"example": str(example), "select": {"pool": "gpu"}, "most": 2, **group}}
    config = fake.kubeconfig(folder / "kubeconfig")
    async with cluster_pool(folder / "store.db", config, HUB, node_groups=groups) as pool:
        yield pool


@pytest.fixture
async def pool(fake: FakeKubernetes, tmp_path: Path) -> AsyncIterator[GpuPool]:
    async with pool_of(fake, tmp_path) as pool:
        yield pool


def placeholders(fake: FakeKubernetes) -> list[str]:
    return [name for name in fake.named("pods") if name.startswith("gpu-pool-node-")]


async def until_told(pool: GpuPool, lease_id: str, words: str) -> None:
    await eventually(lambda: pool.explain(lease_id), lambda explanation: words in explanation.why)


async def test_a_node_is_asked_for_and_used_once_it_has_come(pool: GpuPool, fake: FakeKubernetes) -> None:
    waiting = await take(pool, "2%", "first", ADA)
    assert (await pool.get_lease(waiting)).state is LeaseState.WAITING
    await eventually(lambda: len(placeholders(fake)) == 1)
    await until_told(pool, waiting, "A machine is being started, which takes some minutes.")
    assert str(await pool.explain(waiting)).startswith("You are next in the queue. A machine")
    fake.put("nodes", of_group("new-1"))
    lease = await pool.wait(waiting, 60)
    assert lease.slices[0].device.node == "new-1"
    await eventually(lambda: placeholders(fake) == [])
    assert (await pool.launch(waiting, command())).version


async def test_a_node_that_came_is_how_long_the_next_takes(fake: FakeKubernetes, tmp_path: Path) -> None:
    fake.webhook = lambda _, found: _made(found, ago=150)
    async with pool_of(fake, tmp_path, usual_minutes=9) as pool:
        forecast = await pool.forecast(parse_request("2%"), ADA)
        assert forecast is not None
        assert forecast.why == "A machine has to be started for it, about 9 min."
        first = await take(pool, "1", "first", ADA)
        await eventually(lambda: len(placeholders(fake)) == 1)
        fake.put("nodes", of_group("new-1"))
        await pool.wait(first, 60)
        fake.webhook = lambda _, found: _made(found, ago=0)
        second = await take(pool, "1", "second", ADA)
        # 150 s in the history are rounded to 2 min.
        await until_told(pool, second, "A machine is being started, about 2 min more.")
    async with pool_of(fake, tmp_path, usual_minutes=9) as pool:
        await until_told(pool, second, "A machine is being started, about 2 min more.")


async def test_what_could_be_there_is_shown_closed_and_goes_when_the_node_is_there(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    (device,) = (await pool.status()).devices
    assert (device.device.node, device.drained, device.free_milli) == ("v100/new", True, 0)
    fake.put("nodes", of_group("new-1"))

    async def is_there() -> bool:
        devices = (await pool.status()).devices
        return [(each.device.node, each.drained) for each in devices] == [("new-1", False)]

    await eventually(is_there)
    assert (await held(pool)).slices[0].device.uuid == "GPU-new-1-0"
    assert placeholders(fake) == []


async def test_what_no_node_of_the_group_could_hold_is_refused_at_once(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    with pytest.raises(NeverFits):
        await take(pool, "2", "first", ADA)
    assert placeholders(fake) == []


async def test_no_more_nodes_than_the_group_may_have(pool: GpuPool, fake: FakeKubernetes) -> None:
    leases = [await take(pool, "1", f"key-{number}", ADA) for number in range(4)]
    await eventually(lambda: len(placeholders(fake)) == 2)
    for number in (1, 2):
        fake.put("nodes", of_group(f"new-{number}"))
        await pool.wait(leases[number - 1], 60)
    await eventually(lambda: placeholders(fake) == [])
    # A fifth waits for somebody's end, and is not promised a machine.
    assert "machine" not in (await pool.explain(leases[3])).why
    await pool.release(leases[0])
    assert (await pool.wait(leases[2], 60)).slices[0].device.node == "new-1"


async def test_who_leaves_the_line_asks_for_no_node_any_more(pool: GpuPool, fake: FakeKubernetes) -> None:
    waiting = await take(pool, "2%", "first", ADA)
    await eventually(lambda: len(placeholders(fake)) == 1)
    await pool.release(waiting)
    await eventually(lambda: placeholders(fake) == [])


async def test_a_service_that_starts_anew_asks_for_no_second_node(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    async with pool_of(fake, tmp_path) as pool:
        waiting = await take(pool, "2%", "first", ADA)
        await eventually(lambda: len(placeholders(fake)) == 1)
        (made,) = placeholders(fake)
    async with pool_of(fake, tmp_path) as pool:
        await until_told(pool, waiting, "A machine is being started")
        assert placeholders(fake) == [made]
        await backend_of(pool).growth.ask_for_nodes()
        assert fake.asked("POST", "pods") == 1


async def test_a_group_that_does_not_grow_is_told_to_the_student_and_the_administrator(
    pool: GpuPool, fake: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    fake.pages[f"/api/v1/namespaces/{HUB}/events"] = {
        "items": [
            {
                "reason": "NotTriggerScaleUp",
                "message": "pod didn't trigger scale-up: 1 max node group size reached",
                "lastTimestamp": "2026-11-22T10:00:00Z",
                "source": {"component": "cluster-autoscaler"},
            }
        ]
    }
    waiting = await take(pool, "2%", "first", ADA)
    await until_told(pool, waiting, "none can be started for it at the moment; it is tried again")
    assert "max node group size" not in (await pool.explain(waiting)).why
    assert "No node of 'v100' can be started now" in caplog.text
    assert "max node group size reached" in caplog.text
    assert (await pool.get_lease(waiting)).state is LeaseState.WAITING
    fake.put("nodes", of_group("new-1"))
    await pool.wait(waiting, 60)


async def test_a_start_that_is_late_is_told(fake: FakeKubernetes, tmp_path: Path) -> None:
    fake.webhook = lambda _, found: _made(found, ago=700)
    async with pool_of(fake, tmp_path, late_minutes=10) as pool:
        waiting = await take(pool, "2%", "first", ADA)
        await until_told(pool, waiting, "A machine was requested 11min")
        assert "Tell your instructor" in (await pool.explain(waiting)).why


@pytest.mark.long
async def test_without_the_right_to_read_events_the_node_is_asked_for_all_the_same(
    pool: GpuPool, fake: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    fake.before_read = lambda kind: trouble(403, "Forbidden", "no") if kind == "events" else None
    waiting = await take(pool, "2%", "first", ADA)
    await eventually(lambda: "The autoscaler's events cannot be read" in caplog.text)
    await until_told(pool, waiting, "A machine is being started")


async def test_a_node_of_a_group_that_is_away_may_be_replaced_and_another_may_not(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    fake.put("nodes", of_group("new-1"))
    fake.put("nodes", hami("other", gpus=2))
    await eventually(lambda: {each.node for each in backend_of(pool).view.devices()} == {"new-1", "other"})
    for request in ("2", "1"):
        await take(pool, request, f"held-{request}", ADA)
    both = await take(pool, "2", "both", ADA)
    one = await take(pool, "1", "one", ADA)
    for name, more in (("new-1", {"labels": {"pool": "gpu"}}), ("other", {})):
        fake.put("nodes", node(name, **more))
    await eventually(lambda: backend_of(pool).view.away == {"new-1", "other"})
    await pool.core.reconciler.once()
    assert {each.node for each in backend_of(pool).view.lasting()} == {"new-1"}
    assert backend_of(pool)._hopeless.keys() == {both}
    assert (await pool.get_lease(one)).state is LeaseState.WAITING


@asynccontextmanager
async def pool_of_two(fake: FakeKubernetes, folder: Path) -> AsyncIterator[GpuPool]:
    """Serve the cluster with a group of nodes with one GPU, and another of nodes with two."""
    groups = {}
    for name, gpus in (("one", 1), ("two", 2)):
        found = hami("old", gpus=gpus)
        found["metadata"]["labels"]["pool"] = name
        example = folder / f"{name}.json"
        example.write_text(json.dumps({"kind": "Node", **found}))
        groups[name] = {"example": str(example), "select": {"pool": name}, "most": 2}
    config = fake.kubeconfig(folder / "kubeconfig")
    async with cluster_pool(folder / "store.db", config, HUB, node_groups=groups) as pool:
        yield pool


def refuse_to_create(fake: FakeKubernetes) -> None:
    words = "exceeded quota: gpus"
    fake.before_write = lambda method, _: trouble(403, "Forbidden", words) if method == "POST" else None


async def test_a_group_that_is_refused_keeps_nobody_from_asking_for_another(
    fake: FakeKubernetes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_to_create(fake)
    async with pool_of_two(fake, tmp_path) as pool:
        for request in ("1", "2"):
            await take(pool, request, f"key-{request}", ADA)
        for name in ("one", "two"):
            words = f"No node of '{name}' can be requested: The cluster refused"
            await eventually(lambda words=words: words in caplog.text, within=30)  # type: ignore[misc]
        fake.before_write = lambda *_: None
        await eventually(lambda: len(placeholders(fake)) == 2)


async def test_a_node_that_nobody_needs_is_given_up_while_another_group_is_refused(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    async with pool_of_two(fake, tmp_path) as pool:
        two = await take(pool, "2", "two", ADA)
        await eventually(lambda: len(placeholders(fake)) == 1)
        refuse_to_create(fake)
        await take(pool, "1", "one", ADA)
        await pool.release(two)
        await eventually(lambda: placeholders(fake) == [], within=30)


async def test_a_kernel_is_not_moved_by_an_autoscaler(pool: GpuPool, fake: FakeKubernetes) -> None:
    fake.put("nodes", of_group("new-1"))
    lease = await held(pool)
    await pool.launch(lease.id, command())
    annotations = fake.get("pods", f"gpu-pool-{lease.id}-1")["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert annotations["karpenter.sh/do-not-disrupt"] == "true"
