"""A supervisor that waits until it is told which kernel to start, with real kernels and sockets."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpu_pool_provisioner.launchers.supervised import KernelNotStarted, SupervisorAway, SupervisorConnection
from support.pools import eventually
from support.supervisors import KEY, PREPARED_KEY, Supervised, children_of, parent_of, supervised

TINY = (sys.executable, str(Path(__file__).parents[1] / "support/tiny_kernel.py"), "{connection_file}")
WITHIN = 60.0


def module(folder: Path, name: str, text: str) -> str:
    """Write a module; return the folder as ``PYTHONPATH``."""
    (folder / "modules").mkdir(exist_ok=True)
    (folder / "modules" / f"{name}.py").write_text(text)
    return str(folder / "modules")


async def ready(pod: Supervised) -> SupervisorConnection:
    """Connect once everything is imported."""
    control = await pod.connect(PREPARED_KEY)
    await eventually(lambda: control._ask({"verb": "state"}), lambda seen: not seen["importing"])
    return control


async def until_there(marker: Path) -> None:
    await eventually(lambda: asyncio.to_thread(marker.exists))


def environment_of(pid: int) -> set[bytes]:
    return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


async def test_it_waits_and_its_first_kernel_begins_with_what_is_preloaded(tmp_path: Path) -> None:
    path = module(
        tmp_path,
        "heavy",
        "import os\nowner = os.getpid()\n",
    )
    (tmp_path / "course").mkdir()
    async with supervised(tmp_path, "--preload=heavy", prepared=True, PYTHONPATH=path) as pod:
        control = await ready(pod)
        (template,) = children_of(pod.process.pid)
        told = pod.beginning(folder=str(tmp_path / "course"), MINE="is mine", GPU_POOL_MEMORY_MIB="655")
        await control.begin(told, within=WITHIN)
        kernel = await pod.pid()
        assert await pod.value("__import__('sys').modules['heavy'].owner") == str(template) != str(kernel)
        assert parent_of(kernel) == pod.process.pid
        assert await pod.value("__import__('os').getcwd()") == repr(str(tmp_path / "course"))
        assert await pod.value("__import__('os').environ['MINE']") == "'is mine'"
        assert {b"MINE=is mine", b"GPU_POOL_MEMORY_MIB=655"} <= environment_of(kernel)
        await control.restart(within=WITHIN)
        assert await pod.value("__import__('sys').modules['heavy'].owner") == str(template)
        assert await pod.value("__import__('os').environ['MINE']") == "'is mine'"


async def test_its_kernel_is_as_one_that_its_pod_had_started_with_these_variables(tmp_path: Path) -> None:
    seen = (
        "[__import__('sys').argv[1:-1], __import__('sys').path[0],"
        " __import__('os').getsid(0) == __import__('os').getpid(), sorted(set(__import__('os').environ)"
        " - {'JPY_PARENT_PID'}), __import__('signal').pthread_sigmask(0, []),"
        " [str(__import__('signal').getsignal(n)).split(' at ')[0] for n in (2, 10, 15, 17)],"
        " str(__import__('sys').flags)]"
    )
    ordinary, waiting = tmp_path / "ordinary", tmp_path / "prepared"
    ordinary.mkdir()
    waiting.mkdir()
    async with supervised(ordinary, MINE="1") as pod:
        expected = await pod.value(seen)
    async with supervised(waiting, prepared=True) as pod:
        await (await pod.connect(PREPARED_KEY)).begin(pod.beginning(MINE="1"), within=WITHIN)
        found = await pod.value(seen)
    assert found.replace(str(waiting), str(ordinary)) == expected


async def test_nothing_but_the_first_beginning_starts_a_kernel(tmp_path: Path) -> None:
    async with supervised(tmp_path, prepared=True) as pod:
        control = await pod.connect(PREPARED_KEY)
        with pytest.raises(KernelNotStarted, match="no kernel has begun yet"):
            await control.restart(within=WITHIN)
        await control.send_signal(signal.SIGKILL)  # to nobody
        for wrong in ("", "[]", "{}", '{"connection": {}, "argv": ["x"], "environment": {}}'):
            with pytest.raises(KernelNotStarted, match="that is not understood"):
                await control.begin(wrong, within=WITHIN)
        no_key = pod.beginning().replace(pod.connection["key"], "")
        with pytest.raises(KernelNotStarted, match="that is not understood"):
            await control.begin(no_key, within=WITHIN)
        await control.begin(pod.beginning(), within=WITHIN)
        before = await pod.pid()
        with pytest.raises(KernelNotStarted, match="a kernel has begun already"):
            await control.begin(pod.beginning(), within=WITHIN)
        assert await pod.pid() == before


async def test_who_has_another_key_begins_nothing(tmp_path: Path) -> None:
    async with supervised(tmp_path, prepared=True) as pod:
        await pod.connect(PREPARED_KEY)
        with pytest.raises(SupervisorAway, match="does not answer any more"):
            await SupervisorConnection.connect("127.0.0.1", KEY, port=pod.port, within=60)
        assert len(children_of(pod.process.pid)) == 1, "its template alone"


@asynccontextmanager
async def overheard(port: int) -> AsyncIterator[tuple[int, bytearray]]:
    """Pass connections on to a port; yield where, and all that is sent by it."""
    heard = bytearray()

    async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            heard.extend(data)
            writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(passed(reader, ours), passed(theirs, writer), return_exceptions=True)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], heard
    finally:
        server.close()


async def test_nobody_who_listens_learns_its_key_or_its_variables(tmp_path: Path) -> None:
    async with supervised(tmp_path, prepared=True) as pod, overheard(pod.port) as (port, heard):
        await pod.connect(PREPARED_KEY)
        control = await SupervisorConnection.connect("127.0.0.1", PREPARED_KEY, port=port, within=60)
        many = {f"MINE_{number}": f"token-{number}-" + "x" * 900 for number in range(100)}
        await control.begin(pod.beginning(**many), within=WITHIN)
        control.close()
        assert await pod.value("__import__('os').environ['MINE_99'][:9]") == "'token-99-'"
        assert len(heard) > 100_000
        (line,) = (each for each in bytes(heard).split(b"\n") if b'"begin"' in each)
        sealed = base64.b64decode(json.loads(line.partition(b" ")[2])["sealed"])
        assert len(sealed) > 90_000
        for secret in ("token-", "MINE_", pod.connection["key"], "ipykernel_launcher"):
            assert secret.encode() not in heard
            assert secret.encode() not in sealed


async def test_one_that_nobody_needs_ends_in_good_order(tmp_path: Path) -> None:
    async with supervised(tmp_path, "--prepared", "0.5", prepared=True) as pod:
        assert await pod.ended() == 0
        assert pod.log.read_text() == ""


async def test_one_that_is_to_end_before_its_kernel_ends(tmp_path: Path) -> None:
    async with supervised(tmp_path, prepared=True) as pod:
        await pod.connect(PREPARED_KEY)
        pod.process.terminate()
        assert await pod.ended() == 128 + signal.SIGTERM


async def test_a_kernel_that_is_started_otherwise_is_a_process(tmp_path: Path) -> None:
    (tmp_path / "course").mkdir()
    async with supervised(tmp_path, prepared=True, encrypts=False) as pod:
        control = await pod.connect(PREPARED_KEY)
        told = pod.beginning(*TINY, folder=str(tmp_path / "course"), MINE="1")
        await control.begin(told, within=WITHIN)
        (kernel,) = children_of(pod.process.pid)
        assert os.readlink(f"/proc/{kernel}/cwd") == str(tmp_path / "course")
        variables = environment_of(kernel)
        assert b"MINE=1" in variables
        assert not [each for each in variables if each.startswith(b"GPU_POOL_TEMPLATE")]


async def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    async with supervised(tmp_path, prepared=True) as pod:
        control = await pod.connect(PREPARED_KEY)
        with pytest.raises(KernelNotStarted, match="no-such-program"):
            await control.begin(pod.beginning("no-such-program"), within=WITHIN)


async def test_a_folder_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    async with supervised(tmp_path, prepared=True) as pod:
        control = await pod.connect(PREPARED_KEY)
        await control.begin(pod.beginning(folder=str(tmp_path / "nowhere")), within=WITHIN)
        assert await pod.value("__import__('os').getcwd()") == repr(str(tmp_path))


async def test_modules_that_leave_no_process_to_fork_are_left_out(tmp_path: Path) -> None:
    path = module(
        tmp_path,
        "busy",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
    )
    async with supervised(tmp_path, "--preload=busy", prepared=True, PYTHONPATH=path) as pod:
        await eventually(lambda: "restart without what is preloaded" in pod.log.read_text())
        control = await ready(pod)
        await control.begin(pod.beginning(), within=WITHIN)
        assert await pod.value("'busy' in __import__('sys').modules") == "False"
        kernel = await pod.pid()
        assert len(set(children_of(pod.process.pid)) - {kernel}) == 1, "it was forked"


async def test_a_kernel_does_not_wait_for_what_is_still_imported(tmp_path: Path) -> None:
    path = module(
        tmp_path,
        "slow",
        f"import time\nopen({str(tmp_path / 'importing')!r}, 'w').close()\ntime.sleep(600)\n",
    )
    async with supervised(tmp_path, "--preload=slow", prepared=True, PYTHONPATH=path) as pod:
        control = await pod.connect(PREPARED_KEY)
        await until_there(tmp_path / "importing")
        await control.begin(pod.beginning(), within=WITHIN)
        assert await pod.value("1 + 1") == "2"
