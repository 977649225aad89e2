"""The main process of a kernel's pod with kernels, Pythons and environments that are not the usual ones."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from support.other_environment import without_our_packages
from support.supervisors import (
    children_of,
    supervised,
)

TINY = (sys.executable, str(Path(__file__).parents[1] / "support/tiny_kernel.py"), "{connection_file}")
WITHIN = 60.0


async def test_a_kernel_that_is_not_python_is_started_as_a_process(tmp_path: Path) -> None:
    script = tmp_path / "kernel.sh"
    script.write_text(f"#!/bin/sh\nexec {TINY[0]} {TINY[1]} $1\n")
    async with supervised(tmp_path, argv=("sh", str(script), "{connection_file}"), encrypts=False) as pod:
        control = await pod.connect()
        assert (await pod.asked("hello"))["status"] == "ok"
        (before,) = children_of(pod.process.pid)
        await control.restart(within=WITHIN)
        assert (await pod.asked("hello"))["status"] == "ok"
        (after,) = children_of(pod.process.pid)
        assert before != after
        os.kill(after, signal.SIGKILL)
        assert await control.exited() == -signal.SIGKILL


async def test_a_kernel_with_more_variables_than_one_message_can_have_is_started_as_a_process(
    tmp_path: Path,
) -> None:
    variables = {f"MANY_{number}": "x" * 100_000 for number in range(4)}
    async with supervised(tmp_path, **variables) as pod:
        control = await pod.connect()
        for _ in range(2):
            assert await pod.value("len(__import__('os').environ['MANY_3'])") == "100000"
            await control.restart(within=WITHIN)


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    async with supervised(tmp_path, argv=("no-such-program",)) as pod:
        assert await pod.ended() == 127
        assert "no-such-program could not be started" in pod.log.read_text()


async def test_an_image_without_ipykernel_says_so(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    async with supervised(tmp_path, python=str(tmp_path / "env/bin/python3")) as pod:
        assert await pod.ended() == 1
        assert "No module named" in pod.log.read_text()


async def test_an_environment_without_our_packages(tmp_path: Path) -> None:
    async with supervised(tmp_path, python=without_our_packages(tmp_path / "env")) as pod:
        control = await pod.connect()
        for _ in range(2):
            assert await pod.value("__import__('sys').prefix") == repr(str(tmp_path / "env"))
            assert await pod.value("get_ipython().find_line_magic('gpu') is not None") == "True"
            await control.restart(within=WITHIN)


def old_pythons() -> list[str]:
    """Return those before 3.10 on the PATH that are not mere placeholders."""
    found = filter(None, (shutil.which(f"python3.{minor}") for minor in range(7, 10)))
    said = (
        subprocess.run([each, "-c", "import sys; print(sys.executable)"], capture_output=True)
        for each in found
    )
    return [each.stdout.decode().strip() for each in said if each.returncode == 0]


async def test_an_old_python_supervises(tmp_path: Path) -> None:
    pythons = old_pythons() or pytest.skip("no Python from 3.7 to 3.9 on the PATH")
    argv = ("sh", "-c", "exec $0 $1 $2", *TINY)
    async with supervised(tmp_path, python=pythons[0], argv=argv, encrypts=False) as pod:
        control = await pod.connect()
        for _ in range(2):
            assert (await pod.asked("hello"))["status"] == "ok"
            await control.restart(within=WITHIN)
        pod.process.terminate()
        assert await pod.ended() == 128 + signal.SIGTERM
