"""What a student does while the pool's service is away: kernels wait for it, and nothing hangs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from gpu_pool_client import PoolUnreachable
from gpu_pool_client._remote.client import RemotePool, RetryTimes
from gpu_pool_client._remote.endpoints import unix_endpoint
from gpu_pool_provisioner.pools import open_pools
from gpu_pool_provisioner.provisioner import GPUPoolProvisioner
from gpu_pool_provisioner.session import SessionTimes, State
from gpu_pool_provisioner.settings import default_outage_timeout
from support.frontend import frontend, page_of
from support.jupyter_env import (
    IPYKERNEL,
    WRAP,
    JupyterEnv,
    Managers,
    answer,
    eventually,
    is_running,
    started_kernel,
)
from support.service import Service

WAITS = "Your kernel starts once the pool answers (waiting"


@pytest.fixture
def stopped(service: Service) -> Iterator[Service]:
    """A service that takes connections and answers nothing until the test, or its end, lets it."""
    assert service.process is not None
    os.kill(service.process.pid, signal.SIGSTOP)
    yield service
    os.kill(service.process.pid, signal.SIGCONT)


async def test_a_kernel_that_is_asked_for_meanwhile_waits_and_runs(
    served: JupyterEnv, service: Service, manager: Managers
) -> None:
    await service.end(signal.SIGKILL)
    km = await started_kernel(manager(served.install("half", "50%", outage_timeout=600)))
    assert await km.is_alive()
    async with frontend(km) as page:
        cell = page.run("import os; print(os.environ['GPU_POOL_SLICE'])")
        await cell.shows(WAITS)
        await cell.shows("of at most 10min). The cell then runs by itself. Interrupt the kernel to give up.")
        await service.start()
        assert (await cell.done()).outputs == ["50%\n"]
    assert (await served.only_lease()).process.pid == km.provisioner.pid
    await km.shutdown_kernel()
    assert await served.is_empty()


@pytest.fixture
def patient(served: JupyterEnv, monkeypatch: pytest.MonkeyPatch) -> JupyterEnv:
    """An environment whose process tries a service that does not answer for longer than a test takes."""
    times = SessionTimes(answers_within=3600.0, attached_within=3600.0)
    monkeypatch.setattr(GPUPoolProvisioner, "times", times)
    endpoint, times = unix_endpoint(served.url), RetryTimes(never_heard=3600.0, known=3600.0)
    open_pools[served.url, os.getpid()] = RemotePool(endpoint, times)
    return served


async def test_whoever_starts_a_kernel_meanwhile_does_not_wait_until_the_pool_answers(
    patient: JupyterEnv, service: Service, manager: Managers
) -> None:
    await service.end(signal.SIGKILL)
    km = manager(patient.install("half", "50%", outage_timeout=600))
    await asyncio.wait_for(km.start_kernel(), 120)
    async with frontend(km) as page:
        cell = page.run("print('well')")
        await cell.shows(WAITS)
        await service.start()
        assert (await cell.done()).outputs == ["well\n"]
    assert await patient.only_lease()


async def test_it_fails_for_whoever_wants_no_kernel_that_waits(
    patient: JupyterEnv, service: Service, manager: Managers
) -> None:
    await service.end(signal.SIGKILL)
    km = manager(patient.install("half", "50%", outage_timeout=0))
    with pytest.raises(PoolUnreachable):
        await asyncio.wait_for(km.start_kernel(), 120)


async def test_whoever_restarts_one_does_not_wait_for_it_either(
    patient: JupyterEnv, service: Service, manager: Managers
) -> None:
    km = await started_kernel(manager(patient.install("half", "50%", outage_timeout=600)))
    lease = await patient.only_lease()
    await service.end(signal.SIGKILL)
    await asyncio.wait_for(km.restart_kernel(now=True), 120)
    async with frontend(km) as page:
        cell = page.run("import os; print(os.environ['GPU_POOL_LEASE'])")
        await cell.shows(WAITS)
        await service.start()
        assert (await cell.done()).outputs == [f"{lease.id}\n"]


async def test_a_wrapped_one_waits_too(
    served: JupyterEnv, service: Service, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "behind-a-hub")
    await service.end(signal.SIGKILL)
    argv = (*WRAP, "--slice", "50%", "--", *IPYKERNEL)
    async with page_of(manager(served.install("wrapped", "", argv))) as (_, page):
        cell = page.run("print('well')")
        await cell.shows(WAITS)
        await cell.shows("of at most 5min)")
        await service.start()
        assert (await cell.done()).outputs == ["well\n"]


async def test_after_the_limit_the_cell_says_why_and_the_next_one_asks_again(
    served: JupyterEnv, service: Service, manager: Managers
) -> None:
    await service.end(signal.SIGKILL)
    async with page_of(manager(served.install("half", "50%", outage_timeout=1))) as (_, page):
        cell = page.run("print('never')")
        assert (await cell.done()).status == "error"
        assert "This kernel has waited for it for 1s." in " ".join(cell.outputs[0].split())
        await service.start()
        assert (await page.run("print('well')").done()).outputs == ["well\n"]


async def test_an_interrupt_gives_up_and_the_next_cell_asks_again(
    served: JupyterEnv, service: Service, manager: Managers
) -> None:
    await service.end(signal.SIGKILL)
    async with page_of(manager(served.install("half", "50%", outage_timeout=600))) as (km, page):
        cell = page.run("print('never')")
        await cell.shows(WAITS)
        await km.interrupt_kernel()
        assert "You stopped waiting for a GPU slice of 50%" in (await cell.done()).outputs[0]
        await service.start()
        assert (await page.run("print('well')").done()).outputs == ["well\n"]
    assert await served.only_lease()


async def test_a_kernel_that_is_shut_down_while_it_waits_leaves_nothing(
    served: JupyterEnv, service: Service, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is forgotten would end by itself after it.
    monkeypatch.setattr(GPUPoolProvisioner, "times", SessionTimes(brief_grace=600.0))
    await service.end(signal.SIGKILL)
    async with page_of(manager(served.install("half", "50%", outage_timeout=600))) as (km, page):
        await page.run("print('never')").shows(WAITS)
        driver = km.provisioner.driver
        assert driver.session.state is State.ASKING
        await asyncio.wait_for(km.shutdown_kernel(), 120)
    assert driver.session.state is State.ENDED
    assert driver.session.wakes_at is None, "it asks again"
    await service.start()
    assert await served.is_empty()


@pytest.mark.long
@pytest.mark.parametrize("now", [False, True])
async def test_a_kernel_that_is_restarted_meanwhile_has_its_slice_afterwards(
    served: JupyterEnv, service: Service, manager: Managers, now: bool
) -> None:
    km = await started_kernel(manager(served.install("half", "50%", outage_timeout=600)))
    assert await answer(km, "print(1)") == "1\n"
    lease = await served.only_lease()
    await service.end(signal.SIGKILL)
    await km.restart_kernel(now=now)
    async with frontend(km) as page:
        cell = page.run("import os; print(os.environ['GPU_POOL_LEASE'])")
        await cell.shows(WAITS)
        await service.start()
        assert (await cell.done()).outputs == [f"{lease.id}\n"]
    assert (await served.only_lease()).process.pid == km.provisioner.pid


async def test_a_kernel_that_waits_is_restarted_and_asks_once(
    served: JupyterEnv, service: Service, manager: Managers
) -> None:
    await service.end(signal.SIGKILL)
    async with page_of(manager(served.install("half", "50%", outage_timeout=600))) as (km, page):
        await page.run("print('never')").shows(WAITS)
        driver = km.provisioner.driver
        await km.restart_kernel()
        cell = page.run("print('well')")
        await cell.shows(WAITS)
        assert km.provisioner.driver is driver, "two of them ask"
        await service.start()
        assert (await cell.done()).outputs == ["well\n"]
    assert await served.only_lease()


async def test_a_service_that_takes_questions_and_answers_none_hangs_no_start(
    served: JupyterEnv, stopped: Service, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How long a start hangs is nobody's setting; the stopped service would let it hang for all of it.
    monkeypatch.setattr(GPUPoolProvisioner, "times", SessionTimes(answers_within=0.2))
    async with page_of(manager(served.install("half", "50%"))) as (_, page):
        cell = page.run("print('well')")
        await cell.shows("The GPU pool does not answer at the moment. Your kernel starts once")
        assert stopped.process is not None
        os.kill(stopped.process.pid, signal.SIGCONT)
        assert (await cell.done()).outputs == ["well\n"]
    assert await served.only_lease()


async def test_a_start_that_is_cancelled_meanwhile_leaves_nothing(
    served: JupyterEnv, stopped: Service, manager: Managers
) -> None:
    km = manager(served.install("half", "50%"))
    start = asyncio.create_task(km.start_kernel())

    async def is_asked_for() -> bool:
        session = km.provisioner.session if km.provisioner is not None else None
        return session is not None and session.state is State.ASKING

    await eventually(is_asked_for)
    start.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.wait_for(start, 120)
    assert stopped.process is not None
    os.kill(stopped.process.pid, signal.SIGCONT)
    await eventually(
        lambda: served.pool.history(), lambda history: [row.reason for row in history] == ["withdrawn"]
    )
    assert await served.is_empty()


async def test_nor_whoever_gives_a_slice_back(
    served: JupyterEnv, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = (await served.asking()).session.lease_id
    assert mine is not None
    assert service.process is not None
    os.kill(service.process.pid, signal.SIGSTOP)
    await asyncio.wait_for(served.pool.give_back(mine), 120)
    os.kill(service.process.pid, signal.SIGCONT)
    await eventually(served.is_empty)


async def test_a_request_whose_answer_was_lost_is_not_made_twice(
    jupyter_env: JupyterEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, lost = jupyter_env.pool.request, iter([True])

    async def lose_the_first(*args: Any) -> Any:
        lease = await request(*args)
        if next(lost, False):
            raise PoolUnreachable("The GPU pool has gone.", may_pass=True)
        return lease

    monkeypatch.setattr(jupyter_env.pool, "request", lose_the_first)
    driver = await jupyter_env.asking()
    assert driver.session.away, "its answer was not lost"
    await eventually(lambda: driver.session.lease_id)
    assert [each.id for each in await jupyter_env.leases()] == [driver.session.lease_id]


async def test_what_does_not_pass_fails_at_once(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_URL", "unix:/etc/passwd/pool.sock")
    km = manager(jupyter_env.install("half", "50%", outage_timeout=600))
    with pytest.raises(PoolUnreachable, match="No pool is served"):
        await km.start_kernel()


async def test_a_kernel_of_which_the_pool_never_hears_is_ended(
    served: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service goes in the moment between the grant and the launch."""
    km = manager(served.install("half", "50%", outage_timeout=1))
    attach, launched = served.pool.attach, []

    async def away(*args: Any, **more: Any) -> Any:
        launched.append(km.provisioner.pid)
        raise PoolUnreachable("The GPU pool does not answer at the moment.", may_pass=True)

    monkeypatch.setattr(served.pool, "attach", away)
    await km.start_kernel()
    async with frontend(km) as page:
        cell = page.run("print('never')")
        assert (await cell.done()).status == "error"
        assert "This kernel has waited for it for 1s." in " ".join(cell.outputs[0].split())
        assert not is_running(launched[0])
        monkeypatch.setattr(served.pool, "attach", attach)
        assert (await page.run("print('well')").done()).outputs == ["well\n"]
    assert await served.only_lease()


def test_it_is_waited_for_minutes_behind_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUPYTERHUB_API_TOKEN", raising=False)
    assert default_outage_timeout() == 10
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "token")
    assert default_outage_timeout() == 300
