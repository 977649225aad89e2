"""A pool that answers with an error of its own, or refuses its user for a while, costs no kernel anything."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gpu_pool_client import GpuPoolError, Lease, NotAllowed
from gpu_pool_provisioner.provisioner import GPUPoolProvisioner
from gpu_pool_provisioner.session import SessionTimes
from support.frontend import frontend
from support.jupyter_env import JupyterEnv, Managers, eventually

BROKEN = GpuPoolError("Internal error in the pool.", "The service's log has the details.")
UNKNOWN = NotAllowed("The token is not known to the JupyterHub.", "Log in again.")
#: What a kernel that has its slice, gives way or waits for it again asks the pool for.
VERBS = ("get_lease", "activity", "report_busy", "park", "resume", "wait", "explain", "positions", "attach")
#: By one of these a kernel in the queue hears first that the pool fails, as it happens.
QUEUE = ("wait", "positions")


class FailingPool:
    """What makes a pool fail at all that a kernel asks it for, from now on or until something else."""

    def __init__(self, env: JupyterEnv, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: GpuPoolError | None = None
        #: What it was asked for in vain, in order.
        self.failed: list[str] = []
        for name in VERBS:
            monkeypatch.setattr(env.pool, name, self._failing(name, getattr(env.pool, name)))
        watch = env.pool.watch

        async def watched(lease_id: str) -> AsyncIterator[Lease]:
            self._fail("watch")
            async for lease in watch(lease_id):
                yield lease
                self._fail("watch")

        monkeypatch.setattr(env.pool, "watch", watched)

    def _failing(self, name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        async def asked(*args: Any, **more: Any) -> Any:
            self._fail(name)
            return await ask(*args, **more)

        return asked

    def _fail(self, name: str) -> None:
        if self.error is not None:
            self.failed.append(name)
            raise self.error

    async def fails(self, error: GpuPoolError, *verbs: str, times: int = 3) -> None:
        """Fail, and return once it was asked so many times for one of these."""
        self.error = error
        before = len(self.failed)
        await eventually(lambda: sum(each in verbs for each in self.failed[before:]) >= times)


@pytest.fixture
def failing(jupyter_env: JupyterEnv, course: Any, monkeypatch: pytest.MonkeyPatch) -> FailingPool:
    """Return what makes the pool fail; it is asked again soon, and lends what is idle."""
    course(idle_limit="1s")  # before anybody asks it for anything
    times = SessionTimes(ask_again=0.1, park_again=0.1, seldom=0.2)
    monkeypatch.setattr(GPUPoolProvisioner, "times", times)
    return FailingPool(jupyter_env, monkeypatch)


@pytest.mark.parametrize("error", [BROKEN, UNKNOWN], ids=["broken", "unknown"])
async def test_a_kernel_keeps_its_variables_and_its_cell_says_what_the_pool_says(
    jupyter_env: JupyterEnv,
    manager: Managers,
    failing: FailingPool,
    caplog: pytest.LogCaptureFixture,
    error: GpuPoolError,
) -> None:
    km = manager(jupyter_env.install("all", "1"))
    await km.start_kernel()
    async with frontend(km) as page:
        await page.run("kept = 42").done()
        with caplog.at_level(logging.WARNING):
            await failing.fails(error, "get_lease")
            assert (await page.run("print(kept)").done()).outputs == ["42\n"]
        assert sum(str(error) in each.getMessage() for each in caplog.records) == 1
        failing.error = None
        await eventually(jupyter_env.is_parked)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            failing.error = error
            cell = page.run("print(kept)")
            await cell.shows(f"lent to others; its variables are kept. Waiting for a whole GPU. {error}")
            await cell.shows("The kernel goes on, with its variables, and its pool is asked again.")
            await failing.fails(error, "resume")
        assert sum(str(error) in each.getMessage() for each in caplog.records) == 1
        failing.error = None
        assert (await cell.done()).outputs == ["42\n"]


@pytest.mark.parametrize("error", [BROKEN, UNKNOWN], ids=["broken", "unknown"])
async def test_a_parked_kernel_in_the_queue_keeps_its_place(
    jupyter_env: JupyterEnv, manager: Managers, failing: FailingPool, error: GpuPoolError
) -> None:
    km = manager(jupyter_env.install("all", "1"))
    await km.start_kernel()
    async with frontend(km) as page:
        await page.run("kept = 42").done()
        await eventually(jupyter_env.is_parked)
        other = await jupyter_env.fill("1")
        cell = page.run("print(kept)")
        await eventually(jupyter_env.has_queue)
        await failing.fails(error, *QUEUE, times=1)
        await cell.shows(f"{error} The kernel goes on")
        await jupyter_env.pool.release(other.id)
        failing.error = None
        assert (await cell.done()).outputs == ["42\n"]


@pytest.mark.parametrize("error", [BROKEN, UNKNOWN], ids=["broken", "unknown"])
async def test_a_kernel_in_the_queue_keeps_its_place(
    jupyter_env: JupyterEnv, manager: Managers, failing: FailingPool, error: GpuPoolError
) -> None:
    other = await jupyter_env.fill("1")
    km = manager(jupyter_env.install("all", "1"))
    await km.start_kernel()
    async with frontend(km) as page:
        cell = page.run("print(42)")
        await eventually(jupyter_env.has_queue)
        await failing.fails(error, *QUEUE, times=1)
        await cell.shows(error.message)
        await jupyter_env.pool.release(other.id)
        failing.error = None
        assert (await cell.done()).outputs == ["42\n"]


async def test_a_kernel_that_starts_says_why_it_does_not(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> Any:
        raise BROKEN

    monkeypatch.setattr(jupyter_env.pool, "request", broken)
    with pytest.raises(GpuPoolError, match="Internal error in the pool"):
        await manager(jupyter_env.install("all", "1")).start_kernel()


@pytest.mark.parametrize("error", [BROKEN, UNKNOWN], ids=["broken", "unknown"])
async def test_a_restart_of_which_the_pool_does_not_hear_keeps_the_slice(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch, error: GpuPoolError
) -> None:
    km = manager(jupyter_env.install("two"))
    await km.start_kernel()
    lease, attach, failures = await jupyter_env.only_lease(), jupyter_env.pool.attach, [error]

    async def attached(*args: Any, **more: Any) -> Any:
        if failures:
            raise failures.pop()
        return await attach(*args, **more)

    async with frontend(km) as page:
        await page.run("1").done()
        monkeypatch.setattr(jupyter_env.pool, "attach", attached)
        await km.restart_kernel(now=True)
        assert not failures
        assert (await page.run("print('well')").done()).outputs == ["well\n"]
    assert (await jupyter_env.only_lease()).id == lease.id
