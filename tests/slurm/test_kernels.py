"""Kernels as jobs of their own: they wait in Slurm's queue, and say so in the cell."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from support.frontend import Frontend, frontend
from support.jupyter_env import eventually
from support.slurm_login import Login
from support.supervisors import IS_FORKED

_SHOW = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['SLURM_JOB_ID'], os.getpid())"

#: A cell that runs until there is a file.
_UNTIL = "import pathlib, time\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.05)"


async def test_a_kernel_is_a_job_on_the_part_of_a_gpu_that_it_asked_for(login: Login) -> None:
    async with frontend(await login.start("40%")) as page:
        cell = await page.run(_SHOW).done()
        [job] = login.jobs()
        assert re.fullmatch(rf"0 {job} \d+\n", cell.outputs[-1]), cell.outputs
        assert login.slurm.job(job)["TresPerNode"].endswith(
            "shard:t4:40"
        )  # after "gres:", "gres/" since 22.11


async def test_a_job_has_what_the_users_profile_sets_and_nothing_of_the_server(
    login: Login, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".bash_profile").write_text("export FROM_PROFILE=set\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TOKEN_OF_SERVER", "secret")
    async with frontend(await login.start("40%")) as page:
        show = "import os; print(*map(os.environ.get, ('FROM_PROFILE', 'HOME', 'TOKEN_OF_SERVER')))"
        cell = await page.run(show).done()
        assert cell.outputs[-1] == f"set {tmp_path} None\n"
        cell = await page.run("print(open(f'/proc/{os.getppid()}/environ').read())").done()
        assert "TOKEN_OF_SERVER" not in cell.outputs[-1]


async def test_the_cell_shows_where_the_job_stands_and_runs_by_itself(login: Login) -> None:
    taken = login.slurm.submit("sleep 600", "--gres=gpu:t4:1", "--time=10")
    login.slurm.until(taken, "RUNNING")
    async with frontend(await login.start("1 model=t4")) as page:
        cell = page.run("print('ran')")
        await cell.shows("Waiting for a whole GPU. It is next in the queue of partition gpu")
        await cell.shows("It waits until what it needs is free.")
        later = login.slurm.submit("sleep 600", "--gres=gpu:t4:1", "--nice=-10")
        await cell.shows("It is number 2 in the queue of partition gpu")
        login.slurm.run("scancel", later, taken)
        await cell.done()
        assert cell.outputs[-1] == "ran\n"


async def test_the_cell_says_which_gpu_would_be_had_sooner(login: Login) -> None:
    taken = login.slurm.submit("sleep 600", "--gres=gpu:t4:1")
    login.slurm.until(taken, "RUNNING")
    async with frontend(await login.start("1 model=t4")) as page:
        cell = page.run("print('ran')")
        await cell.shows("A GPU of the type v100 is free now: with model=v100 it would start sooner.")
        both = login.slurm.submit("sleep 600", "--gres=gpu:v100:2")
        login.slurm.until(both, "RUNNING")
        await eventually(lambda: "is free now" not in cell.outputs[-1])


async def test_while_slurm_does_not_answer_a_cell_that_waits_says_so(login: Login) -> None:
    taken = login.slurm.submit("sleep 600", "--gres=gpu:t4:1")
    login.slurm.until(taken, "RUNNING")
    async with frontend(await login.start("1 model=t4")) as page:
        cell = page.run("print('ran')")
        await cell.shows("It is next in the queue of partition gpu")
        with login.slurm.silent():
            await cell.shows("Slurm does not answer")
        login.slurm.run("scancel", taken)
        await cell.done()
        assert cell.outputs[-1] == "ran\n"


#: Stands in for a cluster of a federation, which needs two clusters and their accounting.
_FEDERATED = """#!/bin/sh
[ "$*" = "show federation" ] && echo "Federation: east-and-west" && exit
exec {real} "$@"
"""


async def test_a_cluster_of_a_federation_is_refused(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = login.env.folder / "federated"
    folder.mkdir()
    real = shutil.which("scontrol", path=login.slurm.environment["PATH"])
    (folder / "scontrol").write_text(_FEDERATED.format(real=real))
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    done = _command("status")
    assert "This cluster is part of the federation east-and-west" in done.stderr
    assert done.returncode != 0


async def test_a_kernel_that_is_ended_when_idle_ends_its_job(login: Login) -> None:
    with (login.env.folder / "config" / "gpu_pool_config.py").open("a") as settings:
        settings.write('c.PoolSettings.default_course = {"idle_limit": "8s", "when_idle": "end"}\n')
    async with frontend(await login.start("40%")) as page:
        await page.run("1").done()
        await eventually(lambda: not login.jobs())
        cell = page.run("1")
        await cell.shows("idle")


async def test_a_kernel_that_waits_takes_its_job_with_it(login: Login) -> None:
    taken = login.slurm.submit("sleep 600", "--gres=gpu:t4:1")
    login.slurm.until(taken, "RUNNING")
    async with frontend(manager := await login.start("1 model=t4")) as page:
        await page.run("1").shows("Waiting for a whole GPU.")
        await manager.shutdown_kernel(now=True)
    await eventually(lambda: login.jobs() == [taken])


async def test_an_interrupt_gives_up_the_cell_and_the_job_keeps_its_place(login: Login) -> None:
    taken = login.slurm.submit("sleep 600", "--gres=gpu:t4:1")
    login.slurm.until(taken, "RUNNING")
    async with frontend(manager := await login.start("1 model=t4")) as page:
        cell = page.run("1")
        await cell.shows("Waiting for a whole GPU.")
        await manager.interrupt_kernel()
        await cell.shows("this cell did not run")
        assert len(login.jobs()) == 2
        again = page.run("print('ran')")
        await again.shows("Waiting for a whole GPU.")
        login.slurm.run("scancel", taken)
        await again.done()
        assert again.outputs[-1] == "ran\n"


async def test_of_a_gpu_whose_memory_slurm_does_not_know_that_is_said(login: Login) -> None:
    login.configure(gpu_memory={})
    async with frontend(await login.start("1 model=t4")) as page:
        cell = page.run("from gpu_pool_kernels.inkernel.slice_info import current; print(current())")
        await cell.shows("unknown granted")
        assert "memory: not known, none" in "".join(cell.outputs)
        assert "1 whole t4, memory not known" in _command("smi").stdout
        assert _command("status").stdout.count("not known") == 1
        assert _command("list").stdout.count("not known") == 3


async def test_a_restart_is_in_the_same_job(login: Login) -> None:
    async with frontend(manager := await login.start("40%")) as page:
        assert (await page.run(f"print({IS_FORKED})").done()).outputs[-1] == "True\n"
        before = (await page.run(_SHOW).done()).outputs[-1].split()
        await manager.restart_kernel(now=True)
        await page.is_connected()
        after = (await page.run(_SHOW).done()).outputs[-1].split()
    assert after[:2] == before[:2]
    assert after[2] != before[2]


async def test_a_cancelled_job_is_told_of_in_the_next_cell(login: Login) -> None:
    async with frontend(await login.start("40%")) as page:
        await page.run("1").done()
        [job] = login.jobs()
        login.slurm.run("scancel", job)
        await eventually(login.env.is_empty)
        cell = page.run("1")
        await cell.shows(f"Slurm job {job} was cancelled, by scancel or by an administrator.")


async def test_the_end_of_the_kernel_is_the_end_of_its_job(login: Login) -> None:
    async with frontend(manager := await login.start("40%")) as page:
        await page.run("1").done()
    await manager.shutdown_kernel(now=True)

    async def is_empty() -> bool:
        left = list((login.env.folder / "data" / "gpu-pool-jobs").iterdir())
        return not left and not login.jobs() and await login.env.is_empty()

    await eventually(is_empty)


def _visible_in_processes() -> Iterator[str]:
    for pid in psutil.pids():
        for name in ("environ", "cmdline"):
            with suppress(OSError):  # it has ended
                yield Path("/proc", str(pid), name).read_bytes().decode(errors="replace")


async def test_no_key_is_where_others_can_read_it(login: Login) -> None:
    async with frontend(manager := await login.start("40%")) as page:
        await page.run("1").done()
        key = manager.session.key.decode()
        [job] = login.jobs()
        folder = next((login.env.folder / "data" / "gpu-pool-jobs").iterdir())
        said = [
            login.slurm.run("scontrol", "show", "job", "-d", job),
            login.slurm.run("scontrol", "write", "batch_script", job, "-"),
            *(each.read_text() for each in folder.iterdir()),
            *_visible_in_processes(),
        ]
        assert len(key) > 20
        assert not [each for each in said if key in each]
        assert folder.stat().st_mode & 0o077 == 0


async def test_the_time_limit_of_the_job_is_warned_of(login: Login) -> None:
    login.configure(time="9")
    async with frontend(await login.start("40%")) as page:
        [job] = login.jobs()
        lease = await login.env.only_lease()
        assert lease.terms.job == f"Slurm job {job}"
        end = login.env.folder / "end"
        cell = page.run(_UNTIL.format(str(end)))
        await cell.shows(f"Slurm job {job} ends in")
        end.touch()
        await cell.done()
    assert re.search(
        r"ends in [5-9]min(\d0s)?, and this kernel with it: the time limit", "".join(cell.outputs)
    )


async def test_what_slurm_refuses_is_said_in_its_words(login: Login) -> None:
    login.configure(constraint="nosuch")
    async with frontend(await login.start("40%")) as page:
        cell = await page.run("1").done()
    assert "Slurm refuses the kernel's job: sbatch: error:" in " ".join("".join(cell.outputs).split())
    assert login.jobs() == []


async def _jobs_after(page: Frontend, login: Login) -> list[str]:
    await page.run("1").done()
    return login.jobs()


async def test_an_administrator_cannot_requeue_a_kernel(login: Login) -> None:
    async with frontend(await login.start("40%")) as page:
        [job] = await _jobs_after(page, login)
        requeue = await asyncio.create_subprocess_exec("scontrol", "requeue", job)
        assert await requeue.wait()
        assert (await page.run("print(6 * 7)").done()).outputs[-1] == "42\n"
        assert login.jobs() == [job]


async def test_a_node_that_fails_is_told_of_and_a_restart_is_a_new_job(login: Login) -> None:
    async with frontend(manager := await login.start("40% model=t4")) as page:
        [job] = await _jobs_after(page, login)
        node = login.slurm.job(job)["NodeList"]
        login.slurm.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        with suppress(AssertionError):  # it may have come back by itself by now (ReturnToService)
            login.slurm.run("scontrol", "update", f"nodename={node}", "state=resume")
        await eventually(login.env.is_empty)
        await page.run("1").shows(f"Slurm job {job} ended since its node failed.")
        await manager.restart_kernel(now=True)
        await page.is_connected()
        assert (await page.run("print(6 * 7)").done()).outputs[-1] == "42\n"
        [again] = login.jobs()
        assert again != job


async def test_a_job_that_can_never_start_says_so_in_the_cell(login: Login) -> None:
    login.configure(time="5:00:00")
    async with frontend(await login.start("40%")) as page:
        await page.run("1").shows(
            "Its time limit is longer than its partition allows, so that it never starts."
        )


async def test_what_a_job_is_told_is_never_shell(login: Login) -> None:
    told = "$(touch ran) `touch ran` ; touch ran '\" & a"
    login.configure(account=told)
    async with frontend(await login.start("40%")) as page:
        [job] = await _jobs_after(page, login)
        assert login.slurm.run("squeue", "--noheader", "--format=%a").strip() == told
        assert not list(login.env.folder.rglob("ran"))
        script = login.slurm.run("scontrol", "write", "batch_script", job, "-")
        assert "touch" not in script


async def test_a_job_that_fails_says_how_and_its_last_words(login: Login) -> None:
    login.configure(prologue="echo the module is missing; exit 3")
    async with frontend(await login.start("40%")) as page:
        cell = await page.run("1").done()
    shown = " ".join("".join(cell.outputs).split())
    assert re.search(r"Slurm job \d+ ended with status 3. Its last words: the module is missing", shown)


async def test_while_slurm_does_not_answer_kernels_run_and_the_cell_says_so(login: Login) -> None:
    async with frontend(await login.start("40%")) as page:
        await page.run("1").done()
        end = login.env.folder / "end"
        with login.slurm.silent():
            cell = page.run(_UNTIL.format(str(end)))
            await cell.shows("Slurm does not answer")
            end.touch()
            await cell.done()
            assert (await page.run("print(6 * 7)").done()).outputs[-1] == "42\n"
        assert (await page.run("print(6 * 7)").done()).outputs[-1] == "42\n"


async def test_the_job_of_a_server_that_was_killed_ends_by_itself(login: Login) -> None:
    name = login.env.install("GPU", "40%")
    code = f"""
