"""Kernels that may sleep on disk and were prepared: as those that start cold, but for the time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from gpu_pool.devices.activity import environment_of
from gpu_pool_provisioner.forked import ForkedProcess
from gpu_pool_provisioner.templates import templates
from support.fixtures import answers_within
from support.frontend import page_of
from support.jupyter_env import JupyterEnv, Managers, answer, eventually, is_running, kill, started_kernel
from support.prepared_kernels import (
    IS_PREPARED,
    WHY_NONE,
    Sleepers,
    criu_of_nobody,
    install,
    is_prepared,
    modules,
    until_prepared,
    was_prepared,
)
from support.warm_kernels import the_template

pytestmark = [
    pytest.mark.skipif(bool(WHY_NONE), reason=f"no kernel that may sleep can be started here: {WHY_NONE}"),
    pytest.mark.usefixtures("soon"),
]


@pytest.fixture
def sleepers(jupyter_env: JupyterEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sleepers:
    monkeypatch.setenv("PYTHONPATH", str(modules(jupyter_env)))
    return partial(install, jupyter_env, criu_of_nobody(tmp_path))


async def another(first: int) -> None:
    """Wait until another one is prepared than the one with this pid."""
    await eventually(lambda: any(each.is_ready and each.pid != first for each in templates().all()))


async def test_the_second_kernel_is_one_that_was_prepared_and_another_takes_its_place(
    sleepers: Sleepers, manager: Managers, jupyter_env: JupyterEnv
) -> None:
    name = sleepers()
    first = await until_prepared(manager(name))
    km = manager(name)
    assert await is_prepared(km)
    assert km.provisioner.pid == first.pid
    second = await the_template()
    assert second.is_ready
    await km.shutdown_kernel(now=True)
    assert not is_running(first.pid)
    assert is_running(second.pid)
    third = manager(name)
    assert await is_prepared(third)
    assert third.provisioner.pid == second.pid
    held = {lease.process.pid for lease in await jupyter_env.leases() if lease.process is not None}
    assert second.pid in held
    templates().end()
    await eventually_folders(jupyter_env, 2)


async def eventually_folders(env: JupyterEnv, count: int) -> None:
    """Wait until the program keeps something of so many kernels, those that run."""
    await eventually(lambda: len(list((env.folder / "asleep").iterdir())) == count)


async def test_a_kernel_that_is_restarted_is_one_that_was_prepared(
    sleepers: Sleepers, manager: Managers
) -> None:
    km = manager(sleepers())
    prepared = await until_prepared(km)
    await km.restart_kernel(now=True)
    assert await was_prepared(km)
    assert km.provisioner.pid == prepared.pid


async def test_of_two_kernels_at_once_one_was_prepared_and_the_other_starts_cold(
    sleepers: Sleepers, manager: Managers
) -> None:
    name = sleepers()
    prepared = await until_prepared(manager(name))
    both = [manager(name), manager(name)]
    await asyncio.gather(*(km.start_kernel() for km in both))
    assert sorted([await was_prepared(km) for km in both]) == [False, True]
    assert prepared.pid in [km.provisioner.pid for km in both]
    assert len(templates().all()) <= 1


@pytest.mark.parametrize("befalls", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.long
async def test_one_that_has_died_or_hangs_is_not_used_and_another_takes_its_place(
    sleepers: Sleepers,
    manager: Managers,
    jupyter_env: JupyterEnv,
    monkeypatch: pytest.MonkeyPatch,
    befalls: signal.Signals,
) -> None:
    name = sleepers()
    prepared = await until_prepared(manager(name))
    answers_within(monkeypatch, 0.2)
    os.kill(prepared.pid, befalls)
    assert not await is_prepared(manager(name))
    assert not is_running(prepared.pid)
    # What tells the user's other servers of a kernel is there for the two that run.
    assert len(list((jupyter_env.folder / "data" / "gpu-pool" / "held").iterdir())) == 2
    answers_within(monkeypatch, 20.0)
    await another(prepared.pid)
    assert await is_prepared(manager(name))


async def test_what_was_imported_and_has_changed_since_is_not_used(
    sleepers: Sleepers, manager: Managers, jupyter_env: JupyterEnv
) -> None:
    name = sleepers()
    prepared = await until_prepared(manager(name))
    (modules(jupyter_env) / "heavy.py").write_text("is_new = True")
    assert not await is_prepared(manager(name))
    await another(prepared.pid)
    km = manager(name)
    assert await is_prepared(km)
    assert await answer(km, "import heavy; print(heavy.is_new)") == "True\n"


@pytest.mark.long
async def test_another_environment_umask_or_folder_is_another_kernel_which_starts_cold(
    sleepers: Sleepers, manager: Managers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = sleepers()
    await until_prepared(manager(name))
    km = await started_kernel(manager(name), env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert not await was_prepared(km)
    assert await answer(km, "import os; print(os.environ['OMP_NUM_THREADS'])") == "1\n"
    (tmp_path / "heavy.py").touch()  # which the kernel would import
    km = await started_kernel(manager(name), cwd=str(tmp_path))
    assert not await was_prepared(km)
    before = os.umask(0o027)
    try:
        km = await started_kernel(manager(name))
    finally:
        os.umask(before)
    assert await answer(km, "import os; print(oct(os.umask(0)))") == "0o27\n"
    assert not await was_prepared(km)


async def test_a_folder_that_is_not_there_is_told_as_by_a_cold_start(
    sleepers: Sleepers, manager: Managers, tmp_path: Path
) -> None:
    name = sleepers()
    await until_prepared(manager(name))
    km = manager(name)
    with pytest.raises(FileNotFoundError):
        await km.start_kernel(cwd=str(tmp_path / "missing"))


def shown_by(pid: int) -> bytes:
    """Return what a process shows of its command and its variables."""
    return b"".join(Path(f"/proc/{pid}/{file}").read_bytes() for file in ("cmdline", "environ"))


async def test_it_has_nothing_of_the_kernel_before(
    sleepers: Sleepers, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_SECRET", "of the first")
    name = sleepers()
    km = await started_kernel(manager(name), env={**os.environ, "JPY_SESSION_NAME": "secret.ipynb"})
    prepared = await the_template()
    assert prepared.is_ready
    shows = shown_by(prepared.pid)
    assert b"PATH=" in shows
    assert b"secret" not in shows.lower()
    assert b"GPU_POOL_LEASE" not in shows
    monkeypatch.delenv("GPU_POOL_SECRET")
    km = manager(name)
    assert await is_prepared(km)
    shown = "b'of the f' + b'irst' in open('/proc/self/environ', 'rb').read()"
    code = f"import os; print(os.environ.get('GPU_POOL_SECRET'), {shown})"
    assert await answer(km, code) == "None False\n"


@pytest.mark.parametrize("config", [{"max_templates": 0}, {"preload": None}])
async def test_what_turns_templates_off_prepares_nothing(
    sleepers: Sleepers, manager: Managers, config: dict[str, object]
) -> None:
    name = sleepers(**config)
    for _ in range(2):
        assert not await is_prepared(manager(name))
    assert not templates().all()


async def test_kernels_that_never_sleep_are_forked_from_a_template_as_ever(
    sleepers: Sleepers, manager: Managers
) -> None:
    sleeper, never = sleepers(), sleepers(name="never", hibernate_after=0.0)
    first = await until_prepared(manager(sleeper))
    assert not await is_prepared(manager(never))
    await another(first.pid)
    km = manager(never)
    assert await is_prepared(km)
    assert isinstance(km.provisioner.process, ForkedProcess)
    assert len(templates().all()) == 2
    km = manager(sleeper)
    assert await is_prepared(km)
    assert km.provisioner.pid == first.pid


async def test_it_starts_with_the_server_where_templates_do(sleepers: Sleepers, manager: Managers) -> None:
    km = await started_kernel(manager(sleepers()))
    await km.shutdown_kernel(now=True)
    templates().end()
    template = await km.provisioner.start_template(km.format_kernel_cmd())
    assert template is not None
    assert await asyncio.to_thread(template.wait_until_ready, 60)
    km = manager(km.kernel_name)
    assert await is_prepared(km)
    assert km.provisioner.pid == template.pid


async def test_one_that_takes_more_memory_than_it_may_is_not_kept(
    sleepers: Sleepers, manager: Managers
) -> None:
    name = sleepers(max_template_mib=1)
    await manager(name).start_kernel()
    found = await the_template()
    assert "max_template_mib is 1" in found.refusal
    assert not is_running(found.pid)
    assert not await is_prepared(manager(name))


#: A server that says which process was prepared, and stays or ends.
SERVER = """
import asyncio
from jupyter_client.manager import AsyncKernelManager
from gpu_pool_provisioner import templates as module
async def main():
    module.STARTS_AFTER = module.PAUSES_WITHIN = 0.0
    first = AsyncKernelManager(kernel_name={name!r})
    await first.start_kernel()
    while not module.templates().all(): await asyncio.sleep(0.01)
    (prepared,) = module.templates().all()
    assert await asyncio.to_thread(prepared.wait_until_ready, 60)
    {then}
