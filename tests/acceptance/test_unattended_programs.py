"""The programs that run notebooks by themselves, on a full pool: each waits, and comes to its end.

jupyter-scheduler and nbgrader are installed for these tests alone, where the package index can be reached.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import nbformat
import pytest

from gpu_pool_client import Holder, LeaseState, parse_request
from gpu_pool_provisioner import pools
from support.fixtures import jupyter_env
from support.jupyter_env import JupyterEnv, eventually
from support.notebook_programs import assignment, ended, nbgrader, notebook, start_job, started
from support.service import ForkServer, serving
from support.suites import required

__all__ = ["jupyter_env"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

#: Seconds that nbgrader gives a cell in these tests: the wait before it is longer.
CELL = 8
#: Seconds that jupyter run gives each file.
JUPYTER_RUN = 10
STUDENTS = [f"student{number:02}" for number in range(30)]
NEEDED = ["nbgrader", "rapidfuzz", "jupyter-scheduler", "croniter", "fsspec", "pytz"]


@pytest.fixture(params=["embedded", "served"])
async def pool_env(
    request: pytest.FixtureRequest,
    jupyter_env: JupyterEnv,
    children: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[JupyterEnv]:
    """A Jupyter environment on this user's own pool, and on one of gpu-pool serve."""
    if request.param == "embedded":
        yield jupyter_env
        return
    async with serving(children, jupyter_env.folder / "serve") as service:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        jupyter_env.url = service.url
        yield jupyter_env
        await jupyter_env.pool.close()
        pools.open_pools.clear()