import asyncio, os, signal
from jupyter_client.manager import AsyncKernelManager
from gpu_pool.slurm import backend
backend.ALONE = 20  # from when its kernel listens a server may take seconds to connect, where others work
async def main():
    manager = AsyncKernelManager(kernel_name={name!r})
    await manager.start_kernel()
    client = manager.client()
    client.start_channels(hb=False)
    await client.wait_for_ready(timeout=100)
    await client.execute_interactive("1", timeout=100)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await server.wait() == -signal.SIGKILL
    await eventually(lambda: not login.jobs())


_ANOTHER = """
import asyncio
from jupyter_client.manager import AsyncKernelManager
async def main():
    manager = AsyncKernelManager(kernel_name={name!r})
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=100)
    reply = await client.execute_interactive("1 / 0", timeout=100)
    print(reply["content"]["ename"], flush=True)
    client.stop_channels()
    await manager.shutdown_kernel()
asyncio.run(main())
"""


async def test_two_servers_of_one_user_know_of_one_anothers_jobs(login: Login) -> None:
    async with frontend(await login.start("40% model=v100")) as page:
        await page.run("1").done()
        [first] = login.jobs()
        code = _ANOTHER.format(name=login.env.install("GPU 40", "40%"))
        another = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
        )
        told, _ = await another.communicate()
        assert (told.endswith(b"ZeroDivisionError\n"), another.returncode) == (True, 0)
        shown = json.loads(_command("status", "--json").stdout)
        assert [lease["job"] for lease in shown["leases"]] == [f"Slurm job {first}"]
        assert (await page.run("print(6 * 7)").done()).outputs[-1] == "42\n"


