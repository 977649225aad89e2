"""JupyterHub on Slurm as its page says: servers are jobs by batchspawner, or kernels are."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from support.hub_with_proxy import ROOT, Hub, need_proxy
from support.jupyter_env import eventually
from support.nvml_stub import Machine
from support.shell_blocks import blocks
from support.slurm import Slurm
from support.slurm_far import far_site
from support.student import Student

pytest.importorskip("batchspawner", reason="batchspawner is not installed: no extra has it")
EXAMPLE = ROOT / "examples/jupyterhub/slurm/jupyterhub_config.py"
PAGE = ROOT / "docs/administrator/slurm-hub.md"
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
#: Users are jobs' owners: this is who runs the tests.
ME = psutil.Process().username()
_T4 = "gpu GPU-t Tesla T4\nmemory 15360 0\n"
_GPUS = "gpu GPU-0 Tesla V100-SXM2-32GB\nmemory 32768 0\ngpu GPU-1 Tesla V100-SXM2-32GB\nmemory 32768 0\n"
_COURSE = """\
title: {title}
who: {{users: [{me}]}}
slices: [{{name: Fifth, request: 20%}}]
"""
_COMMON = """
where = json.loads(os.environ["EXAMPLE_OF_THIS_TEST"])
c.Spawner.environment.update(where["variables"])
"""
_ON_THE_HUB = f"""
{_COMMON}
c.Spawner.environment["JUPYTER_DATA_DIR"] = where["folder"] + "/data"
"""
#: What this test has and an administrator has not: other folders, and nobody who has to be changed to.
_IN_JOBS = f"""
{_COMMON}
load_subconfig(where["example"])
if where["address"] == "localhost":
    c.JupyterHub.hub_ip = "127.0.0.1"