asyncio.run(main())
"""


SAYS = "print(prepared.pid, flush=True)"
STAYS = f"{SAYS}; await asyncio.Event().wait()"
#: So does a process that it has forked.
FORKS = f"import os, time; os.fork() or (os.close(1), time.sleep(600))\n    {STAYS}"
ENDS = f"await first.shutdown_kernel(now=True); {SAYS}"


@pytest.mark.parametrize("then", [STAYS, FORKS, ENDS], ids=["killed", "killed, with a fork left", "ended"])
async def test_it_ends_with_its_server_however_that_ends(
    sleepers: Sleepers, jupyter_env: JupyterEnv, tmp_path: Path, then: str
) -> None:
    program = tmp_path / "server.py"
    program.write_text(SERVER.format(name=sleepers(), then=then))
    server = await asyncio.create_subprocess_exec(
        sys.executable, program, stdout=subprocess.PIPE, start_new_session=True
    )
    assert server.stdout is not None
    try:
        pid = int(await asyncio.wait_for(server.stdout.readline(), 120))
        if then != ENDS:
            kill(server.pid)
        await server.wait()
        await eventually(lambda: not is_running(pid))
        await eventually_folders(jupyter_env, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have a folder of the test's own for temporary files, whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="gpu-pool-test-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        templates().end()


async def test_a_stranger_who_connects_in_its_place_is_sent_away(
    sleepers: Sleepers, manager: Managers, temporary: Path
) -> None:
    """Of the same user: nobody else enters the folder."""
    is_over = threading.Event()

    def connect(stranger: socket.socket) -> None:
        while not is_over.is_set():
            for place in temporary.glob("gpu-pool-prepared-*/socket"):
                with suppress(ConnectionRefusedError):  # it has its name a moment before anybody listens
                    return stranger.connect(str(place))
        raise TimeoutError("nobody listened")

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        connecting = asyncio.create_task(asyncio.to_thread(connect, stranger))
        name = sleepers()
        try:
            await until_prepared(manager(name))
        finally:
            is_over.set()
            await connecting
        assert stranger.recv(1) == b""
    assert await is_prepared(manager(name))


#: What a kernel sees of itself: all of it is as in one that starts cold.
LOOK = """
import ctypes, gc, io, json, os, resource, signal, socket, sys, threading, warnings
import psutil
def asked(what):
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(what, ctypes.byref(found), 0, 0, 0)
    return found.value
