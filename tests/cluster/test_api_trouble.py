"""A cluster as a pool while the API server is away, forgets, loses an answer or refuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gpu_pool.cluster.api import Api, ApiAway, ApiWriter, connect
from gpu_pool.cluster.api_access import ApiAccess, by_kubeconfig
from gpu_pool.cluster.dialects import Manifest
from gpu_pool.cluster.informer import Informer
from gpu_pool.cluster.kept_objects import LeasePods
from gpu_pool.cluster.settings import ClusterTimes
from gpu_pool.pool.backend import Taken
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import LeaseGone, LeaseState, NotAllowed, PodPhase, PoolUnreachable
from support.fake_kubernetes import FakeKubernetes, trouble
from support.kernel_pods import (
    backend_of,
    cluster_pool,
    command,
    foreign,
    held,
    running,
    running_no_more,
    start,
    until_free,
)
from support.pools import eventually

pytestmark = pytest.mark.usefixtures("second_node")
HUB = "hub"


async def test_a_watch_that_is_cut_goes_on_where_it_was(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease = await start(pool, fake)
    fake.cut()
    fake.put("pods", foreign("server", "n2", gpu="GPU-n2-0"))
    await until_free(pool, 980, 0)
    assert (await pool.pod(lease)).phase is PodPhase.RUNNING
    assert fake.asked("LIST", "pods") == 1


async def test_where_the_place_is_forgotten_all_is_listed_again_and_nothing_is_missed(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    kept, deleted = await start(pool, fake), await start(pool, fake)
    await fake.stop()
    fake.remove("pods", f"gpu-pool-{deleted}-1")
    fake.put("pods", foreign("server", "n2", gpu="GPU-n2-0"))
    fake.forget()
    await fake.start()
    with pytest.raises(LeaseGone, match="Somebody who manages the cluster deleted it"):
        await running_no_more(pool, deleted)
    await until_free(pool, 980, 0)
    assert (await pool.pod(kept)).phase is PodPhase.RUNNING
    assert fake.asked("LIST", "pods") == 2


class Listing:
    """Holds back the answer to a list of all pods until it is told to go on."""

    def __init__(self, fake: FakeKubernetes) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        fake.while_listing = self._hold

    async def _hold(self, kind: str) -> None:
        if kind == "pods":
            self.begun.set()
            await self.go_on.wait()


async def test_a_kernel_that_is_started_while_all_is_listed_again_is_not_taken_for_deleted(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease, listing = await held(pool), Listing(fake)
    fake.put("pods", foreign("server", "n2", gpu="GPU-n2-0"))
    fake.forget()
    await asyncio.wait_for(listing.begun.wait(), 120)
    await pool.launch(lease.id, command())
    listing.go_on.set()
    await until_free(pool, 980, 0)  # by then the list was taken over
    fake.run(f"gpu-pool-{lease.id}-1")
    await running(pool, lease.id)
    assert (await pool.get_lease(lease.id)).state is LeaseState.HELD


async def test_what_was_deleted_before_all_is_listed_again_does_not_stay(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    """As where the answer to a write comes after the object's end."""
    listing = Listing(fake)
    stored = fake.put("pods", foreign("server", "n2", gpu="GPU-n2-0"))
    fake.remove("pods", "server")
    fake.forget()
    await asyncio.wait_for(listing.begun.wait(), 120)
    backend_of(pool).view.pods.put(stored)
    await until_free(pool, 1000, 0)
    listing.go_on.set()
    await until_free(pool, 1000, 1000)


def not_a_cluster() -> web.Response:
    """Answer as a gateway to several clusters does that has lost this one."""
    return trouble(404, "", 'clusters.management.cattle.io "c-1" not found')


def no_such_kind() -> web.Response:
    return web.json_response(
        {"kind": "Status", "code": 404, "reason": "NotFound", "message": "the server could not find it"},
        status=404,
    )


def nothing() -> web.Response:
    return web.json_response({})


@pytest.mark.parametrize("answer", [not_a_cluster, no_such_kind, nothing])
async def test_that_there_are_no_nodes_and_pods_in_a_cluster_is_not_believed(
    pool: GpuPool, fake: FakeKubernetes, answer: Callable[[], web.Response]
) -> None:
    lease = await start(pool, fake)
    fake.before_read = lambda _: answer()
    fake.put("pods", foreign("server", "n2", gpu="GPU-n2-0"))
    fake.forget()
    for kind in ("nodes", "pods"):
        await eventually(lambda kind=kind: fake.asked("LIST", kind), lambda asked: asked > 3, within=30)  # type: ignore[misc]
    await pool.core.reconciler.once()
    assert (await pool.get_lease(lease)).state is LeaseState.HELD
    assert (await pool.pod(lease)).phase is PodPhase.RUNNING
    fake.before_read = lambda _: None
    await until_free(pool, 980, 0)


