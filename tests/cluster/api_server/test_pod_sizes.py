"""Students who change the size of their slices while their kernels run in pods: the pods stay."""

from __future__ import annotations

import pytest

from gpu_pool.cluster.dialects.shared import SLICES
from gpu_pool_client import LeaseState
from support.agent_reports import reporting
from support.control_plane import Cluster
from support.fixtures import jupyter_env
from support.jupyter_env import eventually
from support.parked_pods import GPU, LONG, Students
from support.pod_pages import kernels, nothing_runs

__all__ = ["jupyter_env"]

pytestmark = pytest.mark.timeout(600)

USE = "get_ipython().run_line_magic('gpu', 'use {}')"
HAS = "import os; print(globals().get('kept'), os.environ['GPU_POOL_MEMORY_MIB'])"


async def test_a_kernel_changes_its_size_in_its_pod_at_once_or_at_its_next_restart(
    students: Students, card: Cluster, namespace: str
) -> None:
    async with students.reporting():
        page = await students.small("ada", "2%")
        await page.run("kept = 42").done(within=LONG)
        (first,) = kernels(card, namespace)
        # The second cell is submitted before the first is answered, and has the new size all the same.
        asked, then = page.run(USE.format("10%")), page.run(HAS)
        assert "This kernel now has 10% of a GPU: 3.2 GiB on" in "".join(
            (await asked.done(within=LONG)).outputs
        )
        assert (await then.done()).outputs == ["42 3276\n"]
        (lease,) = await students.leases(LeaseState.HELD)
        assert (lease.memory_mib, str(lease.request)) == (3276, "10%")

        def written() -> str:
            (pod,) = kernels(card, namespace)
            return str(pod["metadata"]["annotations"][SLICES])

        await eventually(lambda: written() == f"{GPU}=100/3276", within=LONG)
        # By the panel, too.
        changed = await page.resize("5%")
        assert (changed["granted"], changed["at_restart"]) == (True, False)
        assert (await page.run(HAS).done()).outputs == ["42 1638\n"]
    use = {"pod": first["metadata"]["uid"], "memory_mib": 1000}
    async with reporting(students.service.url, students.token, GPU, [use]):
        await eventually(
            lambda: students.pool.activity(lease.id),
            lambda activity: activity.memory_mib == 1000,
            within=LONG,
        )
        told = "".join((await page.run(USE.format("20%")).done()).outputs)
        assert "it has used the GPU, or may have" in told
        assert "Restart the kernel: it then changes to 20%, if that is free." in told
        assert (await page.run(HAS).done()).outputs == ["42 1638\n"]
        await page.do("restart")
        assert (await page.run(HAS).done(within=LONG)).outputs == ["None 6553\n"]
        (after,) = kernels(card, namespace)
        assert after["metadata"]["uid"] == first["metadata"]["uid"]
        # What its pod still uses has no room in so little: there it gets a new one.
        assert "Restart the kernel" in "".join((await page.run(USE.format("2%")).done()).outputs)
        await page.do("restart")
        assert (await page.run(HAS).done(within=LONG)).outputs == ["None 655\n"]
        (last,) = kernels(card, namespace)
        assert last["metadata"]["uid"] != first["metadata"]["uid"]
        await page.shut_down()
        await eventually(lambda: nothing_runs(card, namespace), within=LONG)