c.GPUPoolSpawnerMixin.courses_dir = str(Path.cwd() / "courses")
c.SlurmSpawner.exec_prefix = ""
c.SlurmSpawner.req_options = "--nodelist=" + where["node"]
c.SlurmSpawner.batch_script = (
    c.JupyterHub.spawner_class.batch_script.default_value.replace("{{{{homedir}}}}", where["folder"])
    .replace("#SBATCH --get-user-env=L\\n", "")
)
# This machine has no names for the nodes of a test.
c.SlurmSpawner.batch_query_cmd = "squeue -h -j {{job_id}} -o '%T " + where["address"] + "'"
c.SlurmSpawner.cmd = [where["bin"] + "/jupyterhub-singleuser"]
c.SlurmSpawner.batchspawner_singleuser_cmd = where["bin"] + "/batchspawner-singleuser"
"""


@asynccontextmanager
async def _hub(
    slurm: Slurm, folder: Path, config: str, node: str = "n1", address: str = "localhost", gpus: str = _GPUS
) -> AsyncIterator[Hub]:
    """Run a Hub in a ``folder`` that the node of its jobs has, too, which has ``gpus``."""
    need_proxy()
    courses = {name: _COURSE.format(title=name, me=ME) for name in ("intro", "thesis")}
    hub = Hub(folder / "hub", {}, courses, config=config)
    settings = hub.folder / "gpu_pool_config.py"
    settings.write_text(f'{settings.read_text()}c.SlurmSettings.gpu_memory = {{"v100": 32, "t4": 16}}\n')
    variables = {**Machine(folder, gpus).environment, "GPU_POOL_DEVICES": ""}
    if address == "localhost":  # else the node has temporary files of its own
        variables["TMPDIR"] = str(folder / "temporary")
        (folder / "temporary").mkdir()
    programs = str(Path(sys.executable).parent)
    commands = {
        "PATH": f"{programs}:{slurm.environment['PATH']}",
        "SLURM_CONF": slurm.environment["SLURM_CONF"],
    }
    variables |= commands
    about = {
        "example": str(EXAMPLE),
        "folder": str(folder),
        "bin": programs,
        "variables": variables,
        "node": node,
        "address": address,
    }
    hub.variables |= {**commands, "EXAMPLE_OF_THIS_TEST": json.dumps(about)}
    await hub.start()
    try:
        yield hub
    finally:
        await hub.end()


_SHOW = "import os; print(os.environ['SLURM_JOB_ID'], os.environ['CUDA_VISIBLE_DEVICES'])"


async def _server(hub: Hub, course: str) -> Student:
    student = Student(hub.url, ME)
    await student.log_in()
    page = await student.spawn_page()
    assert "20% of a GPU" in page
    assert "free now" not in page  # Slurm knows, and nobody has asked it
    await student.start_server(course)
    return student


async def test_a_server_is_a_job_and_its_kernels_share_what_that_was_given(
    slurm: Slurm, tmp_path: Path
) -> None:
    async with _hub(slurm, tmp_path, _IN_JOBS) as hub:
        await _kernels_share_a_job(slurm, hub, "n1", "GPU-0")


async def test_a_server_is_a_job_on_a_node_that_is_another_machine(tmp_path: Path) -> None:
    with far_site(tmp_path) as site:
        site.name_the_first()
        folder = site.folder()
        async with _hub(site.slurm, folder, _IN_JOBS, "n2", site.far.address, _T4) as hub:
            await _kernels_share_a_job(site.slurm, hub, "n2", "GPU-t")
        assert not list(folder.rglob("store.db"))


async def _kernels_share_a_job(slurm: Slurm, hub: Hub, node: str, gpu: str) -> None:
    student = await _server(hub, "intro")
    [job] = slurm.run("squeue", "--noheader", "--format=%A").split()
    told = slurm.job(job)
    assert told["TresPerNode"].endswith("shard:40")  # after "gres:", "gres/" since 22.11
    assert (told["TimeLimit"], told["NodeList"]) == ("01:00:00", node)
    [name] = [each for each in await student.kernels() if "20%" in each]
    async with student.notebook(name) as first, student.notebook(name) as second:
        for each in (first, second):
            assert (await each.prints(_SHOW)).split()[-2:] == [job, gpu]
        async with student.notebook(name) as third:
            await third.run(_SHOW).shows("Waiting for a GPU slice of 20%")
        doctor, status = [await first.prints(f"!{each}") for each in _commands()]
        assert re.search(rf"Slurm job {job} on {node}: 40 shards, 40% of GPU 0", doctor)
        assert status.count("held") == 2
    await student.stop_server()
    assert slurm.run("squeue", "--noheader", "--format=%A") == ""


async def test_kernels_of_a_server_on_the_hubs_machine_are_jobs(slurm: Slurm, tmp_path: Path) -> None:
    shown = re.search(r"```python\n(# jupyterhub_config.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    # One account cannot be another here, and has the courses of this test.
    page = shown[1].replace("GPUPoolLocal", "GPUPoolSimpleLocal").replace("/etc/gpu-pool/courses", "courses")
    async with _hub(slurm, tmp_path, f"{page}\n{_ON_THE_HUB}") as hub:
        student = await _server(hub, "intro")
        assert slurm.run("squeue", "--noheader", "--format=%A") == ""
        [name] = [each for each in await student.kernels() if "20%" in each]
        async with student.notebook(name) as notebook:
            printed = await notebook.prints(_SHOW)
            [job] = slurm.run("squeue", "--noheader", "--format=%A").split()
            assert printed.split()[-2:] == [job, "0"]
            assert slurm.job(job)["TresPerNode"].endswith("shard:t4:20")
        await eventually(lambda: not slurm.run("squeue", "--noheader", "--format=%A"))
        await student.stop_server()


def _commands() -> list[str]:
    """Return what the page says to type in a server's terminal."""
    here = str(Path(__file__).relative_to(ROOT))
    found = [each for each in blocks(str(PAGE.relative_to(ROOT))) if each.mark == f"run by {here}"]
    return [command for block in found for command, _ in block.commands()]
