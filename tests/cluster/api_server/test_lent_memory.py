"""Students whose kernels are pods on one GPU that the pool divides: what nobody holds is lent for a while."""

from __future__ import annotations

import pytest

from gpu_pool_client import EndReason, LeaseState
from support.agent_reports import reporting
from support.control_plane import Cluster
from support.fixtures import jupyter_env
from support.jupyter_env import eventually
from support.parked_pods import GPU, LONG, Students
from support.pod_pages import kernels, nothing_runs

__all__ = ["jupyter_env"]

pytestmark = pytest.mark.timeout(600)

#: The watchdog's steps, as quick as reports come.
QUICK = """
c.PoolSettings.burst_after = 0.5
c.PoolSettings.burst_interrupt_after = 0.5
c.PoolSettings.burst_end_after = {end_after}
"""
#: Ends once the kernel has heard that what it may use is so, in MiB, and prints that.
HEARS = """import os, time
print('begun', flush=True)
while not (int(os.environ['GPU_POOL_ALLOWED_MIB']) {}): time.sleep(0.01)
print('may use', os.environ['GPU_POOL_ALLOWED_MIB'], flush=True)"""
STUBBORN = "\nwhile True:\n try:\n  time.sleep(600)\n except KeyboardInterrupt:\n  print('no', flush=True)"


@pytest.fixture
def end_after() -> float:
    return 600.0


@pytest.fixture
def settings_of_pool(end_after: float) -> str:
    return QUICK.format(end_after=end_after)


async def first_lease(students: Students) -> str:
    (lease,) = await students.leases(LeaseState.HELD)
    return lease.id


async def test_a_kernel_uses_what_nobody_holds_and_hears_in_the_middle_of_a_cell_that_somebody_does(
    students: Students,
    card: Cluster,
    namespace: str,
) -> None:
    url, token = students.service.url, students.token
    async with students.reporting():
        ada = await students.small("ada", "2%..10%")
        assert "may use 3276\n" in (await ada.run(HEARS.format("== 3276")).done(within=LONG)).outputs[-1]
        await ada.run("kept = 'of ada'").done()
        (first,) = kernels(card, namespace)
    use = {"pod": first["metadata"]["uid"], "memory_mib": 3000}
    async with reporting(url, token, GPU, [use]):
        shown = "".join((await ada.run("print(get_ipython().run_line_magic('gpu', ''))").done()).outputs)
        assert "This kernel uses 2.9 GiB of the 3.2 GiB that it may use, as its node sees it." in shown
        assert "655 MiB granted, now up to 3.2 GiB" in shown
        cell = ada.run(HEARS.format("< 700") + "\ntime.sleep(600)")
        await cell.shows("begun")
        bob = await students.small("bob", "98%")
        assert (await bob.run("print('of bob')").done(within=LONG)).outputs[-1] == "of bob\n"
        told = " ".join("".join((await cell.done(within=LONG)).outputs).split())
    assert "may use 656" in told
    words = (
        "This slice uses 3000MiB of GPU 0's memory, and may use 656MiB now: others need what it had on top"
    )
    assert words in told
    assert "KeyboardInterrupt" in told
    async with reporting(url, token, GPU, [{**use, "memory_mib": 600}]):
        await eventually(
            lambda: students.leases(LeaseState.HELD),
            lambda leases: not any(each.notice for each in leases),
            within=LONG,
        )
        assert (await ada.run("print(kept)").done()).outputs[-1] == "of ada\n"
        # A restart is in the same pod, which knows what may be used now.
        await ada.do("restart")
        said = "import os; print('kept' in globals(), int(os.environ['GPU_POOL_ALLOWED_MIB']) < 700)"
        assert (await ada.run(said).done(within=LONG)).outputs[-1] == "False True\n"
        assert first["metadata"]["uid"] in {each["metadata"]["uid"] for each in kernels(card, namespace)}
        await bob.shut_down()
        assert "may use 3276\n" in (await ada.run(HEARS.format("== 3276")).done(within=LONG)).outputs[-1]
        await ada.shut_down()
        await eventually(lambda: nothing_runs(card, namespace), within=LONG)
    assert {each.reason for each in await students.pool.history()} == {"released"}


@pytest.mark.parametrize("end_after", [5.0])
@pytest.mark.long
async def test_a_kernel_that_keeps_what_is_taken_back_ends_and_nobody_else_does(
    students: Students,
    card: Cluster,
    namespace: str,
) -> None:
    async with students.reporting():
        ada = await students.small("ada", "2%..10%")
        await ada.run(HEARS.format("== 3276")).done(within=LONG)
        lease_id = await first_lease(students)
        (pod,) = kernels(card, namespace)
    use = {"pod": pod["metadata"]["uid"], "memory_mib": 3000}
    async with reporting(students.service.url, students.token, GPU, [use]):
        cell = ada.run(HEARS.format("< 700") + STUBBORN)
        await cell.shows("begun")
        bob = await students.small("bob", "98%")
        assert (await bob.run("print('of bob')").done(within=LONG)).outputs[-1] == "of bob\n"
        told = " ".join("".join((await cell.done(within=LONG)).outputs).split())
        assert "no" in told
        assert "that was on top of its slice, and did not come back in time" in told
        assert (await students.pool.get_lease(lease_id)).end_reason is EndReason.OVER_MEMORY
        assert (await bob.run("print('goes on')").done()).outputs[-1] == "goes on\n"
