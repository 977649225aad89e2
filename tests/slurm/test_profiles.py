"""What users have set for their shells and jobs; of profiles, some end a job, and some never end."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from support.frontend import frontend
from support.slurm_login import Login


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Return what writes the user's profile."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return (tmp_path / ".bash_profile").write_text


@pytest.mark.parametrize(
    ("lines", "status"),
    [("exec sh", 0), ("echo the quota is used up; exit 1", 1), ("read answer\nexec sh -l", 0), ("exit", 0)],
)
async def test_a_profile_that_ends_the_shell_of_a_job_is_named(
    login: Login, profile: Callable[[str], object], lines: str, status: int
) -> None:
    profile(f"{lines}\n")
    async with frontend(await login.start("40%")) as page:
        cell = await page.run("1").done()
    shown = " ".join("".join(cell.outputs).split())
    assert re.search(
        rf"Slurm job \d+ ended with status {status}. Its script was not reached: a profile", shown
    )
    assert "Let it do so only where somebody types: case $- in *i*) exec zsh;; esac" in shown
    assert ("Its last words: the quota is used up" in shown) is bool(status)


async def test_while_a_profile_runs_the_cell_says_so(
    login: Login, profile: Callable[[str], object], tmp_path: Path
) -> None:
    end = tmp_path / "end"
    profile(f"while [ ! -e {end} ]; do sleep 0.1; done\n")
    async with frontend(await login.start("40%")) as page:
        cell = page.run("print('ran')")
        await cell.shows("Its job has begun, and runs the profile of its login shell.")
        end.touch()
        await cell.done()
        assert cell.outputs[-1] == "ran\n"


async def test_a_profile_that_prints_and_fails_is_no_hindrance(
    login: Login, profile: Callable[[str], object]
) -> None:
    profile("echo welcome; echo a warning >&2; false; nosuchcommand\ncd /nowhere; export SET=yes\n")
    async with frontend(await login.start("40%")) as page:
        cell = await page.run("import os; print(os.environ['SET'])").done()
        assert cell.outputs[-1] == "yes\n"


async def test_a_prologue_that_ends_the_job_in_good_order_is_named(login: Login) -> None:
    login.configure(prologue="exit")
    async with frontend(await login.start("40%")) as page:
        cell = await page.run("1").done()
    shown = " ".join("".join(cell.outputs).split())
    assert "ended with status 0. A line of its prologue has ended it, before the kernel was started." in shown


async def test_a_prologue_is_shell_and_sets_no_option_of_the_job(login: Login) -> None:
    login.configure(prologue="#SBATCH --array=0-3\n#SBATCH --exclusive\nexport SET=yes")
    async with frontend(await login.start("40%")) as page:
        cell = await page.run("import os; print(os.environ['SET'])").done()
        assert cell.outputs[-1] == "yes\n"
        [job] = login.jobs()
        assert "ArrayJobId" not in login.slurm.job(job)
        assert login.slurm.job(job)["OverSubscribe"] == "OK"


async def test_a_kernel_is_a_job_of_this_cluster_whatever_its_user_has_chosen_for_jobs(
    login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SBATCH_CLUSTERS", "SLURM_CLUSTERS"):
        monkeypatch.setenv(name, "elsewhere")
    async with frontend(await login.start("40%")) as page:
        cell = await page.run("print('ran')").done()
        assert cell.outputs[-1] == "ran\n"
