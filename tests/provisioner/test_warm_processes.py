"""Templates, their kernels and their server as processes: who ends with whom, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpu_pool_client import Process, _procfs
from gpu_pool_provisioner import templates as templates_module
from gpu_pool_provisioner.forked import ForkedProcess, adopting, wait_for_unwanted
from gpu_pool_provisioner.templates import Kind, TemplateProcess, Templates, TemplateSettings, templates
from support.fixtures import answers_within
from support.frontend import frontend
from support.jupyter_env import JupyterEnv, Managers, answer, eventually, is_running, kill
from support.warm_kernels import Spec, start, started_warm, the_template, until_ready

pytestmark = pytest.mark.usefixtures("soon")


@pytest.mark.long
async def test_the_end_of_its_template_does_not_concern_it(spec: Spec, manager: Managers) -> None:
    warm = await started_warm(spec, manager)
    (template,) = templates().all()
    kill(template.pid)
    await eventually(lambda: template.has_ended)
    assert await answer(warm, "print(6 * 7)") == "42\n"


#: A Jupyter server that starts a kernel, and once its template is ready does something else.
SERVER = """
import asyncio, concurrent.futures, multiprocessing, sys
from jupyter_client.manager import AsyncKernelManager
from gpu_pool_provisioner import templates as module
async def kind():
    manager = AsyncKernelManager(kernel_name={name!r})
    await manager.start_kernel()
    started = type(manager.provisioner.process).__name__
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=120)
    client.stop_channels()
    await manager.shutdown_kernel(now=True)
    return started
def kind_in_child():
    assert not module.templates().all()
    return asyncio.run(kind())
async def main():
    module.STARTS_AFTER = module.PAUSES_WITHIN = 0.0; module._ANSWERS_WITHIN = 20.0
    await kind()
    while not module.templates().all(): await asyncio.sleep(0.01)
    (template,) = module.templates().all()
    assert await asyncio.to_thread(template.wait_until_ready, 60)
    {then}
if __name__ == "__main__":
    asyncio.run(main())
"""


async def run_server(folder: Path, name: str, then: str) -> list[str]:
    """Return the kinds of kernels that a server prints."""
    program = folder / "server.py"
    program.write_text(SERVER.format(name=name, then=then))
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, program), stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        printed, _ = await asyncio.wait_for(server.communicate(), 120)
    finally:
        if server.returncode is None:
            server.kill()
            await server.wait()
    return [word for word in printed.decode().split() if word in ("Popen", "ForkedProcess")]


@pytest.mark.long
async def test_a_process_that_is_forked_from_a_server_leaves_its_templates_alone(
    tmp_path: Path, spec: Spec
) -> None:
    """As nbclient's users do who run many notebooks at once."""
    in_child = (
        "print(await kind())\n"
        "    context = multiprocessing.get_context('fork')\n"
        "    with concurrent.futures.ProcessPoolExecutor(1, context) as executor:\n"
        "        print(executor.submit(kind_in_child).result(60))\n"
        "    print(await kind())"
    )
    assert await run_server(tmp_path, spec(), in_child) == ["ForkedProcess", "Popen", "ForkedProcess"]