def opened(each):
    try:
        kind = os.readlink(f"/proc/self/fd/{each}").partition(":")[0]
        if kind == "socket":
            with socket.socket(fileno=os.dup(int(each))) as found:
                kind = f"socket {found.type}"
        return kind
    except OSError:
        return "closed"
def counted(found):
    # Of connections, and of what zmq and asyncio have for them, there are more and fewer from cell to cell;
    # IPython's history opens its files, and their folder, as it writes.
    few = {each for each in found if each in ("anon_inode", f"socket {socket.SOCK_STREAM}")}
    left_out = {each for each in found if each == "closed" or "profile_default" in each}
    return sorted([*few, *(each for each in found if each not in few | left_out)])
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
process = psutil.Process()
print(json.dumps({
    "variables": {n: v for n, v in os.environ.items() if not n.startswith("GPU_POOL_")},
    "names": sorted(os.environ),
    "folder": os.getcwd(), "argv": sys.argv[:-1], "orig_argv": sys.orig_argv[:-1],
    "path": sys.path, "meta_path": [str(type(each)) for each in sys.meta_path],
    "cmdline": [each for each in process.cmdline() if each][:-1],
    "name": process.name(), "file": len(sys.argv[-1]),
    "pids": [os.getpid(), os.getppid(), os.getpgid(0), os.getsid(0)],
    "processes": [[each.pid, each.name(), each.ppid()] for each in psutil.process_iter()],
    "parents": [each.pid for each in process.parents()],
    "threads": sorted(type(each).__name__ + each.name for each in threading.enumerate()),
    "main": [threading.main_thread().native_id, threading.main_thread().ident == threading.get_ident()],
    "number of threads": process.num_threads(),
    "opened": counted([*map(opened, os.listdir("/proc/self/fd"))]),
    "input": os.read(0, 10).decode(), "stdin": repr(sys.__stdin__), "stdout": repr(sys.__stdout__),
    "signals": [str(signal.getsignal(n)).partition(" at ")[0] for n in sorted(signal.valid_signals())],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "limits": [resource.getrlimit(n) for n in range(16)],
    "rights": {n: status[n] for n in status if n != "SigQ" and n.startswith(("Cap", "Sig", "Shd", "Uid",
               "Gid", "Groups", "Umask", "NoNewPrivs", "Seccomp", "Cpus", "Mems"))},
    "asked of the system": [asked(2), asked(37), asked(3), asked(39)],
    "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), process.ionice()[0]],
    "oom": open("/proc/self/oom_score_adj").read(), "cgroup": open("/proc/self/cgroup").read(),
    "collector": [gc.isenabled(), gc.get_freeze_count(), gc.get_threshold(), len(gc.callbacks)],
    "flags": str(sys.flags), "hooks": [str(sys.gettrace()), str(sys.getprofile())],
    "main module": [sys.modules["__main__"].__name__, sys.modules["__main__"].__dict__.get("__file__")],
    "packages": sorted(n for n in sys.modules if n.startswith("_gpu_pool") and n.count(".") == 0),
    "socket timeout": socket.getdefaulttimeout(), "recursion": sys.getrecursionlimit(),
    "ends with": str(process.environ().get("JPY_PARENT_PID")),
}))
"""


@pytest.mark.parametrize("language", ["C.UTF-8", None])
async def test_it_sees_what_a_cold_one_sees(
    sleepers: Sleepers,
    manager: Managers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    language: str | None,
) -> None:
    """Without a language as well, where Python itself sets a variable."""
    for name in ("LANG", "LC_ALL", "LC_CTYPE"):
        monkeypatch.delenv(name, raising=False)
    if language is not None:
        monkeypatch.setenv("LANG", language)
    monkeypatch.setenv("LANGUAGE", "de:en")
    name, said = sleepers(), []
    started = {"env": {**os.environ, "JPY_SESSION_NAME": "week1.ipynb"}, "cwd": str(tmp_path)}
    for is_warm in (False, True):
        async with page_of(manager(name), **started) as (km, page):
            assert (await page.run(IS_PREPARED).done()).outputs == [f"{is_warm}\n"]
            said.append("".join((await page.run(LOOK).done()).outputs))
        assert (await the_template()).is_ready
    cold, warm = said
    seen, expected = json.loads(warm), json.loads(cold)
    assert {each: (seen[each], expected[each]) for each in seen if seen[each] != expected[each]} == {}
    assert (seen["folder"], seen["variables"]["LANGUAGE"]) == (str(tmp_path), "de:en")
    # Others see its variables, too: the pool, for one.
    shown = environment_of(km.provisioner.pid)
    assert {b"GPU_POOL_LEASE", b"JPY_SESSION_NAME"} <= {each.partition(b"=")[0] for each in shown}
