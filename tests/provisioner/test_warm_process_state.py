"""What a fork copies of its process: the table in the docs is the list of what is compared here."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Final

import pytest
from jupyter_client.manager import AsyncKernelManager

from support.jupyter_env import Managers, answer
from support.warm_kernels import Spec, start, the_template, until_ready

pytestmark = pytest.mark.usefixtures("soon")

PAGE: Final = Path(__file__).parents[2] / "docs/explanation/templates.md"
_ROW: Final = re.compile(r"\| (?P<what>.+) \| \*\*(?P<done>as new|drawn anew|the template's|cold)\*\*.* \|")


def rows(*done: str) -> list[str]:
    """Return what the page lists of which this is done."""
    table = PAGE.read_text().partition("## What a fork copies")[2].partition("\n## ")[0]
    found = [_ROW.fullmatch(line) for line in table.splitlines() if line.startswith("|")][2:]
    assert all(found), "a row of the page does not say what is done"
    return [row["what"] for row in found if row and row["done"] in done]


#: What a program can see of its process, and does not differ between any two kernels.
FACTS = """
import ctypes, json, os, resource, signal, sys, threading, time
def opened():
    for name in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink("/proc/self/fd/" + name)
        except OSError:
            pass
def read(name):
    return open("/proc/self/" + name).read()
def asked(what):
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(what, ctypes.byref(found), 0, 0, 0)
    return found.value
