"""Kernels on the other nodes of a job: each in a step there, on what the job was given of that node."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from jupyter_client.manager import AsyncKernelManager

from gpu_pool.pool.pool import GpuPool
from gpu_pool.slurm.steps import StepHost
from gpu_pool_client import Holder, NeverFits, PoolUnreachable, parse_request
from support.frontend import frontend
from support.jupyter_env import JupyterEnv, eventually
from support.nvml_stub import Machine
from support.slurm import Slurm, missing, slurm_cluster
from support.slurm_allocated import Allocate, Allocated, allocating, write_drivers

#: A cell that runs until there is a file.
_UNTIL = "import pathlib, time\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.05)"
_SHOW = """
import os
print(*map(os.environ.get, ('SLURMD_NODENAME', 'CUDA_VISIBLE_DEVICES', 'SLURM_STEP_ID')), os.getpid())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if why := missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "cluster").mkdir()
    with slurm_cluster(folder / "cluster", f"TaskProlog={write_drivers(folder)}\n") as found:
        yield found


@pytest.fixture
async def allocate(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Allocate]:
    async with allocating(slurm, tmp_path, tmp_path, monkeypatch) as do:
        yield do


async def test_kernels_run_on_all_nodes_of_the_job_and_the_next_one_waits(allocate: Allocate) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    first, second = await shell.start("1"), await shell.start("1")
    async with frontend(first) as one, frontend(second) as two:
        shown = [(await page.run(_SHOW).done()).outputs[-1].split() for page in (one, two)]
        assert sorted(each[:2] for each in shown) == [["n1", "GPU-0"], ["n2", "GPU-t"]]
        async with frontend(await shell.start("1")) as three:
            cell = three.run(_SHOW)
            await cell.shows("Waiting for a whole GPU")
            await first.shutdown_kernel(now=True)
            await cell.done()
            assert cell.outputs[-1].split()[:2] == shown[0][:2]


async def test_a_restart_is_in_the_same_step_and_an_interrupt_reaches_the_cell(allocate: Allocate) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    async with frontend(manager := await shell.start("1 model=t4")) as page:
        before = (await page.run(_SHOW).done()).outputs[-1].split()
        await manager.restart_kernel(now=True)
        await page.is_connected()
        after = (await page.run(_SHOW).done()).outputs[-1].split()
        assert (after[:3], after[3] != before[3]) == (before[:3], True)
        cell = page.run("import time; print('began')\nwhile True: time.sleep(0.05)")
        await cell.shows("began")
        await manager.interrupt_kernel()
        await cell.shows("KeyboardInterrupt")


async def test_the_pool_divides_the_shards_of_each_node(allocate: Allocate) -> None:
    shell = allocate("--nodes=2", "--gres=shard:40")
    await shell.ask("20%")
    status = await shell.env.pool.status()
    free = {each.device.uuid: (each.device.node, each.free_milli) for each in status.devices}
    assert free == {"GPU-0": ("n1", 400), "GPU-t": ("n2", 400)}
    managers = [await shell.start("20% model=t4") for _ in range(2)]
    async with frontend(managers[0]) as one, frontend(managers[1]) as two:
        shown = [(await page.run(_SHOW).done()).outputs[-1].split() for page in (one, two)]
        assert [each[:2] for each in shown] == [["n2", "GPU-t"]] * 2
        async with frontend(await shell.start("20% model=t4")) as page:
            await page.run("1").shows("Waiting for a GPU slice of 20%")


async def test_frameworks_are_held_to_a_part_as_beside_the_server(allocate: Allocate) -> None:
    shell = allocate("--nodes=2", "--gres=shard:40")
    folder = shell.env.folder / "packages"
    (folder / "cupy_cuda12x-13.3.0.dist-info").mkdir(parents=True)
    async with frontend(await shell.start("20% model=t4", PYTHONPATH=str(folder))) as page:
        names = "'CUPY_GPU_MEMORY_LIMIT', 'GPU_POOL_ENFORCED'"
        cell = await page.run(f"import os; print(*map(os.environ.get, ({names})))").done()
    bytes_, _, enforced = cell.outputs[-1].partition(" ")
    assert 0 < int(bytes_) < 15360 * 2**20 * 20 // 100
    assert "framework caps: cupy" in enforced


async def test_more_than_the_job_was_given_of_any_node_is_refused(allocate: Allocate) -> None:
    shell = allocate("--nodes=2", "--gres=shard:40")
    with pytest.raises(NeverFits, match="was given 40% of a GPU"):
        await shell.env.pool.request(parse_request("41%"), Holder("ada", yields=True), "key")


