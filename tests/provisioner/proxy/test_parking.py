"""Kernels that idle: their slice is lent to others and comes back, and nothing of theirs is lost."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import EndReason, GpuPoolError, Lease, LeaseState, OverQuota, PoolUnreachable
from gpu_pool_client._background import in_background
from gpu_pool_provisioner.provisioner import GPUPoolProvisioner
from gpu_pool_provisioner.session import SessionTimes
from support.frontend import frontend, page_of
from support.jupyter_env import JupyterEnv, Managers, eventually, kill, started_kernel


async def test_an_idle_kernel_lends_its_slice_and_keeps_its_variables(
    jupyter_env: JupyterEnv, manager: Managers, course: Any
) -> None:
    course(idle_limit="1s")
    async with page_of(manager(jupyter_env.install("all", "1"))) as (_, page):
        await page.run("import os; kept = 42").done()
        await eventually(jupyter_env.is_parked)
        other = await jupyter_env.fill("1")
        assert other.state is LeaseState.HELD
        cell = page.run("print(kept, os.environ['CUDA_VISIBLE_DEVICES'])")
        await cell.shows("lent to others; its variables are kept. Waiting for a whole GPU.")
        await jupyter_env.pool.release(other.id)
        assert (await cell.done()).outputs == [f"42 {other.slices[0].device.uuid}\n"]
    assert (await jupyter_env.only_lease()).state is LeaseState.HELD


async def test_an_idle_kernel_gives_way_to_who_waits_and_takes_its_slice_again(
    jupyter_env: JupyterEnv, manager: Managers, course: Any
) -> None:
    course(yield_after="1s")
    first, second = (manager(jupyter_env.install(name, "1")) for name in ("one", "other"))
    await first.start_kernel()

    async with frontend(first) as page:
        await page.run("kept = 42").done()
        assert not await jupyter_env.is_parked()
        await second.start_kernel()
        async with frontend(second) as other:
            assert (await other.run("print('mine')").done()).outputs == ["mine\n"]
            assert await jupyter_env.is_parked()
            # The other one gives way in its turn: it has run a cell since it came.
            assert (await page.run("print(kept)").done()).outputs == ["42\n"]
            assert (await other.run("print('again')").done()).outputs == ["again\n"]


async def test_a_kernel_that_gives_way_no_more_is_followed_no_more(
    jupyter_env: JupyterEnv, manager: Managers, course: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    course(yield_after="1s")
    watch = jupyter_env.pool.watch
    followed: list[str] = []

    async def counted(lease_id: str) -> AsyncIterator[Lease]:
        followed.append(lease_id)
        try:
            async for lease in watch(lease_id):
                yield lease
        finally:
            followed.remove(lease_id)

    monkeypatch.setattr(jupyter_env.pool, "watch", counted)
    km = await started_kernel(manager(jupyter_env.install("one", "1")))
    await eventually(lambda: followed)
    await in_background(km.provisioner.driver.keep(600))
    await eventually(lambda: not followed)


@pytest.mark.long
async def test_its_devices_are_hidden_while_it_is_parked(
    jupyter_env: JupyterEnv, manager: Managers, course: Any, tmp_path: Path
) -> None:
    course(idle_limit="1s")
    km = await started_kernel(manager(jupyter_env.install("two")))
    seen = tmp_path / "seen"
    watcher = f"""
import os, threading, time
def watch():
    while os.environ['CUDA_VISIBLE_DEVICES'] != '-1':
        time.sleep(0.05)
    open({str(seen)!r}, 'w').close()