#: Submits a job as Slurm's does, and kills who has asked for it.
_KILLING = """#!/bin/sh
{real} "$@"
kill -9 $PPID
"""


async def test_the_job_of_a_server_that_was_killed_as_it_submitted_is_cancelled(login: Login) -> None:
    taken = login.slurm.submit("sleep 600", "--gres=gpu:t4:1")
    login.slurm.until(taken, "RUNNING")
    folder = login.env.folder / "killing"
    folder.mkdir()
    real = shutil.which("sbatch", path=login.slurm.environment["PATH"])
    (folder / "sbatch").write_text(_KILLING.format(real=real))
    (folder / "sbatch").chmod(0o755)
    path = f"{folder}:{login.slurm.environment['PATH']}"
    code = _ANOTHER.format(name=login.env.install("GPU 40", "1 model=t4"))
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env={**os.environ, "PATH": path}
    )
    assert await killed.wait() == -9
    [orphan] = [job for job in login.jobs() if job != taken]
    async with frontend(await login.start("40% model=v100")) as page:
        await page.run("1").done()
        await eventually(lambda: orphan not in login.jobs())


def _command(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "gpu_pool.cli", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_a_command_is_told_to_use_srun(login: Login) -> None:
    done = _command("run", "40%", "--", "true")
    assert done.returncode == 4
    assert "Start a command by Slurm itself: srun --gres=gpu:1 COMMAND." in done.stderr
