"""Kernels in pods that idle where the pool divides the devices: their pods stay, and nothing is lost."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from gpu_pool_client import Activity, LeaseState
from gpu_pool_provisioner.provisioner import GPUPoolProvisioner
from gpu_pool_provisioner.session import SessionTimes
from support.frontend import frontend, page_of
from support.jupyter_env import JupyterEnv, Managers, eventually, restarting_soon, started_kernel
from support.pods import PodPool, pods

__all__ = ["pods"]

#: What an agent says of a kernel that keeps nothing on its GPU.
UNUSED = Activity(initialised=False, working=False, memory_mib=0)
VISIBLE = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"


@pytest.fixture
def parks(course: Any, request: pytest.FixtureRequest) -> Any:
    """Return what sets the terms, and then returns the pool, whose pods can be parked."""

    def made(**terms: str) -> PodPool:
        course(**terms)
        pool: PodPool = request.getfixturevalue("pods")
        pool.parks, pool.seen = True, UNUSED
        return pool

    return made


async def test_an_idle_kernel_lends_its_slice_and_goes_on_in_the_same_pod(
    jupyter_env: JupyterEnv, manager: Managers, parks: Any
) -> None:
    pods: PodPool = parks(idle_limit="1s")
    async with page_of(manager(jupyter_env.install("all", "1"))) as (km, page):
        await page.run("kept = 42").done()
        await eventually(jupyter_env.is_parked)
        other = await jupyter_env.fill("1")
        assert other.state is LeaseState.HELD
        assert await km.is_alive()
        cell = page.run(f"print(kept); {VISIBLE}")
        await cell.shows("lent to others; its variables are kept. Waiting for a whole GPU.")
        await jupyter_env.pool.release(other.id)
        assert (await cell.done()).outputs == [f"42\n{other.slices[0].device.uuid}\n"]
    assert (await jupyter_env.only_lease()).state is LeaseState.HELD
    assert len(pods.launched) == 1


async def test_its_gpu_is_hidden_while_it_is_parked(
    jupyter_env: JupyterEnv, manager: Managers, parks: Any
) -> None:
    parks(idle_limit="1s")
    km = await started_kernel(manager(jupyter_env.install("two")))
    seen = jupyter_env.folder / "seen"
    watcher = f"""
import os, threading, time
def watch():
    while os.environ.get('CUDA_VISIBLE_DEVICES') != '-1':
        time.sleep(0.05)
    open({str(seen)!r}, 'w').close()