async def test_the_end_of_the_kernel_is_the_end_of_its_step(allocate: Allocate) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    async with frontend(manager := await shell.start("1 model=t4")) as page:
        step = (await page.run(_SHOW).done()).outputs[-1].split()[2]
        assert f"{shell.job}.{step}" in shell.steps()
    await manager.shutdown_kernel(now=True)
    await eventually(shell.is_empty)


async def test_a_step_whose_srun_does_not_end_is_ended_by_slurm(
    allocate: Allocate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_pool.slurm.launching.ALONE", 10_000)
    shell = allocate("--nodes=2", "--gres=gpu:1")
    async with frontend(manager := await shell.start("1 model=t4")) as page:
        await page.run("1").done()
    [srun] = [each for each in psutil.Process().children() if each.name() == "srun"]
    srun.suspend()
    await manager.shutdown_kernel(now=True)
    await eventually(shell.is_empty)


async def _is_dead(manager: AsyncKernelManager) -> bool:
    return not await manager.is_alive()


async def test_the_start_of_a_kernel_and_no_look_removes_what_steps_of_jobs_that_are_over_have_left(
    allocate: Allocate,
) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    folder = shell.env.folder / "data" / "gpu-pool-jobs"
    for name in ("step-987654-1-ab-1", f"step-{shell.job}-1-ab-1"):
        (folder / name).mkdir(parents=True)
        os.utime(folder / name, (0, 0))
    (folder / "step-987654-2-cd-1").mkdir()
    await shell.ask("1")
    assert (folder / "step-987654-1-ab-1").exists()
    async with frontend(await shell.start("1 model=t4")) as page:
        await page.run("1").done()
    assert not (folder / "step-987654-1-ab-1").exists()
    assert (folder / f"step-{shell.job}-1-ab-1").exists()
    assert (folder / "step-987654-2-cd-1").exists()


async def test_a_kernel_that_dies_says_how_and_a_restart_is_in_the_same_step(allocate: Allocate) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    async with frontend(manager := await shell.start("1 model=t4")) as page:
        before = (await page.run(_SHOW).done()).outputs[-1].split()
        page.run("import os; os._exit(3)")
        await eventually(lambda: _is_dead(manager))
        await manager.restart_kernel()
        await page.is_connected()
        cell = await page.run(_SHOW).done()
        assert "The kernel ended by itself" in cell.outputs[0]
        assert cell.outputs[-1].split()[:3] == before[:3]


async def test_a_slice_that_is_taken_back_takes_its_step_with_it(allocate: Allocate) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    async with frontend(await shell.start("1 model=t4")) as page:
        await page.run("1").done()
        [lease] = await shell.env.leases()
        assert (lease.terms.in_pod, lease.terms.job) == (True, f"Slurm job {shell.job}")
        await shell.env.pool.release(lease.id)
        await eventually(shell.is_empty)


async def test_a_kernel_that_is_ended_when_idle_ends_its_step(allocate: Allocate) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    (shell.env.folder / "config").mkdir()
    (shell.env.folder / "config" / "gpu_pool_config.py").write_text(
        'c.PoolSettings.default_course = {"idle_limit": "8s", "when_idle": "end"}\n'
    )
    async with frontend(await shell.start("1 model=t4")) as page:
        await page.run("1").done()
        await eventually(shell.is_empty)
        await page.run("1").shows("idle")


async def test_another_size_may_be_had_on_another_node_at_a_restart(
    allocate: Allocate,
) -> None:
    shell = allocate("--nodes=2", "--gres=shard:40")
    manager, other = await shell.start("20%"), await shell.start("20%")
    async with frontend(manager) as page, frontend(other) as beside:
        before, there = [(await each.run(_SHOW).done()).outputs[-1].split() for each in (page, beside)]
        assert before[0] == there[0]
        await page.run("%gpu use 30%").done()
        await manager.restart_kernel()
        await page.is_connected()
        after = (await page.run(_SHOW).done()).outputs[-1].split()
        assert {before[0], after[0]} == {"n1", "n2"}
        await eventually(lambda: len(shell.steps()) == 2)
        assert (await beside.run(_SHOW).done()).outputs[-1].split() == there


async def test_a_step_that_is_cancelled_is_told_of_in_slurms_words(allocate: Allocate) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    async with frontend(manager := await shell.start("1 model=t4")) as page:
        step = f"{shell.job}.{(await page.run(_SHOW).done()).outputs[-1].split()[2]}"
        shell.slurm.run("scancel", step)
        await eventually(lambda: _is_dead(manager))
        await manager.restart_kernel()
        await page.is_connected()
        cell = await page.run("print(6 * 7)").done()
        assert f"The step of Slurm job {shell.job} on n2 ended with status 137." in cell.outputs[0]
        assert f"Slurm says: STEP {step} ON n2 CANCELLED AT " in cell.outputs[0]
        assert cell.outputs[-1] == "42\n"


async def test_the_end_of_the_job_is_warned_of(allocate: Allocate) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1", "--time=9")
    async with frontend(await shell.start("1 model=t4")) as page:
        end = shell.env.folder / "end"
        cell = page.run(_UNTIL.format(str(end)))
        await cell.shows(f"Slurm job {shell.job} ends in")
        end.touch()
        await cell.done()


_SERVER = """
import asyncio, os, signal
from jupyter_client.manager import AsyncKernelManager
async def main():
    manager = AsyncKernelManager(kernel_name={name!r})
    await manager.start_kernel()
    client = manager.client()
    client.start_channels(hb=False)
    await client.wait_for_ready(timeout=100)
    await client.execute_interactive("1", timeout=100)
    child = os.fork() if {forks} else 0
    if {forks} and not child:
        os.close(1)
        signal.pause()
    print("runs", child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with a forked child that lives on"])
async def test_a_server_that_is_killed_takes_its_steps_with_it(allocate: Allocate, forks: bool) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    code = _SERVER.format(name=shell.env.install("GPU", "1 model=t4"), forks=forks)
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    told, _ = await server.communicate()
    assert (b"runs" in told, server.returncode) == (True, -9)
    child = int(told.rpartition(b"runs")[2])
    try:
        await eventually(shell.is_empty)
        assert not child or psutil.Process(child).is_running()
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


def _command(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "gpu_pool.cli", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


#: Starts steps as Slurm's does, and none on n2: that is an error, or lasts until it may.
_SILENT = """#!/bin/sh
case $* in
    *=n2*)
        if ! test -e {0}/waits; then echo no such luck >&2; exit 1; fi
        while ! test -e {0}/may; do sleep 0.05; done;;
    *) echo "$*" >>{0}/others;;
