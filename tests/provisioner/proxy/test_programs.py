"""Programs that run notebooks, and Jupyter's server, on kernels that wait."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from support.jupyter_env import JupyterEnv, eventually
from support.server import Server, server

__all__ = ["server"]


async def test_nbclient_saves_a_clean_notebook(jupyter_env: JupyterEnv) -> None:
    held = await jupyter_env.fill("1")
    cells = [nbformat.v4.new_code_cell(code) for code in ("print('one')", "2")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    run = asyncio.create_task(
        NotebookClient(notebook, kernel_name=jupyter_env.install("two")).async_execute()
    )
    await eventually(lambda: "Waiting for a GPU slice" in str(cells[0].outputs))
    await jupyter_env.pool.release(held.id)
    await run
    assert [output.get("text") for output in cells[0].outputs] == ["one\n"]
    assert [output.data["text/plain"] for output in cells[1].outputs] == ["2"]
    assert notebook.metadata.language_info.name == "python"
    nbformat.validate(notebook)
    await eventually(jupyter_env.is_empty)


@pytest.mark.long
async def test_papermill_waits_and_passes_its_parameters(jupyter_env: JupyterEnv, tmp_path: Path) -> None:
    held = await jupyter_env.fill("1")
    source, result = tmp_path / "in.ipynb", tmp_path / "out.ipynb"
    kernel = {"name": jupyter_env.install("two"), "display_name": "two", "language": "python"}
    cells = [nbformat.v4.new_code_cell("print(2 * x)")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), source)
    options = ("-p", "x", "21", "--no-progress-bar")
    run = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "papermill", str(source), str(result), *options),
        stderr=asyncio.subprocess.PIPE,
    )
    await eventually(jupyter_env.has_queue)
    await jupyter_env.pool.release(held.id)
    _, errors = await run.communicate()
    assert run.returncode == 0, errors
    assert "42\n" in str(nbformat.read(result, as_version=4).cells[-1].outputs[0].text)
    await eventually(jupyter_env.is_empty)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
async def test_a_server_that_ends_while_kernels_wait_and_run_leaves_nothing(
    jupyter_env: JupyterEnv, server: Server, number: signal.Signals
) -> None:
    held = await jupyter_env.fill("98%")
    await server.open_notebook("one.ipynb", jupyter_env.install("two"))
    began = await server.open_notebook("two.ipynb", "two")
    kernel = json.loads(began.body)["kernel"]["id"]
    await server.ask("POST", f"api/kernels/{kernel}/restart", {})
    assert await jupyter_env.has_queue()
    server.process.send_signal(number)
    await server.ended()
    await jupyter_env.pool.release(held.id)
    await eventually(jupyter_env.is_empty)


@pytest.mark.long
async def test_interrupt_and_delete_by_rest_while_waiting(jupyter_env: JupyterEnv, server: Server) -> None:
    await jupyter_env.fill("1")
    session = json.loads((await server.open_notebook("one.ipynb", jupyter_env.install("two"))).body)
    assert await jupyter_env.has_queue()
    await server.ask("POST", f"api/kernels/{session['kernel']['id']}/interrupt", {})
    assert not await jupyter_env.has_queue()
    await server.ask("POST", f"api/kernels/{session['kernel']['id']}/restart", {})
    assert await jupyter_env.has_queue()
    await server.ask("DELETE", f"api/sessions/{session['id']}")
    assert not await jupyter_env.has_queue()
