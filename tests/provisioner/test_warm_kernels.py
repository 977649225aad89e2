"""Kernels that are forked from a template are as those that are started."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

import pytest
from jupyter_client.ioloop import AsyncIOLoopKernelManager

from gpu_pool.devices.activity import environment_of
from gpu_pool_client import EndReason, Process
from gpu_pool_kernels.inkernel import commands
from gpu_pool_provisioner.templates import templates
from support.frontend import frontend
from support.jupyter_env import JupyterEnv, Managers, answer, eventually, kill, restarting_soon
from support.many_files import many_files
from support.warm_kernels import Spec, is_warm, start, started_warm, until_ready

pytestmark = pytest.mark.usefixtures("soon")


#: Variables that are set by a kernel itself, or by what it imports.
SET_BY_IPYKERNEL = {
    *(b"CLICOLOR", b"CLICOLOR_FORCE", b"FORCE_COLOR", b"GIT_PAGER", b"MPLBACKEND", b"PAGER", b"TERM"),
    *(b"PYDEVD_USE_FRAME_EVAL", b"LINES", b"COLUMNS"),
}


async def test_its_environment_is_seen_by_others(
    spec: Spec, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the pool, for one, which reads there what a kernel was told of its limits."""
    monkeypatch.setenv("LANGUAGE", "de:en")
    name = spec()
    await until_ready(manager(name))
    km = manager(name)
    assert await start(km)
    code = "import os; print(*(f'{n}={v}' for n, v in os.environ.items()), sep='\\0', end='')"
    own = set((await answer(km, code)).encode().split(b"\0"))
    seen = set(environment_of(km.provisioner.pid))
    assert names(own) >= {b"LANGUAGE", b"GPU_POOL_LEASE", b"CUDA_VISIBLE_DEVICES"}
    # What a program sets for itself is seen nowhere.
    assert names(own - seen) <= SET_BY_IPYKERNEL
    assert names(seen - own) - SET_BY_IPYKERNEL <= {b"GPU_POOL_TEMPLATE", b"GPU_POOL_NOTICE", b""}


def names(variables: set[bytes]) -> set[bytes]:
    return {each.partition(b"=")[0] for each in variables}


async def test_it_is_forked_also_where_its_server_has_many_files_open(spec: Spec, manager: Managers) -> None:
    with many_files():
        km = await started_warm(spec, manager)
        assert await answer(km, "print(6 * 7)") == "42\n"
        await km.shutdown_kernel()


async def test_its_lease_is_attached_to_its_own_process(
    spec: Spec, manager: Managers, jupyter_env: JupyterEnv
) -> None:
    warm = await started_warm(spec, manager)
    pid = warm.provisioner.pid
    (lease,) = [each for each in await jupyter_env.leases() if each.process == Process.of(pid)]
    await answer(warm)
    kill(pid)
    await eventually(lambda: warm.provisioner.poll(), lambda code: code is not None)
    assert await warm.provisioner.poll() == -signal.SIGKILL
    await warm.shutdown_kernel(now=True)
    assert (await jupyter_env.pool.get_lease(lease.id)).end_reason is EndReason.RELEASED


@pytest.mark.long
@pytest.mark.parametrize(("code", "status"), [("import os; os._exit(3)", 3), ("exit()", 0)])
async def test_its_exit_status_is_its_own(spec: Spec, manager: Managers, code: str, status: int) -> None:
    warm = await started_warm(spec, manager)
    async with frontend(warm) as page:
        page.run(code)
        await eventually(lambda: warm.provisioner.poll(), lambda code: code is not None)
    assert await warm.provisioner.poll() == status


@pytest.mark.long
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
async def test_what_was_written_is_there_when_it_has_ended_and_what_was_to_be_done_is_done(
    spec: Spec, manager: Managers, tmp_path: Path, warm: bool
) -> None:
    name = spec("keeping", keeping="")
    if warm:
        await until_ready(manager(name))
    km = manager(name)
    assert await start(km) is warm
    await answer(
        km,
        "import atexit, keeping, threading\n"
        f"def opened(name): return open('{tmp_path}/' + name, 'w')\n"
        "own = opened('own'); own.write('written')\n"
        "keeping.file = opened('kept'); keeping.file.write('written')\n"
        "keeping.raw = open(keeping.file.name + '-bytes', 'wb'); keeping.raw.write(b'written')\n"
        "atexit.register(lambda: opened('exit').write('written'))\n"
        "class Deleted:\n"
        "    def __del__(self, opened=opened): opened('deleted').write('written')\n"
        "deleted = Deleted()\n"
        "main = threading.main_thread()\n"
        "threading.Thread(target=lambda: (main.join(), opened('thread').write('written'))).start()\n",
    )
    await km.shutdown_kernel()
    written = [
        name
        for name in ("own", "kept", "kept-bytes", "exit", "deleted", "thread")
        if (tmp_path / name).read_text() == "written"
    ]
    assert written == ["own", "kept", "kept-bytes", "exit", "deleted", "thread"]