timers = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
status = dict(line.split(":", 1) for line in read("status").splitlines())
seen = {
    "command line, arguments, `sys.path` and flags": [
        sys.argv, sys.orig_argv, sys.path, str(sys.flags), read("cmdline").rstrip(chr(0)).split(chr(0)),
        sorted(vars(sys.modules["__main__"]).keys() - {"_", "__", "___"} - set(globals()))],
    "name in `ps` and `/proc/PID/comm`": read("comm"),
    "environment, also in `/proc/PID/environ`": dict(os.environ),
    "working directory": os.getcwd(),
    "parent": os.getppid(),
    "process group and session": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
    "signal handlers, mask and pending signals": [
        {n: str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
        [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())], list(signal.sigpending()),
        [status[n] for n in ("SigIgn", "SigPnd", "ShdPnd")]],
    "user, groups, umask, capabilities": [status[n] for n in (
        "Umask", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")],
    "limits, processors, priority, scheduler, cgroup": [
        {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT")},
        sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0),
        read("oom_score_adj"), read("cgroup")],
    "standard streams and open files": [
        [os.readlink("/proc/self/fd/%d" % n).partition("[")[0] for n in (0, 1, 2)],
        len([each for each in opened() if each.startswith("socket")])],
    "threads": sorted(t.name.rstrip("0123456789-") for t in threading.enumerate()),
    "timers and alarms": [[signal.getitimer(each) for each in timers], read("timers")],
    "signal at its parent's end, adopting of orphans": [asked(2), asked(37)],
    "locked memory": status["VmLck"].split(),
    "used processor time": time.process_time() < 60,
}
print(json.dumps(seen))
"""


async def facts(manager: AsyncKernelManager) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await answer(manager, FACTS))
    command = found["command line, arguments, `sys.path` and flags"]
    name = Path(manager.connection_file).name  # behind the proxy each lies in a folder of its own
    for words in (command[0], command[1], command[4]):
        words[:] = ["FILE" if Path(word).name == name else word for word in words]
    environment = found["environment, also in `/proc/PID/environ`"]
    for variable in list(environment):
        if variable.startswith("GPU_POOL_"):
            del environment[variable]
    return found


async def test_a_warm_kernel_is_as_a_cold_one(spec: Spec, manager: Managers) -> None:
    name = spec()
    cold, warm = manager(name), manager(name)
    await until_ready(cold)
    assert await start(warm)
    of_cold, of_warm = await facts(cold), await facts(warm)
    assert list(of_warm) == rows("as new")
    assert of_warm == of_cold
    assert of_warm["parent"] == os.getpid()


#: What a module may have made, and two kernels print of it.
MADE: Final = """
import multiprocessing, random, secrets, tempfile, uuid
own, seeded = random.Random(), random.Random(7)
try:
    import numpy
except ImportError:
    numpy = None
of_numpy = [] if numpy is None else [
    numpy.random.default_rng(), numpy.random.SeedSequence(), numpy.random.RandomState()]
def drawn():
    if numpy is None:
        return [own.random()]
    rng, seeds, old = of_numpy
    child = seeds.spawn(1)[0].generate_state(4).tolist()
    return [own.random(), rng.random(), old.rand(), numpy.random.rand(), *child]
"""
PRINTED: Final = """
import json, made, multiprocessing, random, secrets, tempfile, uuid
print(json.dumps({
    "Python's `random`, `secrets`, `uuid`, `tempfile`": [
        random.random(), secrets.token_hex(), str(uuid.uuid4()), tempfile.mktemp()],
    "generators that modules have made without a seed": made.drawn(),
    "key of `multiprocessing`": [multiprocessing.current_process().authkey.hex()],
    "generators that modules have made with a seed": made.seeded.random(),
    "seed of `hash()`": hash("a"),
    "layout of memory": id(made),
}))
"""


async def test_two_warm_kernels_share_what_the_page_says(spec: Spec, manager: Managers) -> None:
    name = spec("made", made=MADE)
    await until_ready(manager(name))
    found = []
    for _ in range(2):
        km = manager(name)
        assert await start(km)
        found.append(json.loads(await answer(km, PRINTED)))
    one, two = found
    assert list(one) == rows("drawn anew", "the template's")
    for what in rows("drawn anew"):
        assert not set(one[what]) & set(two[what]), what
    for what in rows("the template's"):
        assert one[what] == two[what], what


#: Loads a library from a file that has the driver's name.
_DRIVER: Final = """
import _ctypes, ctypes, pathlib, shutil
file = pathlib.Path(__file__).parent / "libcuda.so.1"
shutil.copy(_ctypes.__file__, file)
kept = ctypes.CDLL(str(file))
"""
#: A thread of which Python knows nothing.
_THREAD: Final = """
import _thread
waiting = _thread.allocate_lock()
waiting.acquire()
_thread.start_new_thread(waiting.acquire, ())
"""
_MADVISE: Final = """
import ctypes, mmap
kept = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE)
kept.madvise(mmap.MADV_DONTFORK)
"""
_MLOCK: Final = "import ctypes; kept = ctypes.create_string_buffer(9); ctypes.CDLL(None).mlock(kept, 9)"
_TIMER: Final = (
    "import signal; signal.signal(signal.SIGALRM, print); signal.setitimer(signal.ITIMER_REAL, 600)"
)
_LIMIT: Final = (
    "import resource as r; r.setrlimit(r.RLIMIT_CORE, (0, 0)); r.setrlimit(r.RLIMIT_NOFILE, (512, 512))"
)
_NAME: Final = "import ctypes; ctypes.CDLL(None).prctl(15, b'mine', 0, 0, 0)"
_PROCESSORS: Final = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
_BARE: Final = "import _random; kept = _random.Random()"

#: What modules do, by the page's words for it, and what the log says of each.
LEFT: Final = {
    "a Python thread that modules have started": (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True, name='busy').start()",
        "started threads: busy",
    ),
    "a thread of a library, such as OpenMP's once it was used": (_THREAD, "started threads of their own"),
    "a child process": ("import os; os.spawnlp(os.P_NOWAIT, 'true', 'true')", "started processes"),
    "an open file or socket": ("import socket; kept = socket.socket()", "opened socket:"),
    "the GPU's driver": (_DRIVER, "opened the GPU's driver"),
    "memory that is shared with other processes": ("import mmap; kept = mmap.mmap(-1, 4096)", "share with"),
    "memory that is kept out of forks (`MADV_DONTFORK`)": (_MADVISE, "memory that no forked process has"),
    "memory that was locked (`mlock`)": (_MLOCK, "locked memory"),
    "a timer or an alarm that was set": (_TIMER, "set a timer"),
    "a working directory that was changed": ("import os; os.chdir('/')", "changed the folder"),
    "an umask, user or group that was changed": ("import os; os.umask(0o077)", "changed the umask"),
    "a limit that was changed": (_LIMIT, "changed the limits"),
    "a priority or scheduler that was changed": ("import os; os.nice(1)", "changed the priority"),
    "processors that were chosen": (_PROCESSORS, "changed the processors"),
    "a name that the process was given": (_NAME, "changed the name"),
    "a signal at its parent's end, or adopting, that was asked for": (
        "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)",
        "what happens as other processes end",
    ),
    "a temporary file or folder that is still there": (
        "import tempfile; kept = tempfile.TemporaryDirectory()",
        "have made /",
    ),
    "a seed for the whole of `random`, `numpy.random` or PyTorch": (
        "import random; random.seed(7)",
        "a seed",
    ),
    "a generator of the type `_random.Random` itself": (_BARE, "keep a _random.Random"),
}


def test_all_that_the_page_lists_is_tried() -> None:
    assert list(LEFT) == rows("cold")


@pytest.mark.long
@pytest.mark.parametrize("what", LEFT)
async def test_what_modules_leave_behind_is_in_no_kernel(spec: Spec, manager: Managers, what: str) -> None:
    source, why = LEFT[what]
    if what == "processors that were chosen" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is one processor alone")
    name = spec("odd", odd=source)
    assert not await start(manager(name))
    template = await the_template()
    assert why in template.refusal
    assert not await start(manager(name))