threading.Thread(target=watch, daemon=True).start()
"""
    async with frontend(km) as page:
        await page.run(watcher).done()
        await eventually(lambda: seen.exists())
        assert (await page.run("print(len(os.environ['CUDA_VISIBLE_DEVICES']) > 2)").done()).outputs == [
            "True\n"
        ]


@pytest.mark.long
async def test_a_kernel_at_work_is_not_idle(jupyter_env: JupyterEnv, manager: Managers, course: Any) -> None:
    course(idle_limit="1s")
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        cell = page.run("import time; time.sleep(4); print('done')")
        waiting = await jupyter_env.fill("100%")
        assert waiting.state is LeaseState.WAITING
        assert (await cell.done()).outputs == ["done\n"]
        assert (await jupyter_env.pool.get_lease(waiting.id)).state is LeaseState.WAITING


async def test_an_interrupt_while_it_waits_to_resume_leaves_it_parked_and_the_next_cell_tries_again(
    jupyter_env: JupyterEnv, manager: Managers, course: Any
) -> None:
    course(idle_limit="1s")
    async with page_of(manager(jupyter_env.install("all", "1"))) as (km, page):
        await page.run("kept = 42").done()
        await eventually(jupyter_env.is_parked)
        other = await jupyter_env.fill("1")
        cell = page.run("kept = 0")
        await cell.shows("You are next in the queue")
        await km.interrupt_kernel()
        assert "You stopped waiting" in (await cell.done()).outputs[0]
        await eventually(jupyter_env.is_parked)
        await jupyter_env.pool.release(other.id)
        assert (await page.run("print(kept)").done()).outputs == ["42\n"]


@pytest.mark.long
async def test_a_parked_kernel_that_is_shut_down_leaves_nothing(
    jupyter_env: JupyterEnv, manager: Managers, course: Any
) -> None:
    course(idle_limit="1s")
    km = await started_kernel(manager(jupyter_env.install("two")))

    await eventually(jupyter_env.is_parked)
    await km.shutdown_kernel()
    await eventually(jupyter_env.is_empty)


@pytest.mark.long
async def test_a_kernel_says_that_it_is_in_use(
    jupyter_env: JupyterEnv, manager: Managers, course: Any
) -> None:
    course(idle_limit="1s", keep_at_most="1h")
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        cell = await page.run("%gpu keep 2h").done()
        await cell.shows("keeps its GPU slice for 1h, the most that its course allows at once.")
        shown = (await page.run("%gpu").done()).heard
        assert any("lent to others after 1 s" in str(message["content"]) for message in shown)
        waiting = await jupyter_env.fill("100%")
        await page.run("import time; time.sleep(3)").done()
        assert (await jupyter_env.pool.get_lease(waiting.id)).state is LeaseState.WAITING


@pytest.mark.long
@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"idle_limit": "15min"}, "because its course"),
        ({}, "because its course"),
        ({"yield_after": "never"}, "but only until its lease ends, in "),
    ],
)
async def test_a_kernel_that_is_kept_longer_than_its_lease_lasts_names_the_earlier_end(
    jupyter_env: JupyterEnv, manager: Managers, course: Any, limits: dict[str, str], told: str
) -> None:
    course(longest_lease="30min", **limits)
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        cell = await page.run("%gpu keep 2h").done()
        await cell.shows(told)


@pytest.mark.long
async def test_the_longest_lease_warns_then_ends_the_kernel_and_the_next_cell_says_why(
    jupyter_env: JupyterEnv, manager: Managers, course: Any
) -> None:
    course(longest_lease="12s", warn_before="10s")
    km = await started_kernel(manager(jupyter_env.install("two")))
    lease = await jupyter_env.only_lease()
    async with frontend(km) as page:
        cell = page.run("import time\nfor _ in range(600): time.sleep(0.1)")
        queued = page.run("print(1)")
        await cell.shows("This GPU slice ends in")
        assert "held for as long as its course allows" in (await cell.done()).outputs[-1]
        assert (cell.status, (await queued.done()).status) == ("error", "aborted")
        assert (await jupyter_env.pool.get_lease(lease.id)).end_reason is EndReason.TOO_LONG
        assert await km.is_alive()
        # On a slow machine the new lease is near its end by now, and says so as well.
        assert "2\n" in (await page.run("print(2)").done()).outputs


async def test_a_cell_that_ends_before_the_first_look_still_shows_how_soon_the_slice_ends(
    jupyter_env: JupyterEnv, manager: Managers, course: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    course(longest_lease="10min", warn_before="10min")
    lesson, km = await jupyter_env.fill("1"), manager(jupyter_env.install("two"))
    await km.start_kernel()
    async with frontend(km) as page:
        cell, is_done, get_lease = page.run("1"), asyncio.Event(), GpuPool.get_lease
        await cell.shows("You are next in the queue")

        async def late(pool: GpuPool, lease_id: str) -> Lease:
            await is_done.wait()
            return await get_lease(pool, lease_id)

        monkeypatch.setattr(GpuPool, "get_lease", late)
        await jupyter_env.pool.release(lesson.id)
        await cell.done()
        is_done.set()
        assert "and the kernel with it, because its course allows" in "".join(cell.outputs)


async def test_a_slice_that_is_taken_away_ends_the_kernel_in_words(
    jupyter_env: JupyterEnv, manager: Managers, course: Any
) -> None:
    course(idle_limit="1s")
    km = await started_kernel(manager(jupyter_env.install("two")))

    await eventually(jupyter_env.is_parked)
    await jupyter_env.pool.release((await jupyter_env.only_lease()).id, EndReason.REVOKED)
    async with frontend(km) as page:
        told = await page.run("print(1)").done()
        assert "its GPU slice is over: an administrator took it back" in told.outputs[0]
        assert (await page.run("print(2)").done()).outputs == ["2\n"]


@pytest.mark.long
async def test_a_kernel_that_was_ended_and_is_restarted_runs_its_first_cell(
    jupyter_env: JupyterEnv, manager: Managers, course: Any
) -> None:
    course(idle_limit="5s")
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        await page.run("1").done()
        await jupyter_env.pool.release((await jupyter_env.only_lease()).id, EndReason.REVOKED)
        await eventually(lambda: km.provisioner.session.stands_in)
        await km.restart_kernel()
        assert (await page.run("print('again')").done()).outputs == ["again\n"]


async def test_a_parked_kernel_is_restarted_on_its_slice(
    jupyter_env: JupyterEnv, manager: Managers, course: Any
) -> None:
    course(idle_limit="1s")
    km = await started_kernel(manager(jupyter_env.install("two")))
    await eventually(jupyter_env.is_parked)
    lease = await jupyter_env.only_lease()
    await km.restart_kernel(now=True)
    async with frontend(km) as page:
        assert (await page.run("print('again')").done()).outputs == ["again\n"]
    assert (await jupyter_env.only_lease()).id == lease.id


@pytest.mark.long
async def test_a_kernel_restarted_while_its_slice_is_being_lent_keeps_it(
    jupyter_env: JupyterEnv, manager: Managers, course: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    course(idle_limit="1s")
    km = await started_kernel(manager(jupyter_env.install("all", "1")))
    park, begun, may_go_on = jupyter_env.pool.park, threading.Event(), threading.Event()

    async def late(lease_id: str, **how: Any) -> Lease:
        begun.set()
        await asyncio.to_thread(may_go_on.wait)
        return await park(lease_id, **how)

    monkeypatch.setattr(jupyter_env.pool, "park", late)
    async with frontend(km) as page:
        await eventually(begun.is_set)
        other, before = await jupyter_env.fill("1"), km.provisioner.session.seen_at
        restart = asyncio.create_task(km.restart_kernel(now=True))
        await eventually(lambda: km.provisioner.session.seen_at != before)  # it was read, and is still held
        may_go_on.set()
        await restart
        cell = page.run("print('ran')")
        # The pool lends no slice of a kernel that is being started.
        assert (await cell.done()).outputs == ["ran\n"]
        assert (await jupyter_env.pool.get_lease(other.id)).state is LeaseState.WAITING


@pytest.mark.long
async def test_a_kernel_killed_while_it_waits_to_resume_can_be_restarted(
    jupyter_env: JupyterEnv, manager: Managers, course: Any
) -> None:
    course(idle_limit="1s")
    async with page_of(manager(jupyter_env.install("all", "1"))) as (km, page):
        await eventually(jupyter_env.is_parked)
        other = await jupyter_env.fill("1")
        cell = page.run("print(1)")
        await cell.shows("You are next in the queue")
        kill(km.provisioner.process.pid)
        await km.restart_kernel(now=True)
        assert cell.status != "ok"
        await jupyter_env.pool.release(other.id)
        assert (await page.run("print('again')").done()).outputs == ["again\n"]


async def test_code_on_the_control_channel_does_not_run_while_parked(
    jupyter_env: JupyterEnv, manager: Managers, course: Any
) -> None:
    course(idle_limit="1s")
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        await eventually(jupyter_env.is_parked)
        content = {"code": "ran = True", "silent": False, "allow_stdin": False}
        told = await page.ask("execute_request", content, "control").done()
        assert told.status == "error"
        assert (await page.run("print('ran' in globals())").done()).outputs == ["False\n"]


async def test_whether_it_is_debugged_is_answered_while_it_is_parked(
    jupyter_env: JupyterEnv, manager: Managers, course: Any
) -> None:
    course(idle_limit="1s")
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        await eventually(jupyter_env.is_parked)
        content = {"type": "request", "command": "debugInfo", "seq": 1, "arguments": {}}
        reply = (await page.ask("debug_request", content, "control").done()).reply
        assert reply is not None
        assert reply["content"]["success"]
        assert await jupyter_env.is_parked()


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [PoolUnreachable("Nobody answers."), OverQuota("You have asked the pool 600 times within a minute.")],
    ids=["away", "asked too much"],
)
async def test_a_pool_that_cannot_answer_for_a_moment_costs_no_variables(
    jupyter_env: JupyterEnv,
    manager: Managers,
    course: Any,
    monkeypatch: pytest.MonkeyPatch,
    fault: GpuPoolError,
) -> None:
    course(idle_limit="1s")
    # It tries a dozen times here.
    monkeypatch.setattr(GPUPoolProvisioner, "times", SessionTimes(ask_again=0.1, park_again=0.1))
    for name in ("attach", "park", "resume"):
        monkeypatch.setattr(jupyter_env.pool, name, every_other_time(getattr(jupyter_env.pool, name), fault))
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        await page.run("kept = 42").done()
        await eventually(jupyter_env.is_parked)
        assert (await page.run("print(kept)").done()).outputs == ["42\n"]


def every_other_time(
    ask: Callable[..., Awaitable[Any]], fault: GpuPoolError
) -> Callable[..., Awaitable[Any]]:
    """Let a pool answer every other time, and raise this at the others."""
    faults = itertools.cycle([fault, None])

    async def answer(*args: Any, **more: Any) -> Any:
        if (found := next(faults)) is not None:
            raise found
        return await ask(*args, **more)

    return answer
