"""The service comes back and finds another cluster, dialect, course file or setting than it left."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gpu_pool.courses import Courses
from gpu_pool_client import EndReason, Holder, LeaseState, NeverFits, NotAllowed, PodPhase, parse_request
from support.clusters import hami, plain
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import claim, cluster_pool, command, held, notebook, running
from support.pools import eventually, take

HUB = "hub"


@pytest.fixture
async def fake(fake: FakeKubernetes) -> FakeKubernetes:
    fake.put("nodes", hami("n2"))
    return fake


class Service:
    """A service that is restarted over the same store."""

    def __init__(self, fake: FakeKubernetes, folder: Path) -> None:
        self._store, self._config = folder / "store.db", fake.kubeconfig(folder / "kubeconfig")

    def __call__(self, **settings: object):  # type: ignore[no-untyped-def]
        return cluster_pool(self._store, self._config, HUB, **settings)  # type: ignore[arg-type]


@pytest.fixture
def service(fake: FakeKubernetes, tmp_path: Path) -> Service:
    return Service(fake, tmp_path)


async def test_a_node_that_went_meanwhile_takes_its_kernels_and_slices_along(
    service: Service, fake: FakeKubernetes
) -> None:
    async with service() as pool:
        runs, holds = await held(pool, "60%"), await held(pool, "30%")
        await pool.launch(runs.id, command())
        fake.run(f"gpu-pool-{runs.id}-1")
        await running(pool, runs.id)
        elsewhere = await held(pool, "60%")
        assert elsewhere.slices[0].device.node == "n2"
        waiting = await take(pool, "60%", "waiting")
        assert (await pool.get_lease(waiting)).state is LeaseState.WAITING
    fake.remove("nodes", "n1")
    fake.put("nodes", hami("n3"))
    async with service() as pool:

        async def have_ended() -> bool:
            return {(await pool.get_lease(each.id)).state for each in (runs, holds)} == {LeaseState.ENDED}

        await eventually(have_ended)
        assert (await pool.get_lease(holds.id)).end_reason is EndReason.DEVICE_LOST
        assert (await pool.get_lease(elsewhere.id)).state is LeaseState.HELD
        assert (await pool.wait(waiting, 30)).slices[0].device.node == "n3"
        await eventually(lambda: fake.named("pods") == ["jupyter-ada"])


async def test_whoever_waits_for_what_is_not_there_any_more_waits_until_it_is_again(
    service: Service, fake: FakeKubernetes
) -> None:
    async with service() as pool:
        everything = [await held(pool, "1"), await held(pool, "1")]
        waiting = await take(pool, "100%", "waiting")
    for name in ("n1", "n2"):
        fake.remove("nodes", name)
    async with service() as pool:
        with pytest.raises(NeverFits):
            await held(pool, "2%")
        assert (await pool.get_lease(waiting)).position == 1
        fake.put("nodes", hami("n1"))
        lease = await pool.wait(waiting, 30)
        assert lease.slices[0].device.node == "n1"
        assert {(await pool.get_lease(each.id)).state for each in everything} == {LeaseState.ENDED}


async def test_another_dialect_keeps_what_runs_and_starts_what_comes_in_its_own_way(
    service: Service, fake: FakeKubernetes
) -> None:
    """From HAMi's slices to whole GPUs."""
    async with service() as pool:
        runs = await held(pool)
        await pool.launch(runs.id, command())
        fake.run(f"gpu-pool-{runs.id}-1")
        await running(pool, runs.id)
    for name in ("n1", "n2"):
        fake.put("nodes", plain(name))
    async with service() as pool:
        assert (await pool.get_lease(runs.id)).state is LeaseState.HELD
        assert (await pool.pod(runs.id)).phase is PodPhase.RUNNING
        whole = await held(pool, "1")
        await pool.launch(whole.id, command())
        made = fake.get("pods", f"gpu-pool-{whole.id}-1")
        (limits,) = (each["resources"]["limits"] for each in made["spec"]["containers"])
        assert limits["nvidia.com/gpu"] == "1"
        assert "nvidia.com/gpumem" not in limits
        with pytest.raises(NeverFits):
            await pool.request(parse_request("2%"), Holder("ada"), "slice")
        await pool.release(runs.id)
        await eventually(lambda: fake.named("pods") == [f"gpu-pool-{whole.id}-1", "jupyter-ada"])


async def test_a_slice_held_before_is_not_started_in_a_dialect_that_has_none(
    service: Service, fake: FakeKubernetes
) -> None:
    async with service() as pool:
        lease = await held(pool)
    for name in ("n1", "n2"):
        fake.put("nodes", plain(name))
    async with service() as pool:
        with pytest.raises(NeverFits):
            await pool.launch(lease.id, command())
        assert fake.asked("POST", "pods") == 0


async def test_a_cluster_without_any_gpu_says_so_and_ends_nothing(
    service: Service, fake: FakeKubernetes
) -> None:
    async with service() as pool:
        lease = await held(pool)
    for name in ("n1", "n2"):
        bare = hami(name, gpus=0)
        bare["metadata"] |= {"annotations": {}, "labels": {}}
        fake.put("nodes", bare)
    async with service() as pool:
        with pytest.raises(NeverFits):
            await held(pool)
        assert (await pool.get_lease(lease.id)).state is LeaseState.HELD


async def test_pods_are_placed_anew_where_the_dialect_was_left_to_an_administrator(
    service: Service, fake: FakeKubernetes
) -> None:
    """The setting wins over what the cluster looks like, also over what it said before."""
    async with service(dialect="hami") as pool:
        lease = await held(pool)
        await pool.release(lease.id)
    for name in ("n1", "n2"):
        fake.put("nodes", plain(name))
    async with service(dialect="hami") as pool:
        with pytest.raises(NeverFits):
            await held(pool)
    async with service(dialect="device-plugin") as pool:
        assert (await held(pool, "1")).slices[0].memory_mib == 32768


async def test_a_course_that_is_no_more_keeps_its_kernels(service: Service, fake: FakeKubernetes) -> None:
    async with service(named={"ml": {"longest_lease": "2h"}}) as pool:
        lease = await pool.request(parse_request("2%"), Holder("ada", "ml"), "key")
        await pool.launch(lease.id, command())
        fake.run(f"gpu-pool-{lease.id}-1")
        await running(pool, lease.id)
    async with service(courses=Courses()) as pool:
        assert (await pool.get_lease(lease.id)).state is LeaseState.HELD
        assert (await pool.pod(lease.id)).phase is PodPhase.RUNNING
        await pool.release(lease.id)
        await eventually(lambda: fake.named("pods") == ["jupyter-ada"])


async def test_a_namespace_that_is_left_out_is_told_of_in_the_log(
    service: Service, fake: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    fake.put("pods", notebook("bob", "course-ml", node="n1"))
    fake.put("persistentvolumeclaims", claim("bob", "course-ml"))
    async with service(more_namespaces=["course-{course}"]) as pool:
        lease = await held(pool, user="bob")
        await pool.launch(lease.id, command())
    with caplog.at_level(logging.WARNING):
        async with service() as pool:
            with pytest.raises(NotAllowed, match="does not run in hub"):
                await pool.launch(lease.id, command())
    assert "1 kernels of this pool are in course-ml" in caplog.text
    assert fake.asked("DELETE", "pods") == 0
