"""What the kernels of a pod are forked from, and what is preloaded in it; with real kernels."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import pytest

from support.pools import eventually
from support.supervisors import children_of, command_of, supervised, until_gone

WITHIN = 60.0


async def test_what_is_preloaded_is_there_after_a_restart(tmp_path: Path) -> None:
    async with supervised(tmp_path, "--preload", "wave") as pod:
        control = await pod.connect()
        kernel = await pod.pid()
        assert await pod.value("'wave' in __import__('sys').modules") == "False"
        (first,) = set(children_of(pod.process.pid)) - {kernel}
        await eventually(lambda: first not in children_of(pod.process.pid))
        await control.restart(within=WITHIN)
        assert await pod.value("'wave' in __import__('sys').modules") == "True"


@pytest.mark.long
async def test_a_restart_while_another_template_becomes_ready(tmp_path: Path) -> None:
    """The one that was asked for the kernel has not answered by then, and must not be forgotten."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/slow.py").write_text("import os; open(os.environ['BEGUN'], 'w'); open(os.environ['GO'])")
    begun, go = tmp_path / "begun", tmp_path / "go"
    os.mkfifo(go)
    variables = {"PYTHONPATH": str(tmp_path / "lib"), "BEGUN": str(begun), "GO": str(go)}
    async with supervised(tmp_path, "--preload", "slow", **variables) as pod:
        control = await pod.connect()
        kernel = await pod.pid()
        (first,) = set(children_of(pod.process.pid)) - {kernel}
        await eventually(lambda: begun.exists())
        os.kill(first, signal.SIGSTOP)
        restart = asyncio.create_task(control.restart(within=WITHIN))
        await until_gone(kernel)
        go.write_text("")
        await restart
        assert await pod.value("1 + 1") == "2"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
async def test_a_restart_is_answered_whatever_happens_to_the_templates(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    async with supervised(tmp_path, "--preload", "wave") as pod:
        control = await pod.connect()
        kernel = await pod.pid()

        async def has_begun_to_import() -> bool:
            is_begun = any(b"wave" in command_of(each) for each in children_of(pod.process.pid))
            return is_begun or "without what is preloaded" in pod.log.read_text()

        for _ in range(10):
            await eventually(has_begun_to_import)
            struck = [each for each in children_of(pod.process.pid) if each != kernel]
            restart = asyncio.create_task(control.restart(within=WITHIN))
            if draw.random() < 0.5:
                await until_gone(kernel)
            for each in struck:
                if (number := draw.choice((0, 0, signal.SIGKILL, signal.SIGSTOP))) != 0:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each, number)
            await restart
            kernel = await pod.pid()
    assert "Traceback" not in pod.log.read_text()


@pytest.mark.long
async def test_modules_that_leave_no_process_to_fork_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/harm.py").write_text("import os; os.kill(os.getpid(), 11)")
    async with supervised(tmp_path, "--preload", "harm", PYTHONPATH=str(tmp_path / "lib")) as pod:
        control = await pod.connect()
        kernel = await pod.pid()
        (first,) = set(children_of(pod.process.pid)) - {kernel}
        await eventually(lambda: "without what is preloaded" in pod.log.read_text())
        await control.restart(within=WITHIN)
        assert first in children_of(pod.process.pid)
        assert await pod.value("1 + 1") == "2"


async def test_a_module_that_has_changed_is_imported_anew(tmp_path: Path) -> None:
    """As after ``pip install`` in a cell: who restarts gets what is installed now."""
    (tmp_path / "lib").mkdir()
    module = tmp_path / "lib/sitecustomize.py"
    module.write_text("version = 1")
    async with supervised(tmp_path, PYTHONPATH=str(tmp_path / "lib")) as pod:
        control = await pod.connect()
        assert await pod.value("__import__('sitecustomize').version") == "1"
        module.write_text("version = 2.0")

        async def has_new_one() -> bool:  # for a moment, files need not be looked at again
            await control.restart(within=WITHIN)
            return await pod.value("__import__('sitecustomize').version") == "2.0"

        await eventually(has_new_one)


@pytest.mark.long
async def test_a_template_that_was_ended_is_none_to_wait_for(tmp_path: Path) -> None:
    async with supervised(tmp_path) as pod:
        control = await pod.connect()
        (template,) = set(children_of(pod.process.pid)) - {await pod.pid()}
        os.kill(template, signal.SIGSTOP)
        await control.restart(within=WITHIN)
        assert await pod.value("1 + 1") == "2"
        await until_gone(template)
