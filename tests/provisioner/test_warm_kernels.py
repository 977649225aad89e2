"""Kernels that are forked from a template: as those that are started, and at the least doubt started."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.ioloop import AsyncIOLoopKernelManager
from jupyter_client.manager import AsyncKernelManager

from gpu_pool_client import EndReason, Process
from gpu_pool_provisioner import templates as templates_module
from gpu_pool_provisioner.templates import ForkedProcess, TemplateProcess, templates
from support.frontend import frontend
from support.jupyter_env import JupyterEnv, Managers, answer, eventually, is_running, kill, restarting_soon

#: What a program can see of its process, and what differs between any two kernels.
FACTS = """
import json, os, resource, signal, sys, threading
def opened():
    for name in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink("/proc/self/fd/" + name)
        except OSError:
            pass
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags),
    "main": sorted(vars(sys.modules["__main__"]).keys() - {"_", "__", "___"} - set(globals())),
    "environment": dict(os.environ), "cwd": os.getcwd(), "parent": os.getppid(),
    "cmdline": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)),
    "leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
    "handlers": {n: str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
    "mask": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT")},
    "status": [status[n] for n in ("Umask", "Uid", "Groups", "CapEff", "NoNewPrivs", "SigIgn")],
    "sockets": len([each for each in opened() if each.startswith("socket")]),
    "streams": [os.readlink("/proc/self/fd/%d" % n).partition("[")[0] for n in (0, 1, 2)],
    "threads": sorted(t.name.rstrip("0123456789-") for t in threading.enumerate()),
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
}
print(json.dumps(seen))
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let templates start at once, have their time on a busy machine, and end with the test."""
    monkeypatch.setattr(templates_module, "STARTS_AFTER", 0.0)
    monkeypatch.setattr(templates_module, "PAUSES_WITHIN", 0.0)
    monkeypatch.setattr(templates_module, "_ANSWERS_WITHIN", 20.0)
    yield
    templates().end()


@pytest.fixture
def spec(jupyter_env: JupyterEnv, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return what installs a kernelspec with modules to preload."""
    modules = jupyter_env.folder / "modules"
    modules.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setenv("IPYTHONDIR", str(jupyter_env.folder / "ipython"))

    def install(*preload: str, name: str = "warm", **sources: Any) -> str:
        for module, source in sources.items():
            (modules / f"{module}.py").write_text(source)
        return jupyter_env.install(name, preload=list(preload))

    return install


async def start(manager: AsyncKernelManager, **kwargs: Any) -> bool:
    """Start a kernel; return whether it is warm."""
    await manager.start_kernel(**kwargs)
    return is_warm(manager)


def is_warm(manager: AsyncKernelManager) -> bool:
    return isinstance(manager.provisioner.process, ForkedProcess)


async def the_template() -> TemplateProcess:
    """Return the only template once it is there and has imported everything, or has failed to."""

    async def is_there() -> bool:
        return bool(templates().all())

    await eventually(is_there)
    (template,) = templates().all()
    await asyncio.to_thread(template.wait_until_ready, 120)
    return template


async def until_ready(manager: AsyncKernelManager) -> TemplateProcess:
    """Start a kernel, which is cold, and return its template when it is ready."""
    assert not await start(manager)
    template = await the_template()
    assert template.is_ready, template.refusal
    return template


async def started_warm(spec: Callable[..., str], manager: Managers) -> AsyncKernelManager:
    """Return a warm kernel with nothing preloaded but its own modules."""
    name = spec()
    await until_ready(manager(name))
    km = manager(name)
    assert await start(km)
    return km


async def facts(manager: AsyncKernelManager) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await answer(manager, FACTS))
    return found


