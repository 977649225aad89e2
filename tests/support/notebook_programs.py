"""Programs that run notebooks, started as their users start them."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path

import nbformat

#: One job of jupyter-scheduler, from its making to its end, as the server's extension has it done.
_JOB = """
import sys, time
from traitlets.config import Config

def main():
    from jupyter_scheduler.environments import StaticEnvironmentManager
    from jupyter_scheduler.models import CreateJob
    from jupyter_scheduler.orm import create_tables
    from jupyter_scheduler.scheduler import Scheduler
    folder, notebook = sys.argv[1:]
    store = f"sqlite:///{folder}/jobs.sqlite"
    create_tables(store)
    manager = StaticEnvironmentManager()
    scheduler = Scheduler(root_dir=folder, environments_manager=manager, db_url=store, config=Config())
    asked = CreateJob(
        name="nightly", input_uri=notebook, runtime_environment_name="any", output_formats=["ipynb"]
    )
    job = scheduler.create_job(asked)
    while (found := scheduler.get_job(job, False)).status.value not in ("COMPLETED", "FAILED"):
        time.sleep(0.1)
    print(found.status.value, found.status_message)

if __name__ == "__main__":
    main()
"""


def notebook(kernel: str, *sources: str) -> nbformat.NotebookNode:
    """Return a notebook for a kernel, with a cell for each source."""
    metadata = {"kernelspec": {"name": kernel, "display_name": kernel, "language": "python"}}
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


def assignment(kernel: str) -> nbformat.NotebookNode:
    """Return a notebook of an nbgrader assignment: an answer, and a test of it that gives two points."""
    answer, test = notebook(kernel, "answer = 6 * 7", "assert answer == 42").cells
    flags = {"schema_version": 3, "locked": False, "task": False}
    answer.metadata["nbgrader"] = {
        **flags, "grade": False, "grade_id": "answer", "solution": True
    }  # fmt: skip
    test.metadata["nbgrader"] = {
        **flags, "grade": True, "grade_id": "test", "solution": False, "locked": True, "points": 2
    }  # fmt: skip
    result = notebook(kernel)
    result.cells = [answer, test]
    return result


async def started(*command: str, folder: Path, variables: Mapping[str, str]) -> Process:
    """Start a program of this Python; what it says is to be read."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *command),
        cwd=folder,
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def ended(program: Process) -> str:
    """Return what a program said, which has to end well."""
    out, _ = await program.communicate()
    assert program.returncode == 0, out.decode()
    return out.decode()


async def start_job(folder: Path, variables: Mapping[str, str]) -> Process:
    """Start a job of jupyter-scheduler, with the notebook one.ipynb."""
    # The scheduler starts processes of its own from this program's file.
    script = folder / "job.py"
    script.write_text(_JOB)
    return await started(str(script), str(folder), "one.ipynb", folder=folder, variables=variables)


def nbgrader(command: str, *words: str) -> Sequence[str]:
    """Return the command line of a subcommand of nbgrader."""
    return ("-c", "from nbgrader.apps.nbgraderapp import main; main()", command, *words)
