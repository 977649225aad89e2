"""At the least doubt a kernel starts cold, at once, with a line in the log."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest

from gpu_pool_provisioner.templates import templates
from support.fixtures import answers_within
from support.jupyter_env import TINY, JupyterEnv, Managers, answer, eventually
from support.warm_kernels import Spec, start, the_template, until_ready

pytestmark = pytest.mark.usefixtures("soon")


#: A thread that Python knows nothing of.
CLONING = """
import _thread
waiting = _thread.allocate_lock()
waiting.acquire()
_thread.start_new_thread(waiting.acquire, ())
"""
#: Loads a library from a file of another's name.
LOADING = """
import _ctypes, ctypes, pathlib, shutil
file = pathlib.Path(__file__).parent / "{name}"
file.parent.mkdir(exist_ok=True)
shutil.copy(_ctypes.__file__, file)
kept = ctypes.CDLL(str(file))
"""


#: Opens the file of a library that is loaded, as libffi does its own.
OPENING = """
import os
paths = [line.split()[-1] for line in open("/proc/self/maps") if "r-xp" in line and ".so" in line]
kept = os.open(paths[0], os.O_RDONLY)
"""


@pytest.mark.long
async def test_a_library_that_has_its_own_file_open_is_no_doubt(spec: Spec, manager: Managers) -> None:
    name = spec("reading", reading=OPENING)
    await until_ready(manager(name))
    km = manager(name)
    assert await start(km)
    assert await answer(km, "import os, reading; print(len(os.read(reading.kept, 4)))") == "4\n"


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
        ("import mmap; kept = mmap.mmap(-1, 4096)", "share with other processes"),
        ("import multiprocessing; kept = multiprocessing.Lock()", "share with other processes"),
        ("import os; os.spawnlp(os.P_NOWAIT, 'true', 'true')", "have started processes"),
        (CLONING, "started threads of their own"),
        (LOADING.format(name="libcuda.so.1"), "opened the GPU's driver"),
        (LOADING.format(name="dev/nvidia0"), "opened the GPU's driver"),
    ],
)
async def test_a_module_that_cannot_be_preloaded_is_told_once_and_kernels_start_cold(
    spec: Spec, manager: Managers, caplog: pytest.LogCaptureFixture, source: str, why: str
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
    spec: Spec, manager: Managers, caplog: pytest.LogCaptureFixture
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
    spec: Spec, manager: Managers, jupyter_env: JupyterEnv, caplog: pytest.LogCaptureFixture
) -> None:
    name = spec("versioned", versioned="VERSION = 1\n")
    old = await until_ready(manager(name))
    (jupyter_env.folder / "modules" / "versioned.py").write_text("VERSION = 2\n")
    km = manager(name)
    with caplog.at_level(logging.INFO):
        assert not await start(km)
    assert "versioned.py has changed" in caplog.text
    assert await answer(km, "import versioned; print(versioned.VERSION)") == "2\n"
    await eventually(lambda: old.has_ended)
    assert not await start(manager(name))
    new = await the_template()
    assert new.pid != old.pid
    later = manager(name)
    assert await start(later)
    assert await answer(later, "import versioned; print(versioned.VERSION)") == "2\n"


@pytest.mark.long
async def test_a_file_beside_the_notebook_that_hides_a_preloaded_module(
    spec: Spec, manager: Managers, tmp_path: Path, caplog: pytest.LogCaptureFixture
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
    spec: Spec, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = spec("reading", reading="import os\nthreads = os.environ.get('OMP_NUM_THREADS')\n")
    first = await until_ready(manager(name))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    km = manager(name)
    assert not await start(km)
    assert await answer(km, "import reading; print(reading.threads)") == "3\n"
    await eventually(lambda: len(templates().all()) == 2)
    (second,) = [each for each in templates().all() if each is not first]
    await asyncio.to_thread(second.wait_until_ready, 120)
    later = manager(name)
    assert await start(later)
    assert await answer(later, "import reading; print(reading.threads)") == "3\n"


async def test_a_template_that_does_not_answer_costs_a_moment_and_no_kernel(
    spec: Spec,
    manager: Managers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = spec()
    template = await until_ready(manager(name))
    answers_within(monkeypatch, 0.2)
    os.kill(template.pid, signal.SIGSTOP)
    km = manager(name)
    with caplog.at_level(logging.INFO):
        assert not await start(km)
    assert "did not answer" in caplog.text
    assert await answer(km, "print(6 * 7)") == "42\n"
    assert template.has_ended, "it is not asked again"


#: Lets a template do something between the question and its answer.
ANSWERING = """
import threading, time
import _gpu_pool_inkernel.template as template
receive = template._receive
def slow(control):
    heard = receive(control)
    end = time.monotonic() + 0.7
    while time.monotonic() < end:
        {do}
    return heard
template._receive = slow
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
    spec: Spec, manager: Managers, monkeypatch: pytest.MonkeyPatch, source: str, warm: bool
) -> None:
    name = spec("slow", slow=source)
    await until_ready(manager(name))
    answers_within(monkeypatch, 0.2)
    km = manager(name)
    assert await start(km) is warm
    assert await answer(km, "print(6 * 7)") == "42\n"


@pytest.mark.long
async def test_a_kernel_of_another_language_starts_as_always(
    jupyter_env: JupyterEnv, manager: Managers, caplog: pytest.LogCaptureFixture
) -> None:
    name = jupyter_env.install("tiny", argv=TINY, language="tiny", preload=["numpy"])
    with caplog.at_level(logging.INFO):
        assert not await start(manager(name))
    assert "its command is not one of an IPython kernel" in caplog.text
    assert not templates().all()


@pytest.mark.long
@pytest.mark.parametrize(("added", "warm"), [("notes.ipynb", True), ("another.py", False)])
async def test_a_module_that_is_added_makes_a_new_template_and_a_notebook_does_not(
    spec: Spec,
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
async def test_an_environment_that_is_too_long_to_be_shown(
    spec: Spec, manager: Managers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = spec()
    await until_ready(manager(name))
    monkeypatch.setenv("GPU_POOL_OWN", "-" * 20_000)
    km = manager(name)
    with caplog.at_level(logging.INFO):
        assert not await start(km)
    assert "too long to be shown" in caplog.text
    assert await answer(km, "import os; print(len(os.environ['GPU_POOL_OWN']))") == "20000\n"