esac
exec {1} "$@"
"""


async def test_doctor_and_list_name_the_nodes(allocate: Allocate) -> None:
    shell = allocate("--nodes=2", "--gres=shard:40")
    checks = json.loads(_command("doctor", "--json").stdout)["checks"]
    found = [(each["state"], each["text"]) for each in checks if each["name"] == "slurm nodes"]
    job = f"Slurm job {shell.job}"
    await shell.ask("20%")
    assert found == [("ok", f"{job} on n1: 40% of GPU 0"), ("ok", f"{job} on n2: 40% of GPU 0")]
    assert "on n2" in _command("list").stdout


def _silence(shell: Allocated, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which("srun", path=shell.slurm.environment["PATH"])
    (folder / "silent").mkdir()
    program = folder / "silent" / "srun"
    program.write_text(_SILENT.format(folder, real))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{shell.slurm.environment['PATH']}")


def _ask_again_at_once(shell: Allocated) -> None:
    pool = shell.env.pool
    assert isinstance(pool, GpuPool)
    assert isinstance(pool.backend.host, StepHost)
    pool.backend.host.again_after = 0.0


def _named_other(folder: Path) -> list[Path]:
    """Return what a step of a look has left in a folder, and what was written of it."""
    return list(folder.glob("other*"))


async def test_whoever_only_looks_starts_no_step_and_writes_nothing(
    allocate: Allocate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    _silence(shell, tmp_path, monkeypatch)
    assert _command("status").returncode == 0
    told = f"The nodes of Slurm job {shell.job} are asked for their GPUs once a kernel is started."
    assert told in " ".join(_command("list").stdout.split())
    assert not (await shell.env.pool.status()).devices
    assert not _named_other(tmp_path)
    await shell.ask("1")
    assert (await shell.env.pool.status()).devices
    assert (tmp_path / "others").exists()


async def test_a_node_that_does_not_answer_is_left_out_and_doctor_says_why(
    allocate: Allocate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    _silence(shell, tmp_path, monkeypatch)
    await shell.ask("1")
    status = json.loads(_command("status", "--json").stdout)
    assert [each["uuid"] for each in status["devices"]] == ["GPU-0"]
    checks = json.loads(_command("doctor", "--json").stdout)["checks"]
    [broken] = [each for each in checks if each["name"] == "slurm nodes" and each["state"] == "broken"]
    assert "on n2: Slurm's srun fails: no such luck" in broken["text"]


async def test_what_only_a_silent_node_could_grant_is_not_said_to_fit_never(
    allocate: Allocate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    _silence(shell, tmp_path, monkeypatch)
    _ask_again_at_once(shell)
    told = "Slurm job {} have said yet which GPUs they have (n2: Slurm's srun fails: no such luck)."
    with pytest.raises(PoolUnreachable, match=re.escape(told.format(shell.job))):
        await shell.ask("20% model=t4")
    (tmp_path / "waits").touch()
    (tmp_path / "may").touch()

    async def has_both() -> bool:
        await shell.ask("20%")
        return len((await shell.env.pool.status()).devices) == 2

    await eventually(has_both)
    await shell.ask("20% model=t4")
    with pytest.raises(NeverFits, match="no GPU here matches that"):
        await shell.ask("20% model=a100")


async def test_the_pool_does_not_wait_while_a_silent_node_is_asked_again_alone(
    allocate: Allocate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    _silence(shell, tmp_path, monkeypatch)
    _ask_again_at_once(shell)

    async def uuids() -> list[str]:
        await shell.ask("1")
        return [each.device.uuid for each in (await shell.env.pool.status()).devices]

    assert await uuids() == ["GPU-0"]
    (tmp_path / "waits").touch()
    for _ in range(3):  # it is asked again meanwhile
        assert await uuids() == ["GPU-0"]
    (tmp_path / "may").touch()
    await eventually(uuids, lambda seen: seen == ["GPU-0", "GPU-t"])
    assert len((tmp_path / "others").read_text().splitlines()) == 1


async def test_a_look_at_a_node_runs_nothing_of_the_servers_folder(
    allocate: Allocate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "json.py").write_text("open('was-run', 'w')\n")
    monkeypatch.chdir(tmp_path / "notebooks")
    await shell.ask("1")
    assert len((await shell.env.pool.status()).devices) == 2
    assert [each.name for each in (tmp_path / "notebooks").iterdir()] == ["json.py"]


async def test_a_command_is_told_to_use_srun(allocate: Allocate) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    done = _command("run", "1", "--", "true")
    assert f"Slurm job {shell.job} has GPUs on other nodes alone" in done.stderr
    assert done.returncode == 3


_NOTEBOOKS = """
import asyncio
import sys
from jupyter_client.manager import AsyncKernelManager
from support.frontend import frontend

