"""A site whose Slurm's commands sign in by a token (auth/jwt), and not by munge."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.frontend import frontend
from support.slurm import PLACES, Slurm, missing, slurm_cluster
from support.slurm_login import Login

_PLUGINS = ("/usr/lib", "/usr/lib64", "/usr/local/lib")


def _has_plugin() -> bool:
    return any(True for place in _PLUGINS for _ in Path(place).glob("**/auth_jwt.so"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if why := missing() or ("" if _has_plugin() else "this Slurm has no plugin auth/jwt"):
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "jwt.key").write_bytes(os.urandom(32))
    (folder / "jwt.key").chmod(0o600)
    more = f"AuthAltTypes=auth/jwt\nAuthAltParameters=jwt_key={folder}/jwt.key\n"
    with slurm_cluster(folder, more) as found:
        yield found


@pytest.fixture
def sign_in(login: Login, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """Return what gets a token that is good for so many seconds: without one, no command is answered."""
    folder = tmp_path / "client"
    folder.mkdir()
    told = Path(login.slurm.environment["SLURM_CONF"]).read_text()
    (folder / "slurm.conf").write_text(told.replace("munge.socket", "no.socket"))

    def sign_in(seconds: int) -> str:
        token = login.slurm.run("scontrol", "token", f"lifespan={seconds}").strip().partition("=")[2]
        monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        monkeypatch.setenv("SLURM_JWT", token)
        return token

    return sign_in


async def test_a_kernel_is_a_job_by_a_token_which_it_does_not_have(
    login: Login, sign_in: Callable[[int], str]
) -> None:
    token = sign_in(600)
    async with frontend(await login.start("40%")) as page:
        show = "import os; print('SLURM_JWT' in os.environ, os.environ['SLURM_JOB_ID'])"
        [job] = login.jobs() if (cell := await page.run(show).done()) else []
        assert cell.outputs[-1] == f"False {job}\n"
        cell = await page.run("print(open(f'/proc/{os.getppid()}/environ').read())").done()
        assert "SLURM_JOB_ID" in cell.outputs[-1]
        assert "SLURM_JWT" not in cell.outputs[-1]
        assert token not in login.slurm.run("scontrol", "write", "batch_script", job, "-")
        assert token not in login.slurm.run("scontrol", "show", "job", "-d", job)


def test_a_token_that_has_expired_is_told_of(login: Login, sign_in: Callable[[int], str]) -> None:
    sign_in(1)
    while not subprocess.run(["squeue"], env={**os.environ, "PATH": PLACES}, capture_output=True).returncode:
        pass  # as long as it is good
    argv = [sys.executable, "-m", "gpu_pool.cli", "list"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "The token for Slurm in SLURM_JWT has expired: it was good until" in done.stderr
    assert "Start Jupyter with another one (scontrol token)" in done.stderr
    assert done.returncode


def test_what_is_no_token_is_told_of(
    login: Login, sign_in: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sign_in(60)
    monkeypatch.setenv("SLURM_JWT", "nothing")
    argv = [sys.executable, "-m", "gpu_pool.cli", "list"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "Slurm does not take the token in SLURM_JWT." in done.stderr
    assert "nothing" not in done.stderr.replace("SLURM_JWT", "")
