"""The example for SystemdSpawner, with a real JupyterHub and the machine's systemd.

They are skipped where systemdspawner or root is missing, or the machine is not run by systemd.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

import pytest

from gpu_pool_client import LeaseState
from gpu_pool_client._processes import owner_of
from support import example_hubs as example
from support.hub_with_proxy import ROOT, proxy_command

pytest.importorskip("systemdspawner", reason="jupyterhub-systemdspawner is not installed: no extra has it")
EXAMPLE = ROOT / "examples/jupyterhub/systemd/jupyterhub_config.py"
_SYSTEMD = """
c.SystemdSpawner.unit_name_template = settings["name"] + "-{USERNAME}"
c.SystemdSpawner.user_workingdir = "/tmp"
c.SystemdSpawner.isolate_tmp = False
c.GPUPoolSpawnerMixin.pool_url = settings["pool"]
"""


def test_the_example_is_a_configuration() -> None:
    found = example.configuration(EXAMPLE, "SystemdSpawner")
    assert "isolate_devices" not in found.SystemdSpawner


def systemctl(*command: str) -> None:
    subprocess.run(["systemctl", *command], check=True)


def unit_of(pid: int) -> str:
    """Return the unit of systemd in which a process is."""
    return Path(f"/proc/{pid}/cgroup").read_text().rpartition(".service")[0].rpartition("/")[2] + ".service"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/run/systemd/system").is_dir() or proxy_command() is None,
    reason="needs root, systemd as the machine's first process, and configurable-http-proxy",
)
async def test_a_unit_of_systemd_is_its_user_and_its_kernels_are_seen(tmp_path: Path) -> None:
    async with example.hub_of(EXAMPLE, tmp_path, _SYSTEMD) as hub:
        assert b"You are not in this course" in await example.refused(hub, "games", "bio")
        await example.start(hub, "games", "art")
        lease = await example.kernel_of(hub, "games", 5)
        assert (lease.holder.user, lease.holder.course, lease.state) == ("games", "art", LeaseState.HELD)
        process = lease.holder.process
        assert process.is_alive()
        assert owner_of(process.pid) == pwd.getpwnam("games").pw_uid
        # As where memory has run out: no process of the unit can say anything any more.
        systemctl("kill", "--signal=KILL", unit_of(process.pid))
        await example.none_is_left(hub)
        await example.stop(hub, "games")
