"""What happens to the cells of a kernel that waits for its slice."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from gpu_pool_client import EndReason, Process
from support.frontend import frontend, page_of
from support.jupyter_env import IPYKERNEL, SLEEPER, TINY, JupyterEnv, Managers, eventually, started_kernel


async def test_a_waiting_kernel_answers_and_is_alive(jupyter_env: JupyterEnv, manager: Managers) -> None:
    await jupyter_env.fill("1")
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        reply = (await page.ask("kernel_info_request", {}).done()).reply
    assert reply is not None
    assert reply["content"]["language_info"]["name"] == "python"
    assert await km.is_alive()
    assert km.provisioner.process is None


async def test_a_held_cell_shows_what_it_waits_for_and_then_runs(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    held = await jupyter_env.fill("1")
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        cell = page.run("import os; print(os.environ['GPU_POOL_SLICE'])")
        await cell.shows("Waiting for a GPU slice of 2%. You are next in the queue")
        assert cell.reply is None
        await jupyter_env.pool.release(held.id)
        assert (await cell.done()).outputs == ["2%\n"]
    lease = await jupyter_env.only_lease()
    assert lease.process is not None
    assert lease.process.pid == km.provisioner.pid


async def test_where_nobody_waited_nothing_is_said_of_a_wait(
    jupyter_env: JupyterEnv, manager: Managers, course: Callable[..., None]
) -> None:
    course(idle_limit="1h")  # so that its slice may be taken back, and its cells are held while it starts
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        cell = await page.run("print(3)").done()
    assert cell.outputs == ["3\n"]
    assert "display_data" not in cell.kinds()


async def test_a_kernels_use_of_the_machine_is_told_once_it_runs(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    held = await jupyter_env.fill("1")
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        reply = (await page.ask("usage_request", {}, "control").done()).reply
        assert reply is not None
        assert reply["content"]["reason"] == "the kernel waits for its GPU slice"
        cell = page.run("1")
        await jupyter_env.pool.release(held.id)
        await cell.done()
        reply = (await page.ask("usage_request", {}, "control").done()).reply
        assert reply is not None
        assert reply["content"]["pid"] == km.provisioner.pid


async def test_the_place_in_line_is_updated_in_place(jupyter_env: JupyterEnv, manager: Managers) -> None:
    await jupyter_env.fill("1")
    first, second = manager(jupyter_env.install("most", "90%")), manager(jupyter_env.install("half", "50%"))
    await first.start_kernel()
    await second.start_kernel()
    async with frontend(second) as page:
        cell = page.run("1")
        await cell.shows("number 2 in the queue")
        await first.shutdown_kernel()
        await cell.shows("next in the queue")
        assert cell.kinds().count("display_data") == 1
        assert len(cell.outputs) == 1


async def test_held_cells_run_in_order(jupyter_env: JupyterEnv, manager: Managers) -> None:
    held = await jupyter_env.fill("1")
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        cells = [page.run(code) for code in ("seen = [1]", "seen.append(2)", "print(seen)")]
        await cells[0].shows("Waiting")
        await jupyter_env.pool.release(held.id)
        assert (await cells[-1].done()).outputs == ["[1, 2]\n"]
        assert not cells[1].outputs


@pytest.mark.parametrize("mode", ["signal", "message"])
async def test_interrupt_gives_up_and_the_next_cell_queues_again(
    jupyter_env: JupyterEnv, manager: Managers, mode: str
) -> None:
    held = await jupyter_env.fill("1")
    async with page_of(manager(jupyter_env.install("two", interrupt_mode=mode))) as (km, page):
        first, behind = page.run("print('first')"), page.run("print('behind')")
        await first.shows("Waiting")
        await km.interrupt_kernel()
        (error,) = (await first.done()).outputs
        assert error.startswith("GpuSliceNotGranted: You stopped waiting for a GPU slice of 2%")
        assert (first.status, (await behind.done()).status) == ("error", "aborted")
        await eventually(jupyter_env.has_queue, lambda seen: not seen)
        again = page.run("print('again')")
        await again.shows("Waiting")
        await eventually(jupyter_env.has_queue)
        await jupyter_env.pool.release(held.id)
        assert (await again.done()).outputs == ["again\n"]


async def test_a_lease_that_is_taken_away_fails_the_cell(jupyter_env: JupyterEnv, manager: Managers) -> None:
    await jupyter_env.fill("1")
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        cell = page.run("print('never')")
        await cell.shows("Waiting")
        (waiting,) = (await jupyter_env.pool.status()).queue
        await jupyter_env.pool.release(waiting.id)
        assert (await cell.done()).status == "error"
        assert "GpuSliceNotGranted: This cell did not run." in cell.outputs[0]


async def test_a_kernel_that_never_answers_fails_the_cell_and_loses_its_slice(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    held = await jupyter_env.fill("1")
    async with page_of(manager(jupyter_env.install("silent", argv=SLEEPER, ready_timeout=1))) as (km, page):
        cell = page.run("print('never')")
        await cell.shows("Waiting")
        (lease,) = (await jupyter_env.pool.status()).queue
        await jupyter_env.pool.release(held.id)
        assert "did not become ready within 1 seconds" in (await cell.done()).outputs[0]
    await eventually(jupyter_env.is_empty)
    assert (await jupyter_env.pool.get_lease(lease.id)).end_reason is EndReason.NOT_READY
    assert not await km.is_alive()


@pytest.mark.parametrize("argv", [["/nowhere/kernel"], [sys.executable, "-c", "raise SystemExit(3)"]])
async def test_a_kernel_that_cannot_be_launched_fails_the_cell(
    jupyter_env: JupyterEnv, manager: Managers, argv: list[str]
) -> None:
    held = await jupyter_env.fill("1")
    async with page_of(manager(jupyter_env.install("broken", argv=argv))) as (km, page):
        cell = page.run("print('never')")
        await cell.shows("Waiting")
        await jupyter_env.pool.release(held.id)
        assert "This cell did not run. The kernel" in (await cell.done()).outputs[0]
    assert not await km.is_alive()
    await km.shutdown_kernel()
    await eventually(jupyter_env.is_empty)


async def test_a_kernel_of_another_language(jupyter_env: JupyterEnv, manager: Managers) -> None:
    held = await jupyter_env.fill("1")
    async with page_of(manager(jupyter_env.install("tiny", argv=TINY, language="tiny"))) as (_, page):
        waiting = (await page.ask("kernel_info_request", {}).done()).reply
        cell = page.run("hello")
        await cell.shows("Waiting")
        await jupyter_env.pool.release(held.id)
        assert (await cell.done()).outputs == ["HELLO on 2%"]
        running = (await page.ask("kernel_info_request", {}).done()).reply
    assert waiting is not None
    assert running is not None
    assert waiting["content"]["language_info"]["name"] == "tiny"
    assert running["content"]["language_info"]["version"] == "1"


async def test_of_a_slice_that_is_free_nothing_is_said(jupyter_env: JupyterEnv, manager: Managers) -> None:
    km = await started_kernel(manager(jupyter_env.install("two", argv=IPYKERNEL)))
    assert Process.of(km.provisioner.pid) is not None
    async with frontend(km) as page:
        done = await page.run("print(1)").done()
    assert "display_data" not in done.kinds()
    assert done.outputs == ["1\n"]