threading.Thread(target=watch, daemon=True).start()
"""
    async with frontend(km) as page:
        await page.run(watcher).done()
        await eventually(seen.exists)
        assert (await page.run(VISIBLE).done()).outputs != ["-1\n"]


async def test_kernels_of_two_give_way_to_each_other_and_lose_nothing(
    jupyter_env: JupyterEnv, manager: Managers, parks: Any
) -> None:
    pods: PodPool = parks(yield_after="1s")
    first, second = (manager(jupyter_env.install(name, "1")) for name in ("one", "other"))
    await first.start_kernel()
    async with frontend(first) as page:
        await page.run("kept = 42").done()
        await second.start_kernel()
        async with frontend(second) as other:
            assert (await other.run("own = 'mine'; print(own)").done()).outputs[-1] == "mine\n"
            assert await jupyter_env.is_parked()
            assert (await page.run("print(kept)").done()).outputs[-1] == "42\n"
            assert (await other.run("print(own)").done()).outputs[-1] == "mine\n"
    assert len(pods.launched) == 2


@pytest.mark.parametrize(
    "seen",
    [
        Activity(),
        Activity(initialised=True, working=False, memory_mib=412),
        Activity(initialised=False, working=False, memory_mib=0, age=3600.0),
    ],
    ids=["nothing is known", "it keeps memory there", "that it keeps none was seen before it worked"],
)
async def test_a_kernel_that_keeps_anything_on_its_gpu_or_may_keeps_its_slice(
    jupyter_env: JupyterEnv,
    manager: Managers,
    parks: Any,
    monkeypatch: pytest.MonkeyPatch,
    seen: Activity,
) -> None:
    monkeypatch.setattr(GPUPoolProvisioner, "times", SessionTimes(seldom=0.5))
    pods: PodPool = parks(idle_limit="1s", yield_after="1s")
    pods.seen = seen
    async with page_of(manager(jupyter_env.install("all", "1"))) as (_, page):
        await page.run("kept = 42").done()
        waits = await jupyter_env.fill("1")
        looks = pods.looks
        await eventually(lambda: pods.looks > looks + 2)
        assert (await jupyter_env.pool.get_lease(waits.id)).state is LeaseState.WAITING
        assert not await jupyter_env.is_parked()
        # Once it is seen to keep nothing there, it goes.
        pods.seen = UNUSED
        await eventually(jupyter_env.is_parked)
        await jupyter_env.pool.release(waits.id)
        assert (await page.run("print(kept)").done()).outputs[-1] == "42\n"


async def test_a_pod_that_is_taken_while_it_is_parked_ends_its_lease_and_the_next_cell_says_why(
    jupyter_env: JupyterEnv, manager: Managers, parks: Any
) -> None:
    pods: PodPool = parks(idle_limit="1s")
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        await page.run("kept = 42").done()
        await eventually(jupyter_env.is_parked)
        lease = await jupyter_env.only_lease()
        await pods.evict(lease.id, "Its machine is being drained for maintenance.")
        await eventually(jupyter_env.is_empty)
        assert [each.id for each in await pods.history()] == [lease.id]
        (error,) = (await page.run("print(kept)").done()).outputs
        assert "Its machine is being drained for maintenance." in error
        assert "Its variables are gone." in error
        assert "anew\n" in (await page.run("print('anew')").done()).outputs


async def test_a_kernel_that_is_killed_while_it_is_parked_is_restarted_in_its_pod(
    jupyter_env: JupyterEnv, manager: Managers, parks: Any
) -> None:
    pods: PodPool = parks(idle_limit="1s")
    async with page_of(manager(jupyter_env.install("all", "1"), config=restarting_soon())) as (km, page):
        await page.run("kept = 42").done()
        await eventually(jupyter_env.is_parked)
        before = await jupyter_env.only_lease()
        other = await jupyter_env.fill("1")
        (pod,) = pods.running
        os.kill(pod.kernel, signal.SIGKILL)
        await km.restart_kernel()
        await eventually(
            lambda: jupyter_env.pool.status(),
            lambda status: any(each.id == before.id for each in status.queue),
        )
        await jupyter_env.pool.release(other.id)
        told = await page.run("print('kept' in dir())").done()
        assert told.outputs[-1] == "False\n"
        assert (await jupyter_env.only_lease()).id == before.id
    assert not [each for each in await pods.history() if each.id == before.id]


async def test_two_who_wait_and_the_one_that_gave_way_each_have_it_in_turn(
    jupyter_env: JupyterEnv, manager: Managers, parks: Any
) -> None:
    pods: PodPool = parks(yield_after="1s")
    kernels = [manager(jupyter_env.install(name, "1")) for name in ("a", "b", "c")]
    await kernels[0].start_kernel()
    async with frontend(kernels[0]) as first:
        await first.run("own = 0").done()
        for km in kernels[1:]:
            await km.start_kernel()
        async with frontend(kernels[1]) as second, frontend(kernels[2]) as third:
            cells = [page.run(f"own = {n}; print(own)") for n, page in ((1, second), (2, third))]
            back = first.run("print(own)")
            assert [(await cell.done(within=120)).outputs[-1] for cell in (*cells, back)] == [
                "1\n",
                "2\n",
                "0\n",
            ]
            assert (await second.run("print(own)").done(within=120)).outputs[-1] == "1\n"
            held = [each for each in await jupyter_env.leases() if each.state is LeaseState.HELD]
            assert len(held) == 1
    assert len(pods.launched) == 3
    assert not await pods.history()