@pytest.mark.long
async def test_the_end_of_its_server_ends_it_and_the_template(tmp_path: Path, spec: Spec) -> None:
    name = spec()
    program = tmp_path / "server.py"
    program.write_text(
        "import asyncio, sys\n"
        "from jupyter_client.manager import AsyncKernelManager\n"
        "from gpu_pool_provisioner import templates as module\n"
        "async def main():\n"
        "    module.STARTS_AFTER = module.PAUSES_WITHIN = 0.0; module._ANSWERS_WITHIN = 20.0\n"
        f"    first = AsyncKernelManager(kernel_name={name!r})\n"
        "    await first.start_kernel()\n"
        "    while not module.templates().all(): await asyncio.sleep(0.01)\n"
        "    (template,) = module.templates().all()\n"
        "    assert await asyncio.to_thread(template.wait_until_ready, 60)\n"
        f"    second = AsyncKernelManager(kernel_name={name!r})\n"
        "    await second.start_kernel()\n"
        "    kind = type(second.provisioner.process).__name__\n"
        "    print(kind, second.provisioner.pid, template.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    server = await asyncio.create_subprocess_exec(
        sys.executable, program, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert server.stdout is not None
        kind, *pids = (await asyncio.wait_for(server.stdout.readline(), 120)).decode().split()
        assert kind == "ForkedProcess"
    finally:
        server.kill()
        await server.wait()
    await eventually(lambda: not any(is_running(int(pid)) for pid in pids))


async def test_a_template_that_is_stopped_while_it_imports_ends_with_its_server(
    tmp_path: Path, spec: Spec
) -> None:
    told = tmp_path / "pid"
    os.mkfifo(told)
    stopping = (
        "import os, signal\n"
        f"with open({str(told)!r}, 'w') as file: print(os.getpid(), file=file)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    name = spec("stopping", stopping=stopping)
    program = tmp_path / "server.py"
    program.write_text(SERVER.format(name=name, then="pass"))
    server = await asyncio.create_subprocess_exec(sys.executable, program, start_new_session=True)
    try:
        pid = int(await asyncio.wait_for(asyncio.to_thread(told.read_text), 120))

        async def is_stopped() -> bool:
            found = _procfs.stat(pid)
            return found is not None and found.state == b"T"

        await eventually(is_stopped)
    finally:
        server.kill()
        await server.wait()
    await eventually(lambda: not is_running(pid))


@pytest.mark.long
async def test_there_are_no_more_templates_than_allowed(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = jupyter_env.install("warm", preload=[], max_templates=1)
    first = await until_ready(manager(name))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert not await start(manager(name))
    await eventually(lambda: [each for each in templates().all() if each is not first] != [])
    assert len(templates().all()) == 1
    assert first.has_ended


@pytest.mark.long
async def test_an_idle_template_ends_and_the_next_kernel_brings_another(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    name = jupyter_env.install("warm", preload=[], template_idle_timeout=1)
    assert not await start(manager(name))
    first = await the_template()
    await eventually(lambda: first.has_ended)
    assert not await start(manager(name))
    await eventually(lambda: [each for each in templates().all() if each is not first] != [])


async def test_a_kernel_that_nobody_wants_any_more_ends_unseen(spec: Spec, manager: Managers) -> None:
    await started_warm(spec, manager)
    (template,) = templates().all()
    read, write = os.pipe()
    before = children()
    fork = asyncio.create_task(template.fork(["no", "command"], {}, None, [read, write, write]))
    await asyncio.sleep(0)
    fork.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fork
    await eventually(lambda: children() == before)
    os.close(read)
    os.close(write)
    assert not template.has_ended


def children() -> set[str]:
    """Return the pids of this process' children."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            found |= set((task / "children").read_text().split())
    return found


async def test_streams_of_a_kernel_that_starts_cold_after_all_are_not_left_open(
    spec: Spec, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = spec()
    template = await until_ready(manager(name))
    before = pipes()
    answers_within(monkeypatch, 0.2)
    os.kill(template.pid, signal.SIGSTOP)
    km = manager(name)
    assert not await start(km, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert len(pipes() - before) == 2
    await km.shutdown_kernel(now=True)
    assert pipes() <= before


def pipes() -> set[str]:
    """Return the pipes that this process has open."""
    opened = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder's own
            opened.add(str(descriptor.readlink()))
    return {each for each in opened if each.startswith("pipe:")}


def test_a_kernel_whose_manager_is_gone_is_waited_for_all_the_same() -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "600"], {})
    dropped = ForkedProcess(pid, ["sleep", "600"])
    assert dropped.poll() is None
    del dropped
    kill(pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    wait_for_unwanted()  # as before every start
    assert not Path(f"/proc/{pid}").exists()


#: What a cell may start in the background. Where it reads a line, its parent ends as the kernel is forked.
ORPHANS = {
    "new": "sleep 600 >/dev/null & echo $!",
    "older": "sleep 600 >/dev/null & echo $!; read line",
    "of its own session": "setsid sleep 600 >/dev/null & echo $!",
}


class Shell:
    """A shell that leads a session, as a kernel does, and has told the pid of what it has started."""

    def __init__(self, script: str) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert self._process.stdout is not None
        self.child = int(self._process.stdout.readline())

    def end(self) -> None:
        """Let it end."""
        self._process.communicate("\n")


@pytest.mark.parametrize("script", ORPHANS.values(), ids=ORPHANS)
def test_what_loses_its_parent_while_a_kernel_is_forked_is_waited_for(script: str) -> None:
    older = Shell(script) if "read" in script else None
    with adopting():
        shell = older or Shell(script)
        shell.end()
    kill(shell.child)
    os.waitid(os.P_PID, shell.child, os.WEXITED | os.WNOWAIT)  # it is a child of this process
    wait_for_unwanted()  # as before every start
    wait_for_unwanted(time.monotonic() + 3600)
    assert not Path(f"/proc/{shell.child}").exists()


@pytest.mark.parametrize("is_leader", [False, True])
def test_whoever_has_started_a_process_meanwhile_gets_its_exit_status(is_leader: bool) -> None:
    with adopting():
        process = subprocess.Popen(["/bin/sh", "-c", "exit 3"], start_new_session=is_leader)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    wait_for_unwanted()
    assert process.wait() == 3


def test_a_process_that_somebody_else_has_waited_for_is_sent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    process = ForkedProcess(pid, ["true"])
    os.waitpid(pid, 0)
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda *_: sent.append(1))
    process.kill()
    assert (sent, process.poll()) == ([], 0)


def test_where_no_thread_could_be_started_the_next_kernel_has_a_template_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = threading.Event()

    def make(kind: Kind, max_mib: int) -> TemplateProcess:
        begun.set()
        raise OSError("enough is seen")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    kind = Kind(Path("a key"), lambda told: [], {}, make)  # type: ignore[arg-type]
    found, settings = Templates(), TemplateSettings(("json",), 4, 1000, 10.0)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            found.find(kind, settings)
    assert found.find(kind, settings) is None
    assert begun.wait(60)


@pytest.mark.long
async def test_a_template_does_not_start_while_the_first_kernel_computes(
    spec: Spec, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates_module, "PAUSES_WITHIN", 600.0)
    name = spec()
    first = manager(name)
    assert not await start(first)
    if not templates_module._times_of_children():
        pytest.skip("this system does not tell how long processes wait for a processor")
    async with frontend(first) as page:
        code = "import os, time\nwhile os.times().user < 4: pass\nprint(time.time())"
        cell = await page.run(code).done()
        assert not templates().all()
    assert cell.status == "ok"
    await the_template()


#: Strikes a template at one point of the first fork that it is asked for.
STRIKING = """
import _gpu_pool_inkernel.template as main, os, signal
owner, name = {owner}, {name!r}
original, receive, template, asked = getattr(owner, name), main._receive, os.getpid(), []
def hear(control):
    heard = receive(control)
    asked.append(1)
    return heard
def struck(*arguments):
    if asked and {wanted}:
        {how}
    return original(*arguments)
main._receive = hear
setattr(owner, name, struck)
"""
#: Points of a fork: before it, between its two forks, before and after the pid is told, in the new kernel
#: before and after it has been asked for, and before it has bound its ports.
POINTS = {
    "heard": ("main.Template", "doubt", "True"),
    "before": ("main.Template", "fork", "True"),
    "between": ("os", "waitpid", "os.getpid() == template"),
    "pid": ("main", "send", "'pid' in arguments[1]"),
    "told": ("main.Template", "_next", "os.getpid() == template"),
    "begun": ("main.Template", "become_kernel", "True"),
    "unbound": ("main", "tell_when_bound", "True"),
}
BLOWS = {
    "killed": "os.kill(template, signal.SIGKILL)",
    "stopped": "os.kill(template, signal.SIGSTOP)",
    "out of memory": "if os.getpid() == template: raise MemoryError",
}


@pytest.mark.long
@pytest.mark.parametrize("blow", BLOWS)
@pytest.mark.parametrize("point", POINTS)
async def test_whatever_befalls_a_template_a_kernel_starts_and_nothing_is_left(
    spec: Spec,
    manager: Managers,
    jupyter_env: JupyterEnv,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    blow: str,
) -> None:
    owner, function, wanted = POINTS[point]
    how = BLOWS[blow]
    others = children()  # what other tests of this process have started
    name = spec("striking", striking=STRIKING.format(owner=owner, name=function, wanted=wanted, how=how))
    first = manager(name)
    await until_ready(first)
    answers_within(monkeypatch, 0.5, "_FORKS_WITHIN", "_RUNS_WITHIN")
    km = manager(name)
    await start(km)
    assert await answer(km, "print(6 * 7)") == "42\n"
    kernels = {first.provisioner.pid, km.provisioner.pid}
    assert {lease.process for lease in await jupyter_env.leases()} == {Process.of(pid) for pid in kernels}
    await km.restart_kernel()
    assert await answer(km, "print(6 * 7)") == "42\n"
    templates().end()

    async def are_alone() -> bool:
        wait_for_unwanted()  # as before every start
        return children() - others == {str(first.provisioner.pid), str(km.provisioner.pid)}

    await eventually(are_alone)


async def test_a_machine_that_forks_nothing_more_costs_no_template(
    spec: Spec, manager: Managers, caplog: pytest.LogCaptureFixture
) -> None:
    source = "import os\ndef fork(): raise BlockingIOError(11, 'no more processes')\nos.fork = fork\n"
    name = spec("forking", forking=source)
    template = await until_ready(manager(name))
    km = manager(name)
    with caplog.at_level(logging.INFO):
        assert not await start(km)
    assert "no more processes" in caplog.text
    assert template.is_ready
    assert not template.has_ended
