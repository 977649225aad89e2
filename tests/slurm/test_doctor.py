"""``gpu-pool doctor`` for a pool ``slurm:``: what it says of the site, and what is to be done."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.ports import free_ports
from support.slurm import Slurm, user_name
from support.slurm_accounting import limited, without_account

Doctor = Callable[..., dict[tuple[str, str], dict[str, str]]]


@pytest.fixture
def doctor(slurm: Slurm, tmp_path: Path) -> Doctor:
    return _doctor(slurm, tmp_path)


def _doctor(slurm: Slurm, tmp_path: Path) -> Doctor:
    """Return what runs it with these variables, and returns its checks by name and state."""

    def run(**environ: str) -> dict[tuple[str, str], dict[str, str]]:
        folders = {name: str(tmp_path / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")}
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "gpu_pool.cli",
                "doctor",
                "--json",
                "--pool",
                f"slurm:{tmp_path}/slurm.db",
            ],
            env={**slurm.environment, **folders, **environ},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.stderr == ""
        found = json.loads(done.stdout)
        assert (done.returncode == 0) == found["healthy"]
        return {(each["name"], each["state"]): each for each in found["checks"]}

    return run


def test_it_says_what_the_site_has_and_what_is_not_known(doctor: Doctor, tmp_path: Path) -> None:
    found = doctor()
    assert found["slurm", "ok"]["text"].startswith("tests, Slurm 2")
    has = "the default partition has t4 (1 on a node, 100 shards each), v100 (2 on a node, 100 shards each)"
    assert found["slurm gpus", "ok"]["text"] == has
    assert found["slurm gpus", "note"]["text"].startswith("the memory of t4, v100 is not known")
    assert found["slurm gpus", "note"]["remedy"].endswith("c.SlurmSettings.gpu_memory = {'t4': 32}")
    assert found["slurm accounting", "ok"]["text"].startswith("Slurm keeps none")
    assert f"below {tmp_path}/JUPYTER_DATA_DIR (" in found["slurm folder", "ok"]["text"]
    assert found["pool", "ok"]["text"] == f"slurm:{tmp_path}/slurm.db answers"
    assert ("gpus", "broken") not in found


def test_a_partition_without_gpus_is_told(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "JUPYTER_CONFIG_DIR").mkdir()
    (tmp_path / "JUPYTER_CONFIG_DIR" / "gpu_pool_config.py").write_text('c.SlurmSettings.partition = "cpu"\n')
    found = doctor()
    assert found["slurm gpus", "broken"]["text"] == "partition cpu has none"
    assert "c.SlurmSettings.partition" in found["slurm gpus", "broken"]["remedy"]


def test_missing_commands_are_named(doctor: Doctor, tmp_path: Path) -> None:
    found = doctor(PATH=str(tmp_path))
    assert found["slurm", "broken"]["text"].startswith(
        "sbatch, scancel, scontrol, sinfo, squeue not on the PATH"
    )


def test_a_controller_that_is_not_there_is_told(doctor: Doctor, slurm: Slurm, tmp_path: Path) -> None:
    [port] = free_ports(1)
    lines = (slurm.folder / "slurm.conf").read_text().splitlines()
    elsewhere = [f"SlurmctldPort={port}" if line.startswith("SlurmctldPort") else line for line in lines]
    (tmp_path / "slurm.conf").write_text("\n".join([*elsewhere, "MessageTimeout=2", ""]))
    (tmp_path / "gres.conf").write_text((slurm.folder / "gres.conf").read_text())
    found = doctor(SLURM_CONF=str(tmp_path / "slurm.conf"))
    assert "Slurm does not answer" in found["slurm", "broken"]["text"]
    assert found["slurm", "broken"]["remedy"] == "scontrol ping"


def test_no_munge_is_told(doctor: Doctor, slurm: Slurm, tmp_path: Path) -> None:
    text = (slurm.folder / "slurm.conf").read_text()
    (tmp_path / "slurm.conf").write_text(text.replace("munge.socket", "no.socket"))
    (tmp_path / "gres.conf").write_text((slurm.folder / "gres.conf").read_text())
    found = doctor(SLURM_CONF=str(tmp_path / "slurm.conf"))
    assert found["slurm", "broken"]["remedy"] == "See whether munge runs: systemctl status munge"


def test_accounts_are_told_with_their_limits(accounted: Slurm, tmp_path: Path) -> None:
    with limited(accounted, maxjobs="3", maxsubmitjobs="5", maxtresperjob="gres/gpu=1"):
        found = _doctor(accounted, tmp_path)()
    said = "account teaching (QOS: normal,one-gpu; running jobs: 3; jobs at once: 5; per job: gres/gpu=1)"
    assert found["slurm accounting", "ok"]["text"] == said


def test_a_user_without_an_account_is_told(accounted: Slurm, tmp_path: Path) -> None:
    with without_account(accounted):
        found = _doctor(accounted, tmp_path)()
    told = found["slurm accounting", "broken"]
    assert told["text"] == f"{user_name()} has no association in Slurm's accounting: its jobs are refused"
    assert f"sacctmgr add user {user_name()} account=ACCOUNT" in told["remedy"]