async def main():
    kernels = [AsyncKernelManager(kernel_name="gpu") for _ in range(int(sys.argv[1]))]
    for each in kernels:
        await each.start_kernel()
        async with frontend(each) as page:
            print("shown:", (await page.run({show!r}).done()).outputs[-1])
    for each in kernels:
        await each.shutdown_kernel(now=True)

asyncio.run(main())
"""


def _ran(slurm: Slurm, folder: Path, script: str, *options: str) -> str:
    """Run a script in a job of both nodes, on its first; return what it printed."""
    JupyterEnv(folder, "embedded:").install("GPU", "1")
    (folder / "notebooks.py").write_text(_NOTEBOOKS.format(show=_SHOW))
    (folder / "temporary").mkdir()
    variables = {
        **Machine(folder).environment,
        "TMPDIR": f"{folder}/temporary",
        "JUPYTER_PATH": f"{folder}/data",
        "JUPYTER_DATA_DIR": f"{folder}/data",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    job = slurm.submit(script, "--nodes=2", *options, **variables)
    slurm.until(job, "COMPLETED")
    return slurm.output(job).read_text()


@pytest.mark.parametrize(("given", "own"), [("--gpus=3", ["GPU-0", "GPU-1"]), ("--gres=gpu:1", ["GPU-0"])])
def test_a_server_on_the_first_node_has_its_own_gpus_and_those_of_the_others(
    slurm: Slurm, tmp_path: Path, given: str, own: list[str]
) -> None:
    script = f"{sys.executable} notebooks.py {len(own) + 1}"
    told = _ran(slurm, tmp_path, script, given, f"--chdir={tmp_path}")
    shown = sorted(line.split()[1:4] for line in told.splitlines() if line.startswith("shown: "))
    # Those beside their server are in no step (26.05: -5); the first step has looked at the other node.
    in_no_step = [each[:2] for each in shown if each[2] in ("None", "-5")]
    assert (in_no_step, shown[-1]) == ([["n1", each] for each in own], ["n2", "GPU-t", "1"])


def test_commands_have_gpus_of_their_own_node_alone(slurm: Slurm, tmp_path: Path) -> None:
    program = f"{sys.executable} -m gpu_pool.cli"
    script = f"{program} run 1 -- {program} run 1 --timeout 1s -- true; echo status $?"
    told = _ran(slurm, tmp_path, script, "--gres=gpu:1")
    assert "status 6" in told


def test_servers_that_run_on_each_node_have_their_own_alone(slurm: Slurm, tmp_path: Path) -> None:
    script = f"srun --nodes=2 {sys.executable} -m gpu_pool.cli status --json"
    told = _ran(slurm, tmp_path, script, "--gres=gpu:1")
    assert sorted(re.findall(r'"uuid": "(GPU-.)"', told)) == ["GPU-0", "GPU-t"]
