"""A kernel on a real kubelet that uses memory which nobody holds, and hears in a cell when somebody does."""

from __future__ import annotations

import asyncio

import pytest

from gpu_pool_client import LeaseState
from support.agent_reports import reporting
from support.fixtures import jupyter_env
from support.jupyter_env import eventually
from support.kubelet import RealCluster
from support.parked_pods import GPU, LONG, Students
from support.pod_pages import kernels, nothing_runs

from .test_parked_pods import students

__all__ = ["jupyter_env", "students"]

pytestmark = pytest.mark.timeout(900)

#: Ends once the kernel has heard that it may use another amount than this, and prints that.
HEARS = """import os, time
print('begun', flush=True)
while os.environ['GPU_POOL_ALLOWED_MIB'] == '{}': time.sleep(0.01)
print('may use', os.environ['GPU_POOL_ALLOWED_MIB'], flush=True)"""
USE = "get_ipython().run_line_magic('gpu', 'use {}')"
HAS = "import os; print(globals().get('kept'), os.environ['GPU_POOL_MEMORY_MIB'])"


async def test_it_hears_what_it_may_use_in_its_container_which_stays_also_with_another_size(
    students: Students, card: RealCluster, namespace: str
) -> None:
    async with students.reporting():
        ada = await students.small("ada", "2%..10%")
        assert "may use 3276\n" in (await ada.run(HEARS.format("655")).done(within=LONG)).outputs[-1]
        await ada.run("kept = 42").done()
        (first,) = kernels(card, namespace)
    use = {"pod": first["metadata"]["uid"], "memory_mib": 3000}
    async with reporting(students.service.url, students.token, GPU, [use]):
        cell = ada.run(HEARS.format("3276"))
        await cell.shows("begun")
        bob = await students.small("bob", "98%")
        assert (await bob.run("print('of bob')").done(within=LONG)).outputs[-1] == "of bob\n"
        assert "may use 656\n" in (await cell.done(within=LONG)).outputs[-1]
        told = "others need what it had on top of its slice"
        await eventually(
            lambda: students.leases(LeaseState.HELD),
            lambda leases: any(told in each.notice for each in leases),
            within=LONG,
        )
        await bob.shut_down()
    async with students.reporting():

        async def is_unused() -> bool:
            """Whether the kernel is alone on the GPU, and its agent says that it uses nothing."""
            if len(await asyncio.to_thread(kernels, card, namespace)) > 1:
                return False
            (device,) = (await students.pool.status()).devices
            ids = [each.id for each in await students.leases(LeaseState.HELD)]
            seen = [(await students.pool.activity(each)).initialised for each in ids]
            return device.free_milli == 980 and seen == [False]

        await eventually(is_unused, within=LONG)
        asked = await ada.run(USE.format("20%")).done(within=LONG)
        assert "This kernel now has 20% of a GPU" in "".join(asked.outputs)
        assert (await ada.run(HAS).done()).outputs[-1] == "42 6553\n"
        await ada.do("restart")
        assert (await ada.run(HAS).done(within=LONG)).outputs[-1] == "None 6553\n"
        (pod,) = kernels(card, namespace)
        assert pod["metadata"]["uid"] == first["metadata"]["uid"]
        (status,) = pod["status"]["containerStatuses"]
        assert (status["restartCount"], list(status["state"])) == (0, ["running"])
        await ada.shut_down()
        await eventually(lambda: nothing_runs(card, namespace), within=LONG)