async def test_that_a_kind_is_not_served_is_believed_the_second_time(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    group, kind = "/apis/node.k8s.io/v1", "runtimeclasses"
    fake.put_of(group, kind, {"metadata": {"name": "nvidia"}})
    asked_when_it_went: list[int] = []
    api = await connect(str(fake.kubeconfig(tmp_path / "kubeconfig")))
    informer = Informer(
        api,
        f"{group}/{kind}",
        logging.getLogger("gpu_pool.tests"),
        lambda _, now: None if now else asked_when_it_went.append(fake.asked("LIST", kind)),
    )
    following = asyncio.create_task(informer.run())
    try:
        await asyncio.wait_for(informer.synced.wait(), 120)
        fake.absent.add(kind)
        fake.cut()
        await eventually(lambda: not list(informer))
        assert asked_when_it_went == [2]  # the watch was the first to be refused
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await api.close()


async def test_a_deletion_to_which_a_gateway_says_that_it_has_no_cluster_is_not_done(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lost = iter([True])
    lease = await start(pool, fake)
    fake.before_write = lambda method, _: (
        not_a_cluster() if method == "DELETE" and next(lost, False) else None
    )
    await pool.release(lease)
    await eventually(lambda: fake.named("pods") == ["jupyter-ada"], within=30)


class FailingAccess:
    """A cluster's access whose credentials cannot be had the first time."""

    def __init__(self, access: ApiAccess) -> None:
        self.url, self.connector, self.options = access.url, access.connector, access.options
        self._access, self._failures = access, iter([RuntimeError("exec: process returned 1")])

    async def authorization(self) -> str | None:
        for failure in self._failures:
            raise failure
        return await self._access.authorization()

    async def close(self) -> None:
        await self._access.close()


async def test_what_lacked_credentials_is_deleted_once_there_are_some(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    access, namespace = await by_kubeconfig(str(fake.kubeconfig(tmp_path / "kubeconfig")))
    api = Api(FailingAccess(access), namespace)
    writer = ApiWriter(api, ClusterTimes(), logging.getLogger("gpu_pool.tests"))
    assert await writer.delete(fake.get("pods", "jupyter-ada"))
    assert fake.named("pods") == []
    await api.close()


async def test_a_request_without_credentials_says_why(fake: FakeKubernetes, tmp_path: Path) -> None:
    access, namespace = await by_kubeconfig(str(fake.kubeconfig(tmp_path / "kubeconfig")))
    api = Api(FailingAccess(access), namespace)
    with pytest.raises(ApiAway, match="no credentials for it: RuntimeError: exec: process returned 1"):
        await api.list("/api/v1/pods", {})
    await api.close()


async def test_a_kernel_whose_end_has_failed_is_ended_at_the_next_look(
    pool: GpuPool, fake: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, failures = ApiWriter.delete, iter([RuntimeError("nobody has foreseen it")])
    failed = asyncio.Event()

    async def delete_at_last(writer: ApiWriter, found: Manifest, where: str = "") -> bool:
        for failure in failures:
            failed.set()
            raise failure
        return await delete(writer, found, where)

    monkeypatch.setattr(ApiWriter, "delete", delete_at_last)
    lease = await start(pool, fake)
    await pool.release(lease)
    await asyncio.wait_for(failed.wait(), 120)
    await pool.core.reconciler.once()
    await eventually(lambda: fake.named("pods") == ["jupyter-ada"], within=30)


async def test_a_lease_whose_end_has_failed_is_ended_at_the_next_look(
    pool: GpuPool, fake: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, backend = await start(pool, fake), backend_of(pool)
    end_taken, failures = backend.pool.end_taken, iter([OSError("the disk does not answer")])
    failed = asyncio.Event()

    async def end_at_last(lease_id: str, taken: Taken) -> bool:
        for failure in failures:
            failed.set()
            raise failure
        return await end_taken(lease_id, taken)

    monkeypatch.setattr(backend.pool, "end_taken", end_at_last)
    fake.change("pods", f"gpu-pool-{lease}-1", phase="Failed", reason="Evicted", message="low on memory")
    await asyncio.wait_for(failed.wait(), 120)
    await pool.core.reconciler.once()
    backend.kernels.evaluate_all()
    await eventually(lambda: pool.get_lease(lease), lambda found: found.state is LeaseState.ENDED, within=30)
    await eventually(lambda: fake.named("pods") == ["jupyter-ada"])


async def test_while_the_api_is_away_all_is_told_from_memory_and_launches_wait(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await start(pool, fake)
    await fake.stop()
    assert (await pool.pod(lease)).phase is PodPhase.RUNNING
    second = await held(pool)
    launching = asyncio.create_task(pool.launch(second.id, command()))
    await pool.release(lease)
    await fake.start()
    await asyncio.wait_for(launching, 120)
    await eventually(lambda: fake.named("pods") == [f"gpu-pool-{second.id}-1", "jupyter-ada"])


async def test_a_kernel_that_is_ended_while_it_is_started_does_not_stay(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await held(pool)
    await fake.stop()
    launching = asyncio.create_task(pool.launch(lease.id, command()))
    await asyncio.sleep(0)
    ending = asyncio.create_task(pool.end_pod(lease.id))
    await fake.start()
    await asyncio.wait_for(asyncio.gather(launching, ending), 120)
    await eventually(lambda: fake.named("pods") == ["jupyter-ada"])
    assert fake.asked("POST", "pods") == 1


@pytest.mark.parametrize("times", [ClusterTimes(retried_for=0.0)])
async def test_what_is_away_for_long_is_told(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease = await held(pool)
    await fake.stop()
    with pytest.raises(PoolUnreachable, match="does not answer at the moment.*Your slice is kept"):
        await pool.launch(lease.id, command())
    await fake.start()
    await pool.launch(lease.id, command())


async def test_an_answer_that_was_lost_makes_no_second_pod(pool: GpuPool, fake: FakeKubernetes) -> None:
    lost = iter([True])

    def lose(method: str, kind: str) -> Any:
        if (method, kind) == ("POST", "secrets") and next(lost, False):
            return trouble(503, "ServiceUnavailable", "etcd is slow")
        return None

    fake.before_write = lose
    lease, kernel = await held(pool), command()
    await asyncio.gather(*(pool.launch(lease.id, kernel) for _ in range(3)))
    assert fake.named("pods") == [f"gpu-pool-{lease.id}-1", "jupyter-ada"]
    assert fake.named("secrets") == [f"gpu-pool-{lease.id}-1"]


async def test_a_pod_of_the_same_name_that_nobody_has_seen_yet_is_found(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    """As after a crash between the creation of a pod and its answer, with a watch that lags behind."""
    config, kernel = fake.kubeconfig(tmp_path / "kubeconfig"), command()
    async with cluster_pool(tmp_path / "store.db", config, HUB) as pool:
        lease = await held(pool)
        await pool.launch(lease.id, kernel)
    async with cluster_pool(tmp_path / "store.db", config, HUB) as pool:
        (pod,) = backend_of(pool).view.own.of(lease.id)
        backend_of(pool).view.own = LeasePods()
        await pool.launch(lease.id, kernel)
        assert fake.named("pods") == [pod["metadata"]["name"], "jupyter-ada"]
        backend_of(pool).view.own = LeasePods()
        await pool.launch(lease.id, command())
        assert f"gpu-pool-{lease.id}-2" in fake.named("pods")


async def test_a_refusal_of_the_cluster_is_told_and_the_slice_is_kept(
    pool: GpuPool, fake: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    words = 'pods "x" is forbidden: exceeded quota: students'
    fake.before_write = lambda method, kind: trouble(403, "Forbidden", words) if method == "POST" else None
    lease = await held(pool)
    with pytest.raises(NotAllowed, match="exceeded quota: students"):
        await pool.launch(lease.id, command())
    assert (await pool.get_lease(lease.id)).state is LeaseState.HELD
    assert f"The cluster refused POST /api/v1/namespaces/hub/pods: 403 Forbidden: {words}" in caplog.text


async def test_a_service_that_may_not_read_everything_does_not_wait_for_that_to_change(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    fake.before_read = lambda kind: trouble(403, "Forbidden", "no") if kind == "runtimeclasses" else None
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    async with AsyncExitStack() as stack:
        opened = cluster_pool(tmp_path / "store.db", config, HUB, times=ClusterTimes(settled_within=3600.0))
        pool = await asyncio.wait_for(stack.enter_async_context(opened), 120)
        await held(pool)