@pytest.mark.long
async def test_an_interrupt_reaches_its_cell_and_what_that_has_started(spec: Spec, manager: Managers) -> None:
    warm = await started_warm(spec, manager)
    async with frontend(warm) as page:
        cell = page.run("print('begun', flush=True)\nimport subprocess; subprocess.run(['sleep', '600'])")
        await cell.shows("begun")
        await warm.interrupt_kernel()
        assert "KeyboardInterrupt" in (await cell.done()).outputs[-1]


async def test_a_restart_is_warm_and_keeps_the_lease(
    spec: Spec, manager: Managers, jupyter_env: JupyterEnv
) -> None:
    warm = await started_warm(spec, manager)
    pid = warm.provisioner.pid
    await answer(warm)
    await warm.restart_kernel()
    assert is_warm(warm)
    assert warm.provisioner.pid != pid
    assert await answer(warm, "print(6 * 7)") == "42\n"
    assert Process.of(warm.provisioner.pid) in [each.process for each in await jupyter_env.leases()]


@pytest.mark.long
async def test_an_automatic_restart_is_warm(spec: Spec, manager: Managers) -> None:
    name = spec()
    await until_ready(manager(name))
    km = manager(name, AsyncIOLoopKernelManager, config=restarting_soon())
    assert await start(km)
    await answer(km)
    restarted = asyncio.Event()
    km.add_restart_callback(restarted.set)
    kill(pid := km.provisioner.pid)
    await eventually(lambda: restarted.is_set() and km.provisioner.pid not in (pid, None))
    assert await answer(km, "print(6 * 7)") == "42\n"
    assert is_warm(km)


@pytest.mark.long
async def test_the_debugger_works(spec: Spec, manager: Managers) -> None:
    warm = await started_warm(spec, manager)
    async with frontend(warm) as page:
        content = {"type": "request", "command": "initialize", "seq": 1, "arguments": {"adapterID": "test"}}
        reply = (await page.ask("debug_request", content, "control").done()).reply
        assert reply is not None
        assert reply["content"]["success"]


@pytest.mark.long
async def test_gpu_is_there(spec: Spec, manager: Managers) -> None:
    warm = await started_warm(spec, manager)
    async with frontend(warm) as page:
        cell = await page.run("%gpu").done()
        assert cell.status == "ok"
        assert "2%" in str([message["content"].get("data") for message in cell.heard])


@pytest.mark.long
async def test_plots_appear(spec: Spec, manager: Managers) -> None:
    pytest.importorskip("matplotlib")
    name = spec("matplotlib.pyplot")
    await until_ready(manager(name))
    km = manager(name)
    assert await start(km)
    async with frontend(km) as page:
        cell = await page.run("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()").done()
        assert any("image/png" in message["content"].get("data", {}) for message in cell.heard)


@pytest.mark.long
async def test_standard_streams_are_those_that_were_given(
    spec: Spec, manager: Managers, tmp_path: Path
) -> None:
    name = spec()
    await until_ready(manager(name))
    km = manager(name)
    with (tmp_path / "log").open("wb") as log:
        assert await start(km, stdout=log, stderr=subprocess.STDOUT)
    code = "import os; os.write(1, b'to one\\n'); os.write(2, b'to two\\n'); print(repr(os.read(0, 1)))"
    assert await answer(km, code) == "b''\n"
    assert {"to one", "to two"} <= set((tmp_path / "log").read_text().splitlines())


@pytest.mark.long
async def test_many_at_once_are_all_warm_and_all_different(spec: Spec, manager: Managers) -> None:
    name = spec()
    await until_ready(manager(name))
    kms = [manager(name) for _ in range(8)]
    assert all(await asyncio.gather(*(start(km) for km in kms)))
    printed = await asyncio.gather(*(answer(km, "import os; print(os.getpid())") for km in kms))
    assert [int(each) for each in printed] == [km.provisioner.pid for km in kms]


async def test_without_preload_nothing_is_forked(jupyter_env: JupyterEnv, manager: Managers) -> None:
    assert not await start(manager(jupyter_env.install("cold")))
    assert not templates().all()


async def test_one_of_an_installation_that_is_found_by_a_link(
    spec: Spec, manager: Managers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "linked"
    link.symlink_to(commands.LAUNCHER.parent)
    monkeypatch.setattr(commands, "LAUNCHER", link / commands.LAUNCHER.name)
    km = await started_warm(spec, manager)
    assert str(link) in await answer(km, "print(open('/proc/self/cmdline').read())")
