"""Jobs that are to end while Slurm does not answer: they are kept in mind until it has cancelled them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.frontend import frontend
from support.jupyter_env import eventually
from support.slurm_login import Login

#: Slurm's scancel, which the controller does not answer as long as there is a file; it notes each attempt.
_SCANCEL = """#!/bin/sh
if [ -e "{folder}/away" ]; then
    echo "$*" >> "{folder}/tried"
    echo "scancel: error: {says}" >&2
    exit 1
fi
exec {real} "$@"
"""
_AWAY = "Unable to contact slurm controller (connect failure)"


@dataclass(frozen=True)
class Scancel:
    """One that may fail."""

    folder: Path

    @contextmanager
    def fails(self) -> Iterator[None]:
        (self.folder / "away").touch()
        yield
        (self.folder / "away").unlink()

    def tried(self) -> list[str]:
        """Return which jobs it was to cancel meanwhile."""
        file = self.folder / "tried"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.split()[-1] for line in lines]


@pytest.fixture(params=[_AWAY, "Kill job error on job id 1: Unspecified error"])
def scancel(request: pytest.FixtureRequest, login: Login, monkeypatch: pytest.MonkeyPatch) -> Scancel:
    folder = login.env.folder / "programs"
    folder.mkdir()
    path = login.slurm.environment["PATH"]
    program = folder / "scancel"
    real = shutil.which("scancel", path=path)
    program.write_text(_SCANCEL.format(folder=folder, real=real, says=request.param))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{path}")
    return Scancel(folder)


async def test_a_job_that_could_not_be_cancelled_is_cancelled_once_slurm_answers(
    login: Login, scancel: Scancel
) -> None:
    taken = login.slurm.submit("sleep 600", "--gres=gpu:t4:1")
    login.slurm.until(taken, "RUNNING")
    # The names of jobs are asked for with the first one, and then once a minute.
    for _ in range(2):
        async with frontend(manager := await login.start("1 model=t4")) as page:
            await page.run("1").shows("in the queue")
            [job] = [each for each in login.jobs() if each != taken]
            if len(login.started) == 1:
                await manager.shutdown_kernel(now=True)
    with scancel.fails():
        await manager.shutdown_kernel(now=True)
        await eventually(lambda: len(scancel.tried()) > 2)
        assert set(scancel.tried()) == {job}

    async def is_over() -> bool:
        folders = list((login.env.folder / "data" / "gpu-pool-jobs").iterdir())
        return not folders and login.jobs() == [taken]

    await eventually(is_over)


async def test_a_job_of_before_the_cluster_was_set_up_anew_may_have_the_number_of_another(
    login: Login,
) -> None:
    async with frontend(await login.start("40%")) as page:
        await page.run("1").done()
        own = login.slurm.submit("sleep 600", "--job-name=thesis")
        login.slurm.until(own, "RUNNING")
        [folder] = (login.env.folder / "data" / "gpu-pool-jobs").iterdir()
        before = folder.with_name(f"{folder.name.partition('-')[0]}-7-0a1b2c3d-1")
        shutil.copytree(folder, before)
        (before / "job").write_text(own)
        await eventually(lambda: not before.exists())
        assert own in login.jobs()
        assert (await page.run("print(6 * 7)").done()).outputs[-1] == "42\n"
