"""Sites that refuse or take back jobs: a submit plugin, preemption, a munge that is away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.frontend import frontend
from support.jupyter_env import eventually
from support.slurm import Slurm, has_plugin, missing, slurm_cluster
from support.slurm_login import Login

_RULES = """
function slurm_job_submit(job, partitions, user)
    if job.features == "forbidden" then
        slurm.log_user("This site gives kernels no such node. Write to help@example.org.")
        return slurm.ERROR
    end
    return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, user)
    return slurm.SUCCESS
end
"""
_MORE = """\
JobSubmitPlugins=lua
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=urgent Nodes=n2 PriorityTier=10 MaxTime=1:00:00 DefaultTime=30:00
"""


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster of such a site, for one test."""
    if why := missing() or (
        "" if has_plugin("job_submit_lua") else "Slurm's plugin job_submit/lua is not installed"
    ):
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "job_submit.lua").write_text(_RULES)
    with slurm_cluster(folder, _MORE) as found:
        yield found


async def test_what_a_submit_plugin_says_is_shown(login: Login) -> None:
    login.configure(constraint="forbidden")
    async with frontend(await login.start("40%")) as page:
        cell = await page.run("1").done()
    assert "This site gives kernels no such node. Write to help@example.org." in " ".join(
        "".join(cell.outputs).split()
    )
    assert login.jobs() == []


async def test_a_kernel_that_gives_way_to_an_urgent_job_says_so(login: Login) -> None:
    async with frontend(await login.start("1 model=t4")) as page:
        await page.run("1").done()
        [job] = login.jobs()
        urgent = login.slurm.submit("sleep 600", "--partition=urgent", "--gres=gpu:t4:1")
        login.slurm.until(urgent, "RUNNING")
        await eventually(login.env.is_empty)
        cell = page.run("1")
        await cell.shows(f"Slurm job {job} gave way to a job with a higher priority.")


async def test_without_munge_the_cell_says_what_slurm_says(login: Login) -> None:
    async with frontend(await login.start("40%")) as page:
        await page.run("1").done()
        socket = login.slurm.folder / "munge.socket"
        away = socket.rename(socket.with_name("away"))
        try:
            async with frontend(await login.start("10%")) as second:
                await second.run("1").shows("munge")
            assert (await page.run("print(6 * 7)").done()).outputs[-1] == "42\n"
        finally:
            away.rename(socket)
