"""Classes of real kernels on a card for fewer: everybody gets a slice, and nothing of theirs is lost."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from jupyter_client.manager import AsyncKernelManager

from gpu_pool_client import LeaseState
from support.frontend import Cell, Frontend, frontend
from support.jupyter_env import JupyterEnv, Managers, eventually, kill, started_kernel
from support.server import Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

#: Seconds in which dozens of kernels do what they do, on two slow cores.
TIMEOUT = 200


@dataclass
class Student:
    """A kernel, and the page that is open on it."""

    kernel: AsyncKernelManager
    page: Frontend

    def run(self) -> Cell:
        return self.page.run("print(6 * 7)")

    async def leave(self) -> None:
        await self.kernel.shutdown_kernel(now=True)

    def crash(self) -> None:
        kill(self.kernel.provisioner.pid)


Enrol = Callable[[str, int], Awaitable[list[Student]]]


@pytest.fixture
async def enrol(manager: Managers) -> AsyncIterator[Enrol]:
    """Let so many students come at once, each with a kernel of the named kernelspec."""
    heartbeats = []
    async with AsyncExitStack() as pages:

        async def come(name: str) -> Student:
            kernel = await started_kernel(manager(name))
            page = await pages.enter_async_context(frontend(kernel))
            heartbeats.append(page.client.hb_channel)
            return Student(kernel, page)

        async def enrol(name: str, count: int) -> list[Student]:
            return await asyncio.gather(*(come(name) for _ in range(count)))

        yield enrol
        # Each takes up to a second to stop, and the pages would stop them one after the other.
        await asyncio.gather(*(asyncio.to_thread(heartbeat.stop) for heartbeat in heartbeats))


async def all_leave(students: list[Student]) -> None:
    await asyncio.gather(*(student.leave() for student in students))


async def run_to_the_end(cells: list[Cell]) -> None:
    """Wait until each has run and shows what it printed, and nothing of the wait."""
    await asyncio.gather(*(cell.done(TIMEOUT) for cell in cells))
    assert [cell.outputs for cell in cells] == [["42\n"]] * len(cells)


def place(cell: Cell) -> int | None:
    """Return the position in the queue that it shows."""
    found = re.search(r"You are (?:next|number (\d+)) in the queue", " ".join("".join(cell.outputs).split()))
    return int(found[1] or 1) if found else None


async def settled(cells: list[Cell], holders: int) -> None:
    """Wait until so many have run, and the others show their places, each its own."""

    async def all_positions_are_shown() -> bool:
        shown = [place(cell) for cell in cells if cell.reply is None]
        return sorted(each or 0 for each in shown) == list(range(1, len(cells) - holders + 1))

    await eventually(lambda: sum(cell.reply is not None for cell in cells) == holders, within=TIMEOUT)
    await eventually(all_positions_are_shown, within=TIMEOUT)


async def nothing_is_left(jupyter_env: JupyterEnv) -> None:
    """Wait until the pool is empty, and no process that uses it runs."""

    async def no_process_is_left() -> bool:
        found = psutil.process_iter(["environ"])
        return all((each.info["environ"] or {}).get("GPU_POOL_URL") != jupyter_env.url for each in found)

    await eventually(jupyter_env.is_empty)
    await eventually(no_process_is_left)


async def test_sixty_run_their_cells_on_a_card_for_fifty(jupyter_env: JupyterEnv, enrol: Enrol) -> None:
    students = await enrol(jupyter_env.install("two", ready_timeout=300), 60)
    cells = [student.run() for student in students]
    await settled(cells, holders=50)
    done = [student for student, cell in zip(students, cells, strict=True) if cell.reply]
    await all_leave(done[:10])
    await run_to_the_end(cells)
    await all_leave([student for student in students if student not in done[:10]])
    await nothing_is_left(jupyter_env)


async def test_nobody_is_lost_when_others_give_up_and_crash(jupyter_env: JupyterEnv, enrol: Enrol) -> None:
    students = await enrol(jupyter_env.install("four", "4%", ready_timeout=300), 60)
    cells = [student.run() for student in students]
    await settled(cells, holders=25)

    async def supervisor(student: Student, cell: Cell) -> None:
        await run_to_the_end([cell])
        await student.leave()

    async def crash(student: Student, cell: Cell) -> None:
        student.crash()

    async def close_the_notebook(student: Student, cell: Cell) -> None:
        await student.leave()

    async def interrupt_and_try_again(student: Student, cell: Cell) -> None:
        await student.kernel.interrupt_kernel()
        await cell.done(TIMEOUT)
        await run_to_the_end([student.run()])
        await student.leave()

    dice = random.Random(20260901)
    run = [number for number, cell in enumerate(cells) if cell.reply]
    wait = [number for number, cell in enumerate(cells) if not cell.reply]
    fates = dict.fromkeys(range(60), supervisor)
    fates.update(dict.fromkeys(dice.sample(run, 8), crash))
    give_up = dice.sample(wait, len(wait) // 2)
    fates.update({number: dice.choice([close_the_notebook, interrupt_and_try_again]) for number in give_up})
    order = dice.sample(range(60), 60)
    await asyncio.gather(*(fates[number](students[number], cells[number]) for number in order))
    await nothing_is_left(jupyter_env)


async def test_who_waits_gets_what_a_killed_server_held(jupyter_env: JupyterEnv, enrol: Enrol) -> None:
    kernel = jupyter_env.install("four", "4%", ready_timeout=300)
    server = Server(jupyter_env)
    try:
        await eventually(server.started)
        await asyncio.gather(*(server.open_notebook(f"{number}.ipynb", kernel) for number in range(30)))
        assert len((await jupyter_env.pool.status()).queue) == 5
        students = await enrol(kernel, 20)
        cells = [student.run() for student in students]
        await asyncio.gather(*(cell.shows("in the queue") for cell in cells))
    finally:
        server.process.kill()
    await server.ended()
    await run_to_the_end(cells)

    async def only_they_are_left() -> bool:
        status = await jupyter_env.pool.status()
        return len(status.leases) == 20 and not status.queue

    await eventually(only_they_are_left)
    await all_leave(students)
    await nothing_is_left(jupyter_env)


async def test_thirty_lend_their_slices_to_thirty_others_and_find_their_variables(
    jupyter_env: JupyterEnv, enrol: Enrol, tmp_path: Path
) -> None:
    (tmp_path / "config").mkdir()
    settings = {"PoolSettings": {"default_course": {"idle_limit": "1s"}}}
    (tmp_path / "config" / "gpu_pool_config.json").write_text(json.dumps(settings))
    kernel = jupyter_env.install("three", "3%", ready_timeout=300)
    first = await enrol(kernel, 30)
    cells = [student.page.run(f"kept = {number}") for number, student in enumerate(first)]
    await asyncio.gather(*(cell.done(TIMEOUT) for cell in cells))
    await eventually(
        jupyter_env.leases,
        lambda leases: {lease.state for lease in leases} == {LeaseState.PARKED},
        within=TIMEOUT,
    )

    assert (await jupyter_env.fill("10%")).state is LeaseState.HELD
    second, bell = await enrol(kernel, 30), tmp_path / "bell"
    work = f"import os, time; print('at work')\nwhile not os.path.exists({str(bell)!r}): time.sleep(0.1)"
    cells = [student.page.run(work) for student in second]
    await asyncio.gather(*(cell.shows("at work") for cell in cells))

    cells = [student.page.run("print(kept)") for student in first]
    await asyncio.gather(*(cell.shows("its variables are kept. Waiting for a GPU slice") for cell in cells))
    assert not any(cell.reply for cell in cells)
    await all_leave(second[:15])
    bell.touch()
    await asyncio.gather(*(cell.done(TIMEOUT) for cell in cells))
    assert [cell.outputs for cell in cells] == [[f"{number}\n"] for number in range(30)]
    await all_leave([*first, *second[15:]])
