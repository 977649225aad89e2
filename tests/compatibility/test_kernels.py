"""Kernels that have nothing of this project: of other environments, other Pythons, another language."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from support.frontend import page_of
from support.jupyter_env import IPYKERNEL, JupyterEnv, Managers, eventually

#: Interpreters whose environments are tried, as make matrix names them.
PYTHONS = os.environ.get("GPU_POOL_KERNEL_PYTHONS", sys.executable).split()
IRKERNEL = ("R", "--slave", "-e", "IRkernel::main()", "--args", "{connection_file}")


def environment(python: str, folder: Path) -> str:
    """Make an environment with IPython's kernel alone; return its interpreter."""
    made = folder / "env"
    subprocess.run([python, "-m", "venv", made], check=True)
    inside = str(made / "bin/python")
    pip = [inside, "-m", "pip", "install"]
    if shutil.which("uv"):  # an old Python brings a pip that no longer finds what is made for it
        pip = ["uv", "pip", "install", "--python", inside]
    subprocess.run([*pip, "--quiet", "ipykernel"], check=True)
    return inside


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("python", PYTHONS, ids=lambda python: Path(python).name)
async def test_a_kernel_of_an_environment_without_our_packages(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path, python: str
) -> None:
    inside = await asyncio.to_thread(environment, python, tmp_path)
    held = await jupyter_env.fill("1")
    async with page_of(manager(jupyter_env.install("theirs", argv=(inside, *IPYKERNEL[1:])))) as (km, page):
        cell = page.run("import sys; print(sys.prefix)")
        await cell.shows("Waiting for a GPU slice of 2%")
        await jupyter_env.pool.release(held.id)
        assert str(tmp_path / "env") in (await cell.done()).outputs[-1]
        assert "ModuleNotFoundError" in (await page.run("import gpu_pool_client").done()).outputs[-1]
        cell = page.run("get_ipython().run_line_magic('gpu', '')")
        assert "2%" in str([message["content"] for message in (await cell.done()).heard])
    await km.shutdown_kernel()
    await eventually(jupyter_env.is_empty)


def has_irkernel() -> bool:
    ask = ["R", "--slave", "-e", "library(IRkernel)"]
    return bool(shutil.which("R")) and not subprocess.run(ask, capture_output=True, check=False).returncode


@pytest.fixture
def r_kernel(jupyter_env: JupyterEnv) -> str:
    if not has_irkernel():
        pytest.skip("R with its package IRkernel is not installed")
    return jupyter_env.install("r", argv=IRKERNEL, language="R")


@pytest.mark.long
async def test_nbclient_runs_an_r_notebook_that_waits(jupyter_env: JupyterEnv, r_kernel: str) -> None:
    held = await jupyter_env.fill("1")
    cells = [nbformat.v4.new_code_cell(code) for code in ("cat(Sys.getenv('GPU_POOL_SLICE'))", "6 * 7")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    run = asyncio.create_task(NotebookClient(notebook, kernel_name=r_kernel).async_execute())
    await eventually(jupyter_env.has_queue)
    await jupyter_env.pool.release(held.id)
    await run
    assert [output.get("text") for output in cells[0].outputs] == ["2%"]
    assert "42" in cells[1].outputs[0].data["text/plain"]
    assert notebook.metadata.language_info.name == "R"
    await eventually(jupyter_env.is_empty)


@pytest.mark.long
async def test_papermill_gives_an_r_notebook_its_parameters(
    jupyter_env: JupyterEnv, r_kernel: str, tmp_path: Path
) -> None:
    source, result = tmp_path / "in.ipynb", tmp_path / "out.ipynb"
    kernel = {"name": r_kernel, "display_name": "R", "language": "R"}
    cells = [nbformat.v4.new_code_cell("cat(2 * x)")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), source)
    run = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "papermill", source, result, "-p", "x", "21", "--no-progress-bar"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await run.communicate()
    assert run.returncode == 0, errors
    assert nbformat.read(result, as_version=4).cells[-1].outputs[0].text == "42"
    await eventually(jupyter_env.is_empty)