async def test_a_warm_kernel_is_as_a_cold_one(spec: Callable[..., str], manager: Managers) -> None:
    name = spec()
    cold, warm = manager(name), manager(name)
    await until_ready(cold)
    assert await start(warm)
    of_cold, of_warm = await facts(cold), await facts(warm)
    for each, km in ((of_cold, cold), (of_warm, warm)):
        for place in ("argv", "orig_argv", "cmdline"):
            each[place] = [word.replace(km.connection_file, "FILE") for word in each[place]]
        for variable in list(each["environment"]):
            if variable.startswith("GPU_POOL_"):
                del each["environment"][variable]
    # What only a template imports, to be ready for every kernel.
    of_warm["modules"] = of_cold["modules"] = None
    assert of_warm["environment"] == of_cold["environment"]
    assert of_warm == of_cold
    assert of_warm["parent"] == os.getpid()


@pytest.mark.long
async def test_what_is_preloaded_is_imported_and_not_in_the_namespace(
    spec: Callable[..., str], manager: Managers
) -> None:
    name = spec("large", large="import os\nwho = os.getpid()\n")
    await until_ready(manager(name))
    km = manager(name)
    assert await start(km)
    assert await answer(km, "print('large' in globals())") == "False\n"
    assert await answer(km, "import large, os; print(large.who == os.getpid())") == "False\n"


async def test_random_numbers_and_secrets_differ(spec: Callable[..., str], manager: Managers) -> None:
    name = spec("drawing", drawing="import multiprocessing, random\nown = random.Random()\n")
    await until_ready(manager(name))
    code = (
        "import drawing, multiprocessing, random, tempfile, uuid\n"
        "print(random.random(), drawing.own.random(), uuid.uuid4(), tempfile.mktemp(),\n"
        "      multiprocessing.current_process().authkey.hex())"
    )
    await two_draw_different(name, manager, code)


@pytest.mark.long
async def test_random_numbers_of_numpy_differ(spec: Callable[..., str], manager: Managers) -> None:
    pytest.importorskip("numpy")
    name = spec("drawing", drawing="import numpy\nown = numpy.random.default_rng()\n")
    await until_ready(manager(name))
    code = "import drawing, numpy; print(numpy.random.rand(), drawing.own.random())"
    await two_draw_different(name, manager, code)


async def two_draw_different(name: str, manager: Managers, code: str) -> None:
    """Fail unless everything that ``code`` prints differs between two warm kernels."""
    drawn = []
    for _ in range(2):
        km = manager(name)
        assert await start(km)
        drawn.append((await answer(km, code)).split())
    assert drawn[0]
    assert not set(drawn[0]) & set(drawn[1])


async def test_its_lease_is_attached_to_its_own_process(
    spec: Callable[..., str], manager: Managers, jupyter_env: JupyterEnv
) -> None:
    warm = await started_warm(spec, manager)
    pid = warm.provisioner.pid
    (lease,) = [each for each in await jupyter_env.leases() if each.process == Process.of(pid)]
    await answer(warm)
    kill(pid)

    async def has_ended() -> bool:
        return await warm.provisioner.poll() is not None

    await eventually(has_ended)
    assert await warm.provisioner.poll() == -signal.SIGKILL
    await warm.shutdown_kernel(now=True)
    assert (await jupyter_env.pool.get_lease(lease.id)).end_reason is EndReason.RELEASED


@pytest.mark.long
@pytest.mark.parametrize(("code", "status"), [("import os; os._exit(3)", 3), ("exit()", 0)])
async def test_its_exit_status_is_its_own(
    spec: Callable[..., str], manager: Managers, code: str, status: int
) -> None:
    warm = await started_warm(spec, manager)
    async with frontend(warm) as page:
        page.run(code)

        async def has_ended() -> bool:
            return await warm.provisioner.poll() is not None

        await eventually(has_ended)
    assert await warm.provisioner.poll() == status


