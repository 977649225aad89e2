"""When a kernel worked, as it is told to its pool."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gpu_pool_provisioner.proxy import relay
from gpu_pool_provisioner.proxy.relay import EVERY, BusyTimes
from support.frontend import frontend
from support.jupyter_env import JupyterEnv, Managers, eventually, started_kernel


def test_pieces_of_work_are_told_once_and_not_too_often() -> None:
    now = 1_000.0
    times = BusyTimes(wall=lambda: now + 5_000, clock=lambda: now)
    times.see(busy=True)
    times.see(busy=True)  # a second subshell
    now += 2.5
    times.see(busy=False)
    times.see(busy=False)
    assert times.due() == ()
    now += EVERY
    times.see(busy=True)
    assert times.due() == ((6_000.0, 2.5),)
    assert times.due() == ()
    now += EVERY
    assert times.due() == ()  # what is under way has no length yet
    times.see(busy=False)
    assert times.due() == ((6_062.5, EVERY),)


def test_a_clock_that_is_set_makes_no_work_longer() -> None:
    wall = 5_000.0
    now = 0.0
    times = BusyTimes(wall=lambda: wall, clock=lambda: now)
    times.see(busy=True)
    wall, now = 90.0, 3.0
    times.see(busy=False)
    now += EVERY
    ((_, seconds),) = times.due()
    assert seconds == 3.0


@pytest.mark.parametrize("jump", [-86_400.0, -60.0, 60.0, 86_400.0])
def test_a_clock_that_is_set_before_it_is_told_leaves_work_as_long_ago(jump: float) -> None:
    wall, now = 5_000.0, 0.0
    times = BusyTimes(wall=lambda: wall + now, clock=lambda: now)
    times.see(busy=True)
    now = 3.0
    times.see(busy=False)
    wall += jump
    now += EVERY
    told = times.due()
    assert told == ((5_000.0 + jump, 3.0),)
    times.untold(told)
    wall += jump
    now += EVERY
    assert times.due() == ((5_000.0 + 2 * jump, 3.0),)


def test_what_is_told_again_is_known_again() -> None:
    wall = 5_000.0
    now = 0.0
    times = BusyTimes(wall=lambda: wall + 1.0001 * now, clock=lambda: now)
    times.see(busy=True)
    now = 3.0
    times.see(busy=False)
    now += EVERY
    told = times.due()
    times.untold(told)
    now += EVERY
    assert times.due() == told == ((5_000.0, 3.0),)


def test_the_last_thousand_are_kept() -> None:
    now = 0.0
    times = BusyTimes(wall=lambda: now, clock=lambda: now)
    for _ in range(1_500):
        times.see(busy=True)
        now += 1
        times.see(busy=False)
    assert [at for at, _ in times.due()] == [float(number) for number in range(500, 1_500)]


async def test_the_pool_hears_when_a_kernel_worked(
    jupyter_env: JupyterEnv, manager: Managers, course: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "EVERY", 0.0)
    course(idle_limit="1s")
    km = await started_kernel(manager(jupyter_env.install("all", "1")))
    began = time.time()
    async with frontend(km) as page:
        await page.run("import time; time.sleep(0.5)").done()
        await eventually(jupyter_env.is_parked)
    lease = await jupyter_env.only_lease()
    await km.shutdown_kernel(now=True)
    spans = (await jupyter_env.pool.busy_times())[lease.id]
    assert any(seconds >= 0.5 for _, seconds in spans)
    assert all(began - 1 <= at <= time.time() + 1 for at, _ in spans)
