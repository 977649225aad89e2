"""Kernels that nobody watches: their start waits for the slice, and their cells have their time whole."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.runapp import RunApp
from nbclient import NotebookClient
from traitlets.config import Configurable

from gpu_pool_client import EndReason, LeaseGone, PoolUnreachable, TimedOut
from gpu_pool_provisioner import wait_log
from gpu_pool_provisioner.launchers.base import NotReadyError
from gpu_pool_provisioner.session.view import SlicePhase
from support.jupyter_env import JupyterEnv, Managers, answer, eventually, started_kernel

Terms = Callable[..., None]


def install(jupyter_env: JupyterEnv, name: str = "two", **config: Any) -> str:
    """Install a kernel of which is found out whether anybody watches it."""
    return jupyter_env.install(name, unattended=None, **config)


def notebook(kernel: str, *sources: str) -> nbformat.NotebookNode:
    metadata = {"kernelspec": {"name": kernel, "display_name": kernel, "language": "python"}}
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


@pytest.mark.parametrize("terms", [{}, {"idle_limit": "1h"}], ids=["direct", "behind a proxy"])
async def test_no_cell_begins_before_its_kernel_runs_on_its_slice(
    jupyter_env: JupyterEnv, course: Terms, terms: dict[str, str]
) -> None:
    course(**terms)
    held = await jupyter_env.fill("1")
    began: list[bool] = []

    async def note(**_: Any) -> None:
        began.append(client.km.provisioner.driver.state.phase is SlicePhase.HELD)

    run_of = notebook(install(jupyter_env), "print('one')", "2")
    client = NotebookClient(run_of, timeout=60, on_cell_execute=note)
    run = asyncio.create_task(client.async_execute())
    await eventually(jupyter_env.has_queue)
    assert client.kc is None
    assert not began
    await jupyter_env.pool.release(held.id)
    await run
    assert began == [True, True]
    assert run_of.cells[0].outputs[0].text == "one\n"
    await eventually(jupyter_env.is_empty)


@pytest.mark.parametrize("limit", [0, 1])
async def test_a_wait_that_is_too_long_names_the_slice(jupyter_env: JupyterEnv, limit: float) -> None:
    await jupyter_env.fill("99%")
    kernel = install(jupyter_env, unattended_wait=limit)
    with pytest.raises(TimedOut) as refused:
        await NotebookClient(notebook(kernel, "1")).async_execute()
    text = " ".join(str(refused.value).split())
    waited = "waited for a GPU slice of 2 percent for 1s" if limit else "needs a GPU slice of 2 percent"
    assert f"This kernel {waited}" in text
    assert "No GPU slice of 2 percent is free now" in text
    assert "1 in use" in text
    assert not await jupyter_env.has_queue()
    assert [each.reason for each in await jupyter_env.pool.history()] == ["withdrawn"]


async def test_a_kernel_that_does_not_come_up_is_told_with_its_slice(
    jupyter_env: JupyterEnv, course: Terms
) -> None:
    course(idle_limit="1h")
    kernel = install(jupyter_env, argv=[sys.executable, "-c", "raise SystemExit(3)", "{connection_file}"])
    with pytest.raises(NotReadyError, match=r"with a GPU slice of 2% was not started\. The kernel ended"):
        await NotebookClient(notebook(kernel, "1")).async_execute()
    await eventually(jupyter_env.is_empty)


async def test_a_kernel_that_never_answers_is_ended_with_its_slice(
    jupyter_env: JupyterEnv, course: Terms, manager: Managers
) -> None:
    course(idle_limit="1h")
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)", "{connection_file}"]
    km = manager(install(jupyter_env, argv=sleeper, ready_timeout=1, unattended_wait=1))
    with pytest.raises(NotReadyError, match="a GPU slice of 2%"):
        await km.start_kernel()
    await eventually(jupyter_env.is_empty)
    assert not km.has_kernel


async def _nobody_waits(jupyter_env: JupyterEnv) -> bool:
    return not await jupyter_env.has_queue()


async def test_a_start_that_is_cancelled_or_shut_down_withdraws(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    await jupyter_env.fill("1")
    kernel = install(jupyter_env)
    cancelled = asyncio.create_task(manager(kernel).start_kernel())
    await eventually(jupyter_env.has_queue)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    # Whoever cancels is not held up by what the background loop then withdraws.
    await eventually(lambda: _nobody_waits(jupyter_env))
    km = manager(kernel)
    shut_down = asyncio.create_task(km.start_kernel())
    await eventually(jupyter_env.has_queue)
    await km.cleanup_resources()
    with pytest.raises(LeaseGone, match=r"wait for a GPU slice of 2 percent was given up"):
        await shut_down
    assert not await jupyter_env.has_queue()
    reasons = [each.reason for each in await jupyter_env.pool.history() if each.held_at is None]
    assert reasons == [EndReason.WITHDRAWN.value] * 2


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_a_program_that_waits(
    jupyter_env: JupyterEnv, tmp_path: Path, number: signal.Signals
) -> None:
    await jupyter_env.fill("1")
    path = tmp_path / "one.ipynb"
    nbformat.write(notebook(install(jupyter_env), "1"), path)
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "jupyter", "execute", str(path)), stderr=asyncio.subprocess.PIPE
    )
    assert program.stderr is not None
    said = b""
    while b"the queue" not in said:
        line = await program.stderr.readline()
        assert line, said
        said += line
    assert b"Waiting for a GPU slice of 2%. You are next in the queue" in said
    assert b"Interrupt the kernel" not in said
    program.send_signal(number)
    _, rest = await program.communicate()
    assert b"was given up" in rest
    assert await ended_as_waiter(jupyter_env) == "withdrawn"


async def ended_as_waiter(jupyter_env: JupyterEnv) -> str:
    """Return how the request in the queue ended."""
    await eventually(jupyter_env.has_queue, lambda seen: not seen)
    (lease,) = await jupyter_env.pool.history()
    return lease.reason


async def test_a_restart_keeps_the_slice_and_runs_when_it_is_over(
    jupyter_env: JupyterEnv, course: Terms, manager: Managers
) -> None:
    course(idle_limit="1h")
    km = await started_kernel(manager(install(jupyter_env)))
    before = await jupyter_env.only_lease()
    await km.restart_kernel()
    assert (await jupyter_env.only_lease()).id == before.id
    assert await answer(km, "print(6 * 7)") == "42\n"


async def test_who_watches_is_found_out_unless_it_is_said(jupyter_env: JupyterEnv, manager: Managers) -> None:
    await jupyter_env.fill("1")
    watched = manager(install(jupyter_env), parent=Configurable())
    await watched.start_kernel()  # waits in front of its first cell
    assert await jupyter_env.has_queue()
    ran = manager(install(jupyter_env, "Ran", unattended_wait=0), parent=RunApp())
    with pytest.raises(TimedOut):
        await ran.start_kernel()
    said = manager(jupyter_env.install("Said", unattended=True, unattended_wait=0), parent=Configurable())
    with pytest.raises(TimedOut):
        await said.start_kernel()


async def test_a_pool_that_is_away_is_told(jupyter_env: JupyterEnv, manager: Managers) -> None:
    kernel = install(jupyter_env, pool_url=f"unix:{jupyter_env.folder}/none.sock", outage_timeout=0)
    with pytest.raises(PoolUnreachable):
        await manager(kernel).start_kernel()


def test_what_is_said_is_heard_where_logging_is_not_set_up(
    jupyter_env: JupyterEnv, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = logging.Logger("silent")
    silent.addHandler(logging.NullHandler())
    assert not wait_log._is_heard(silent)
    heard = logging.Logger("heard")
    heard.parent = silent
    heard.addHandler(logging.StreamHandler())
    assert wait_log._is_heard(logging.LoggerAdapter(heard, {}))
    assert isinstance(AsyncKernelManager().log, (logging.Logger, logging.LoggerAdapter))