@pytest.fixture
def programs(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the variables with which programs that are not installed here are found."""
    assert request.config.cache is not None
    return {"PYTHONPATH": str(required(NEEDED, request.config.cache))}


def install(env: JupyterEnv, **config: object) -> str:
    return env.install("two", unattended=None, **config)


async def longer_than_a_cell(env: JupyterEnv, seconds: int = CELL) -> None:
    """Return once somebody has been in the queue for longer than a cell may take."""
    await eventually(env.has_queue)
    (waiting, *_) = (await env.pool.status()).queue
    await eventually(lambda: time.time() > waiting.requested_at + seconds)


async def test_a_file_that_jupyter_run_runs_has_its_ten_seconds_whole(
    pool_env: JupyterEnv, tmp_path: Path
) -> None:
    held = await pool_env.fill("1")
    (tmp_path / "train.py").write_text("print(6 * 7)\n")
    words = ("-m", "jupyter", "run", f"--kernel={install(pool_env)}", "train.py")
    run = await started(*words, folder=tmp_path, variables={})
    await longer_than_a_cell(pool_env, JUPYTER_RUN)
    await pool_env.pool.release(held.id)
    said = (await ended(run)).splitlines()
    assert "Waiting for a GPU slice of 2%. You are next in the queue" in said[0]
    assert said[-1] == "42"
    await eventually(pool_env.is_empty)


@pytest.mark.parametrize("program", ["papermill", "nbconvert", "nbclient"])
async def test_cells_have_their_time_whole_after_a_wait_that_is_longer(
    pool_env: JupyterEnv, tmp_path: Path, program: str
) -> None:
    held = await pool_env.fill("1")
    nbformat.write(notebook(install(pool_env), "print(6 * 7)"), tmp_path / "in.ipynb")
    timeout = f"--ExecutePreprocessor.timeout={CELL}"
    commands = {
        "papermill": ("papermill", "in.ipynb", "out.ipynb", "--execution-timeout", str(CELL)),
        "nbconvert": ("nbconvert", "--execute", "--to", "notebook", "--output", "out", timeout, "in.ipynb"),
        "nbclient": ("jupyter", "execute", "in.ipynb", f"--timeout={CELL}", "--output", "out"),
    }
    run = await started("-m", *commands[program], folder=tmp_path, variables={})
    await longer_than_a_cell(pool_env)
    await pool_env.pool.release(held.id)
    said = await ended(run)
    assert "Waiting for a GPU slice of 2%. You are next in the queue" in said
    assert nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[-1].outputs[0].text == "42\n"
    await eventually(pool_env.is_empty)


async def test_a_scheduled_job_waits_and_is_completed(
    pool_env: JupyterEnv, tmp_path: Path, programs: dict[str, str]
) -> None:
    held = await pool_env.fill("1")
    folder = tmp_path / "jobs"
    folder.mkdir()
    nbformat.write(notebook(install(pool_env), "print(6 * 7)"), folder / "one.ipynb")
    job = await start_job(folder, programs)
    await eventually(pool_env.has_queue)
    await pool_env.pool.release(held.id)
    assert "COMPLETED" in await ended(job)
    await eventually(pool_env.is_empty)


async def test_a_scheduled_job_that_gets_no_slice_says_so(
    jupyter_env: JupyterEnv, tmp_path: Path, programs: dict[str, str]
) -> None:
    await jupyter_env.fill("1")
    folder = tmp_path / "jobs"
    folder.mkdir()
    nbformat.write(notebook(install(jupyter_env, unattended_wait=0), "1"), folder / "one.ipynb")
    said = " ".join((await ended(await start_job(folder, programs))).split())
    assert "FAILED This kernel needs a GPU slice of 2 percent, and was not started." in said
    assert not await jupyter_env.has_queue()


async def submissions(folder: Path, kernel: str, variables: dict[str, str]) -> None:
    """Make a course of nbgrader's whose students have all submitted the same."""
    source = folder / "source" / "one" / "one.ipynb"
    source.parent.mkdir(parents=True)
    nbformat.write(assignment(kernel), source)
    (folder / "nbgrader_config.py").write_text(
        f"c.CourseDirectory.course_id = 'ml'\nc.Execute.timeout = {CELL}\n"
        f"c.Exchange.root = '{folder}/exchange'\n"
    )
    await ended(await started(*nbgrader("generate_assignment", "one"), folder=folder, variables=variables))
    for student in STUDENTS:
        target = folder / "submitted" / student / "one"
        target.mkdir(parents=True)
        shutil.copy(source, target)


def points(gradebook: Path) -> list[tuple[str, float]]:
    """Return the points of all whose submissions were graded into a gradebook."""
    question = (
        "SELECT submitted_assignment.student_id, sum(grade.auto_score) FROM grade "
        "JOIN submitted_notebook ON grade.notebook_id = submitted_notebook.id "
        "JOIN submitted_assignment ON submitted_notebook.assignment_id = submitted_assignment.id GROUP BY 1"
    )
    with closing(sqlite3.connect(gradebook)) as store:
        return store.execute(question).fetchall()


async def test_a_grading_run_of_thirty_goes_through_and_the_class_comes_first(
    pool_env: JupyterEnv, tmp_path: Path, programs: dict[str, str]
) -> None:
    folder = tmp_path / "course"
    folder.mkdir()
    variables = {**programs, "GPU_POOL_BATCH": "1"}
    await submissions(folder, install(pool_env), variables)
    held = [await pool_env.fill("50%"), await pool_env.fill("48%"), await pool_env.fill("2%")]
    # A gradebook is one file, which several graders do not share.
    books = {part: folder / f"gradebook{part}.db" for part in "012"}
    graders = []
    for part, book in books.items():
        shutil.copy(folder / "gradebook.db", book)
        words = nbgrader("autograde", "one", f"--student=student{part}*", f"--db=sqlite:///{book}")
        graders.append(await started(*words, folder=folder, variables=variables))

    async def all_wait() -> bool:
        return len((await pool_env.pool.status()).queue) == len(graders)

    await eventually(all_wait)
    await longer_than_a_cell(pool_env)
    # Whoever of the class comes now comes first, though all of the graders have been there for long.
    student = await pool_env.pool.request(parse_request("2%"), Holder("ada"), "student")
    assert student.position == 1
    await pool_env.pool.release(held.pop().id)
    assert (await pool_env.pool.get_lease(student.id)).state is LeaseState.HELD
    assert await all_wait()
    await asyncio.gather(*(pool_env.pool.release(each.id) for each in (student, *held)))
    await asyncio.gather(*(ended(each) for each in graders))
    found = sorted(each for book in books.values() for each in points(book))
    assert found == [(student, 2.0) for student in STUDENTS]
    await eventually(pool_env.is_empty)
    history = await pool_env.pool.history()
    assert len([each for each in history if each.kernel and each.held_at]) == len(STUDENTS)