@pytest.mark.long
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
async def test_what_was_written_is_there_when_it_has_ended_and_what_was_to_be_done_is_done(
    spec: Callable[..., str], manager: Managers, tmp_path: Path, warm: bool
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
async def test_an_interrupt_reaches_its_cell_and_what_that_has_started(
    spec: Callable[..., str], manager: Managers
) -> None:
    warm = await started_warm(spec, manager)
    async with frontend(warm) as page:
        cell = page.run("print('begun', flush=True)\nimport subprocess; subprocess.run(['sleep', '600'])")
        await cell.shows("begun")
        await warm.interrupt_kernel()
        assert "KeyboardInterrupt" in (await cell.done()).outputs[-1]


async def test_a_restart_is_warm_and_keeps_the_lease(
    spec: Callable[..., str], manager: Managers, jupyter_env: JupyterEnv
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
async def test_an_automatic_restart_is_warm(spec: Callable[..., str], manager: Managers) -> None:
    name = spec()
    await until_ready(manager(name))
    km = manager(name, AsyncIOLoopKernelManager, config=restarting_soon())
    assert await start(km)
    await answer(km)
    restarted = asyncio.Event()
    km.add_restart_callback(restarted.set)
    kill(pid := km.provisioner.pid)

    async def is_new() -> bool:
        return restarted.is_set() and km.provisioner.pid not in (pid, None)

    await eventually(is_new)
    assert await answer(km, "print(6 * 7)") == "42\n"
    assert is_warm(km)


@pytest.mark.long
async def test_the_debugger_works(spec: Callable[..., str], manager: Managers) -> None:
    warm = await started_warm(spec, manager)
    async with frontend(warm) as page:
        content = {"type": "request", "command": "initialize", "seq": 1, "arguments": {"adapterID": "test"}}
        reply = (await page.ask("debug_request", content, "control").done()).reply
        assert reply is not None
        assert reply["content"]["success"]


@pytest.mark.long
async def test_gpu_is_there(spec: Callable[..., str], manager: Managers) -> None:
    warm = await started_warm(spec, manager)
    async with frontend(warm) as page:
        cell = await page.run("%gpu").done()
        assert cell.status == "ok"
        assert "2%" in str([message["content"].get("data") for message in cell.heard])


@pytest.mark.long
async def test_plots_appear(spec: Callable[..., str], manager: Managers) -> None:
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
    spec: Callable[..., str], manager: Managers, tmp_path: Path
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
async def test_the_end_of_its_template_does_not_concern_it(
    spec: Callable[..., str], manager: Managers
) -> None:
    warm = await started_warm(spec, manager)
    (template,) = templates().all()
    kill(template.pid)

    async def has_ended() -> bool:
        return template.has_ended

    await eventually(has_ended)
    assert await answer(warm, "print(6 * 7)") == "42\n"


@pytest.mark.long
async def test_the_end_of_its_server_ends_it_and_the_template(
    tmp_path: Path, spec: Callable[..., str]
) -> None:
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

    async def have_ended() -> bool:
        return not any(is_running(int(pid)) for pid in pids)

    await eventually(have_ended)


@pytest.mark.long
async def test_a_template_does_not_start_while_the_first_kernel_computes(
    spec: Callable[..., str], manager: Managers, monkeypatch: pytest.MonkeyPatch
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


# -- In doubt -----------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise RuntimeError('not today')", "RuntimeError: not today"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import os; os._exit(3)", "its process ended"),
        (
            "from threading import *; Thread(target=Event().wait, name='busy', daemon=True).start()",
            "started threads: busy",
        ),
        ("import socket; kept = socket.socket()", "have opened socket:"),
        ("kept = open('/dev/null')", "have opened /dev/null"),
    ],
)
async def test_a_module_that_cannot_be_preloaded_is_told_once_and_kernels_start_cold(
    spec: Callable[..., str], manager: Managers, caplog: pytest.LogCaptureFixture, source: str, why: str
) -> None:
    name = spec("odd", odd=source)
    with caplog.at_level(logging.WARNING):
        assert not await start(manager(name))
        template = await the_template()
        assert not await start(manager(name))
        assert not await start(manager(name))
    assert why in template.refusal
    assert [why in message for message in caplog.messages if "start cold" in message] == [True]
    assert templates().all() == [template]


@pytest.mark.long
async def test_a_module_that_does_not_exist_is_named(
    spec: Callable[..., str], manager: Managers, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not await start(manager(spec("no_such_module")))
        await the_template()
    assert "No module named 'no_such_module'" in caplog.text


@pytest.mark.long
async def test_one_that_takes_too_much_memory_is_not_kept(
    jupyter_env: JupyterEnv, manager: Managers, caplog: pytest.LogCaptureFixture
) -> None:
    name = jupyter_env.install("warm", preload=[], max_template_mib=1)
    with caplog.at_level(logging.WARNING):
        assert not await start(manager(name))
        template = await the_template()
    assert "max_template_mib is 1" in template.refusal
    assert template.has_ended


@pytest.mark.long
async def test_an_upgraded_module_makes_a_new_template(
    spec: Callable[..., str], manager: Managers, jupyter_env: JupyterEnv, caplog: pytest.LogCaptureFixture
) -> None:
    name = spec("versioned", versioned="VERSION = 1\n")
    old = await until_ready(manager(name))
    (jupyter_env.folder / "modules" / "versioned.py").write_text("VERSION = 2\n")
    km = manager(name)
    with caplog.at_level(logging.INFO):
        assert not await start(km)
    assert "versioned.py has changed" in caplog.text
    assert await answer(km, "import versioned; print(versioned.VERSION)") == "2\n"

    async def has_ended() -> bool:
        return old.has_ended

    await eventually(has_ended)
    assert not await start(manager(name))
    new = await the_template()
    assert new.pid != old.pid
    later = manager(name)
    assert await start(later)
    assert await answer(later, "import versioned; print(versioned.VERSION)") == "2\n"


@pytest.mark.long
@pytest.mark.parametrize(("added", "warm"), [("notes.ipynb", True), ("another.py", False)])
async def test_a_module_that_is_added_makes_a_new_template_and_a_notebook_does_not(
    spec: Callable[..., str],
    manager: Managers,
    jupyter_env: JupyterEnv,
    caplog: pytest.LogCaptureFixture,
    added: str,
    warm: bool,
) -> None:
    name = spec("one", one="")
    await until_ready(manager(name))
    modules = jupyter_env.folder / "modules"
    (modules / added).write_text("")
    with caplog.at_level(logging.INFO):
        assert await start(manager(name)) is warm
    assert (f"what can be imported from {modules} has changed" in caplog.text) is not warm


@pytest.mark.long
async def test_a_file_beside_the_notebook_that_hides_a_preloaded_module(
    spec: Callable[..., str], manager: Managers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = spec("hidden", hidden="where = 'library'\n")
    await until_ready(manager(name))
    folder = tmp_path / "notebooks"
    (folder / "hidden").mkdir(parents=True)
    assert await start(manager(name), cwd=str(folder)), "a folder of data hides no module"
    (folder / "hidden.py").write_text("where = 'notebook'\n")
    km = manager(name)
    with caplog.at_level(logging.INFO):
        assert not await start(km, cwd=str(folder))
    assert "hidden.py in the notebook's folder" in caplog.text
    assert await start(manager(name)), "the template goes on"


@pytest.mark.long
async def test_a_variable_that_is_read_early_needs_another_template(
    spec: Callable[..., str], manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = spec("reading", reading="import os\nthreads = os.environ.get('OMP_NUM_THREADS')\n")
    first = await until_ready(manager(name))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    km = manager(name)
    assert not await start(km)
    assert await answer(km, "import reading; print(reading.threads)") == "3\n"

    async def are_two() -> bool:
        return len(templates().all()) == 2

    await eventually(are_two)
    (second,) = [each for each in templates().all() if each is not first]
    await asyncio.to_thread(second.wait_until_ready, 120)
    later = manager(name)
    assert await start(later)
    assert await answer(later, "import reading; print(reading.threads)") == "3\n"


@pytest.mark.long
async def test_there_are_no_more_templates_than_allowed(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = jupyter_env.install("warm", preload=[], max_templates=1)
    first = await until_ready(manager(name))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert not await start(manager(name))

    async def is_replaced() -> bool:
        return [each for each in templates().all() if each is not first] != []

    await eventually(is_replaced)
    assert len(templates().all()) == 1
    assert first.has_ended


@pytest.mark.long
async def test_an_idle_template_ends_and_the_next_kernel_brings_another(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    name = jupyter_env.install("warm", preload=[], template_idle_timeout=1)
    assert not await start(manager(name))
    first = await the_template()

    async def has_ended() -> bool:
        return first.has_ended

    await eventually(has_ended)
    assert not await start(manager(name))

    async def is_new() -> bool:
        return [each for each in templates().all() if each is not first] != []

    await eventually(is_new)


async def test_a_template_that_does_not_answer_costs_a_moment_and_no_kernel(
    spec: Callable[..., str],
    manager: Managers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = spec()
    template = await until_ready(manager(name))
    monkeypatch.setattr(templates_module, "_ANSWERS_WITHIN", 0.2)
    os.kill(template.pid, signal.SIGSTOP)
    km = manager(name)
    with caplog.at_level(logging.INFO):
        assert not await start(km)
    assert "did not answer" in caplog.text
    assert await answer(km, "print(6 * 7)") == "42\n"
    assert template.has_ended, "it is not asked again"


#: Lets a template do something between the question and its answer.
ANSWERING = """
import __main__, threading, time
receive = __main__._receive
def slow(control):
    heard = receive(control)
    end = time.monotonic() + 0.7
    while time.monotonic() < end:
        {do}
    return heard
__main__._receive = slow
"""
#: A file system on which looking at a file takes long.
LOOKING = """
import os, time
stat = os.stat
def slow(path, **options):
    if str(path).endswith("slow.py"):
        time.sleep(0.7)
    return stat(path, **options)
os.stat = slow
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "warm"),
    [(ANSWERING.format(do="pass"), True), (ANSWERING.format(do="time.sleep(1)"), False), (LOOKING, True)],
    ids=["busy", "asleep", "slow file system"],
)
async def test_a_template_has_the_time_that_a_busy_machine_takes(
    spec: Callable[..., str], manager: Managers, monkeypatch: pytest.MonkeyPatch, source: str, warm: bool
) -> None:
    name = spec("slow", slow=source)
    await until_ready(manager(name))
    monkeypatch.setattr(templates_module, "_ANSWERS_WITHIN", 0.2)
    km = manager(name)
    assert await start(km) is warm
    assert await answer(km, "print(6 * 7)") == "42\n"


async def test_a_kernel_that_nobody_wants_any_more_ends_unseen(
    spec: Callable[..., str], manager: Managers
) -> None:
    await started_warm(spec, manager)
    (template,) = templates().all()
    read, write = os.pipe()
    before = children()
    fork = asyncio.create_task(template.fork(["no", "command"], {}, None, [read, write, write]))
    await asyncio.sleep(0)
    fork.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fork

    async def are_gone() -> bool:
        return children() == before

    await eventually(are_gone)
    os.close(read)
    os.close(write)
    assert not template.has_ended


def children() -> set[str]:
    """Return the pids of this process' children."""
    return {
        pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
    }


@pytest.mark.long
async def test_many_at_once_are_all_warm_and_all_different(
    spec: Callable[..., str], manager: Managers
) -> None:
    name = spec()
    await until_ready(manager(name))
    kms = [manager(name) for _ in range(8)]
    assert all(await asyncio.gather(*(start(km) for km in kms)))
    printed = await asyncio.gather(*(answer(km, "import os; print(os.getpid())") for km in kms))
    assert [int(each) for each in printed] == [km.provisioner.pid for km in kms]


async def test_without_preload_nothing_is_forked(jupyter_env: JupyterEnv, manager: Managers) -> None:
    assert not await start(manager(jupyter_env.install("cold")))
    assert not templates().all()


@pytest.mark.long
async def test_a_kernel_of_another_language_starts_as_always(
    jupyter_env: JupyterEnv, manager: Managers, caplog: pytest.LogCaptureFixture
) -> None:
    from support.jupyter_env import TINY

    name = jupyter_env.install("tiny", argv=TINY, language="tiny", preload=["numpy"])
    with caplog.at_level(logging.INFO):
        assert not await start(manager(name))
    assert "its command is not one of an IPython kernel" in caplog.text
    assert not templates().all()
