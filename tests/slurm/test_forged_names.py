"""Names of jobs are anybody's to choose, and may be made to look like what Slurm says of other jobs."""

from __future__ import annotations

import os

import pytest

from gpu_pool.slurm.backend import SlurmBackend
from gpu_pool_provisioner.pools import shared_pool
from support.frontend import frontend
from support.jupyter_env import eventually
from support.slurm_login import Login
from support.users import NOBODY

#: As squeue prints a job that was cancelled, and one of the pool whose lease is gone.
_CANCELLED = "{}|CANCELLED|None|0|gpu|N/A|N/A|"
_LEFT = "{}|RUNNING|None|1|gpu|N/A|N/A|n1|{}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can submit a stranger's job")
async def test_the_name_of_a_strangers_job_says_nothing_of_others(login: Login) -> None:
    async with frontend(await login.start("40% model=t4")) as page:
        await page.run("1").done()
        [job] = login.jobs()
        name = login.slurm.run("squeue", "--noheader", "--format=%j").strip()
        other = login.slurm.submit("sleep 600")
        left = _LEFT.format(other, f"{name.rpartition('-')[0]}-gone")
        lines = ["x", _CANCELLED.format(job), _CANCELLED.format(job) + "|x", left]
        # Of two words on one job the last counts, and squeue has this partition's jobs after the other's.
        options = (f"--uid={NOBODY}", "--hold", "--partition=large", "--job-name=" + "\n".join(lines))
        stranger = login.slurm.submit("true", *options)
        backend = shared_pool(login.env.url).backend  # type: ignore[attr-defined]
        assert isinstance(backend, SlurmBackend)
        looks = backend.watch.looks
        await eventually(lambda: backend.watch.looks > looks + 1 and stranger in backend.watch.jobs)
        assert (await page.run("print(6 * 7)").done()).outputs[-1] == "42\n"
        assert set(login.jobs()) == {job, other, stranger}
        login.slurm.until(other, "RUNNING")
