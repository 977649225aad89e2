"""Warm kernels: forked from a process that has imported what they need, their *template*.

A template runs in the kernels' environment (``gpu_pool_kernels.inkernel.template``) as a child of
this server, and belongs to one command, one set of modules, and one value of each environment
variable that may be read as they are imported. It starts after the first kernel that asks for
one, which itself starts cold. A kernel that it forks is this process' own child.

Whatever is in doubt starts cold, at once: nothing here raises because of a template.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpu_pool_client import _procfs
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.environment import PARENT_VARIABLE, launcher
from gpu_pool_provisioner.forked import ForkedProcess, Streams, adopting, unwanted_groups, wait_for_unwanted

if TYPE_CHECKING:  # few kernels sleep
    from gpu_pool_provisioner.hibernation.kept import KeptKernel

#: Seconds in which a template must say that it has heard, unless it waits for a processor.
_ANSWERS_WITHIN: Final = 0.2
#: Seconds in which it must then have looked at what speaks against a fork, and forked. Slow file systems
#: take longer to start a kernel cold.
_FORKS_WITHIN: Final = 5.0
#: Seconds for which a template may wait for a processor.
_RUNS_WITHIN: Final = 2.0
_ENDED: Final = b'{"cold": "the template has ended"}'
#: Seconds in which a warm kernel must listen. A client that comes before it does waits for its next attempt.
_LISTENS_WITHIN: Final = 5.0
#: Seconds for which a template may import.
_IMPORTS_WITHIN: Final = 300.0
#: Seconds from a kernel's cold start to that of its template.
STARTS_AFTER = 3.0
#: Seconds for which a template's start is put off while kernels compute: its imports would slow their cells.
PAUSES_WITHIN = 60.0
#: Seconds over which is seen whether they do, and the part of that time below which they do not.
_PAUSE: Final = 0.5
_PAUSE_BELOW: Final = 0.2
_MAX_MESSAGE: Final = 1 << 16
#: Beginnings of variables that are read when they are needed, not as a module is imported: the notebook's
#: path, ours, and what the driver reads when it is initialised. All others are part of a template.
_READ_LATE: Final = (
    *("JPY_SESSION_NAME", "GPU_POOL_", "PWD", "OLDPWD"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY"),
    *("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"),
)
#: The variable in whose place the template's kernels show those that are their own, and for how many bytes.
_PLACE: Final = "GPU_POOL_TEMPLATE"
_PLACE_FOR: Final = 1 << 14
#: Arguments of Popen that a template understands. A kernel with others starts cold.
_UNDERSTOOD: Final = frozenset(("env", "cwd", "stdin", "stdout", "stderr"))


class StartColdError(Exception):
    """No kernel was forked; the message says why."""


@dataclass(frozen=True, slots=True)
class TemplateSettings:
    """What is preloaded, and how much of it there may be; see ``SliceSettings``."""

    preload: tuple[str, ...]
    max_templates: int
    max_mib: int
    idle_timeout: float


class TemplateProcess:
    """One template's process, from its start to its end."""

    def __init__(
        self, command: Callable[[int | str], list[str]], environment: Mapping[str, str], max_mib: int
    ) -> None:
        self._command = command
        self._environment = {_PLACE: "-" * _PLACE_FOR, **environment}
        self._max_mib = max_mib
        self._process: subprocess.Popen[bytes] | KeptKernel
        self._begin()
        #: When a kernel was last asked for, of ``time.monotonic()``.
        self.used_at = time.monotonic()
        #: Why it is of no use; empty while it may be.
        self.refusal = ""
        self._ready = threading.Event()
        self._is_ended = False
        #: Asks it for one kernel after another.
        self._executor = ThreadPoolExecutor(1, "gpu-pool-template")
        # It may not keep this process from ending.
        threading.Thread(target=self._import, name="gpu-pool-template-import", daemon=True).start()

    def _begin(self) -> None:
        """Start its process, by which it is asked from then on. Raises ``OSError``."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _in_lasting_thread(
                lambda: subprocess.Popen(
                    self._command(theirs.fileno()),
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether kernels can be forked from it."""
        return self._ready.is_set() and not self.refusal and not self.has_ended

    @property
    def is_importing(self) -> bool:
        """Whether it is not known yet if kernels can be forked from it."""
        return not self._ready.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether it is gone: it was idle for long, or memory was short, or somebody ended it."""
        return self._process.poll() is not None

    def wait_until_ready(self, timeout: float) -> bool:
        """Wait until it has imported everything; return whether kernels can be forked from it."""
        self._ready.wait(timeout)
        return self.is_ready

    def end(self) -> None:
        """End it. The kernels that it has forked go on."""
        self._is_ended = True
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._executor.shutdown(wait=False)

    def forget(self) -> None:
        """Leave it to the process that has forked this one, whose child it is."""
        self._control.close()
        if isinstance(self._process, subprocess.Popen):
            self._process.returncode = 0  # nothing to wait for

    async def fork(
        self, argv: Sequence[str], environment: Mapping[str, str], cwd: str | None, streams: Sequence[int]
    ) -> int:
        """Return the pid of a new kernel, this process' child, once it listens. Raises ``StartColdError``."""
        self.used_at = time.monotonic()
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            content = json.dumps({"argv": list(argv), "env": dict(environment), "cwd": cwd}).encode()
            asked = self._executor.submit(self._ask, content, theirs, streams)
            asked.add_done_callback(lambda _: theirs.close())  # it may have been cancelled before it began
            try:
                pid = await asyncio.wrap_future(asked)
                ours.setblocking(False)
                await loop.sock_sendall(ours, b"1")
                # It ends or listens; one that does neither is said to be alive all the same.
                with contextlib.suppress(asyncio.TimeoutError, OSError):
                    await asyncio.wait_for(loop.sock_recv(ours, 1), _LISTENS_WITHIN)
            except BaseException:
                # Nobody will wait for the end of a kernel whose start was given up.
                asked.add_done_callback(self._end_kernel)
                raise
        return pid

    # -- In threads ----------------------------------------------------------

    def _import(self) -> None:
        self._control.settimeout(_IMPORTS_WITHIN)
        try:
            told = json.loads(self._control.recv(_MAX_MESSAGE) or b'{"failed": "its process ended"}')
        except (OSError, ValueError) as error:
            told = {"failed": str(error)}
        if "short" in told:
            # No refusal: a later kernel brings another one, which looks again.
            get_logger().info(
                "Kernels of this kind start cold: too little memory is free for their template."
            )
            self._process.wait()
        elif "failed" in told:
            self.refusal = f"its template could not be prepared: {told['failed']}"
        elif (mib := _resident_mib(self.pid)) > self._max_mib:
            self.refusal = f"its template takes {mib} MiB, and max_template_mib is {self._max_mib}"
        if self.refusal and not self._is_ended:
            get_logger().warning("Kernels of this kind start cold: %s.", self.refusal)
            self._process.kill()
            self._process.wait()
        self._ready.set()

    def _ask(self, content: bytes, channel: socket.socket, streams: Sequence[int]) -> int:
        try:
            with channel, adopting() as wanted:
                told = self._told(content, [channel.fileno(), *streams])
                if "pid" in told:
                    wanted.add(int(told["pid"]))
        except (OSError, ValueError) as error:
            # Whatever it still forks finds nobody who wants it, and ends.
            self._process.kill()
            self._process.wait()
            unwanted_groups.add(self.pid)
            raise StartColdError(f"the template did not answer ({error or type(error).__name__})") from error
        if "pid" not in told:
            unwanted_groups.add(self.pid)
            raise StartColdError(told["cold"])
        pid = int(told["pid"])
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError as error:
            raise StartColdError("the kernel that was forked is no child of this server") from error
        return pid

    def _told(self, content: bytes, descriptors: list[int]) -> dict[str, Any]:
        """Return what it answers to a question. Raises ``OSError`` and ``ValueError``."""
        self._control.settimeout(_ANSWERS_WITHIN)
        socket.send_fds(self._control, [content], descriptors)
        told: dict[str, Any] = json.loads(_ENDED)
        if self._hears():
            self._control.settimeout(_FORKS_WITHIN)
            told = json.loads(self._control.recv(_MAX_MESSAGE) or _ENDED)
        return told

    def _hears(self) -> bool:
        """Wait until it has heard what it is asked; False if it has ended. Raises ``TimeoutError``."""
        give_up_at = time.monotonic() + _RUNS_WITHIN
        while True:
            try:
                return bool(self._control.recv(_MAX_MESSAGE))
            except TimeoutError:  # noqa: PERF203
                # A kernel that starts cold would have to wait for a processor as well.
                if time.monotonic() > give_up_at or not _wants_processor(self.pid):
                    raise

    def _end_kernel(self, asked: Future[int]) -> None:
        """End the kernel for which it was asked, if there is one."""
        if asked.cancelled() or asked.exception() is not None:
            return
        pid = asked.result()
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _in_lasting_thread(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Start a process in a thread that lasts as long as this process.

    A template lets the system end it with its parent, even where it is stopped, and by that the
    system understands the thread that has started it (PR_SET_PDEATHSIG in prctl(2)).
    """
    try:
        return _lasting_thread().submit(start).result()
    except RuntimeError as error:  # this process ends
        raise OSError(str(error)) from error


@functools.cache
def _lasting_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "gpu-pool-template-start")


def _wants_processor(pid: int) -> bool:
    found = _procfs.stat(pid)
    return found is not None and found.state in (b"R", b"D")


def _resident_mib(pid: int) -> int:
    """Return how much memory a process takes; 0 if it has just ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGESIZE") >> 20


_Key = tuple[tuple[str, ...], tuple[str, ...], frozenset[tuple[str, str]], object]


@dataclass(frozen=True, slots=True)
class Kind:
    """What the kernels of one template have in common."""

    key: _Key
    #: Its command, by the number of the descriptor by which it is asked, or the path of a socket.
    command: Callable[[int | str], list[str]]
    #: Its environment.
    early: Mapping[str, str]
    #: Makes one that starts. Raises ``OSError``.
    make: Callable[[Kind, int], TemplateProcess]
    #: Whether it is its only kernel: then another one takes its place as soon as it is asked for it.
    is_once: bool = False

    @classmethod
    def of(cls, argv: list[str], kwargs: Mapping[str, Any], settings: TemplateSettings) -> Kind:
        """Return the kind of a kernel that is forked. Raises ``StartColdError`` where there is none."""
        if kwargs.get("stdin") == subprocess.PIPE:
            raise StartColdError("its standard input is a pipe")

        def make(kind: Kind, max_mib: int) -> TemplateProcess:
            return TemplateProcess(kind.command, kind.early, max_mib)

        return cls.made_by(make, argv, kwargs, settings)

    @classmethod
    def made_by(
        cls,
        make: Callable[[Kind, int], TemplateProcess],
        argv: list[str],
        kwargs: Mapping[str, Any],
        settings: TemplateSettings,
        only: object = None,
    ) -> Kind:
        """Return the kind of a kernel whose process is made so; with ``only``, one for each kernel.

        Two of those with another ``only`` are of two kinds. Raises ``StartColdError`` where there is none.
        """
        if kwargs.get("env") is None or not _UNDERSTOOD.issuperset(kwargs):
            raise StartColdError("it is started with arguments that a template does not understand")
        find = launcher("template")
        made = find(argv, settings.preload, 0, settings.idle_timeout) if find else None
        if find is None or made is None:
            raise StartColdError("its command is not one of an IPython kernel")
        environment = _environment(kwargs) if only is None else kwargs["env"]
        early = {name: value for name, value in environment.items() if not name.startswith(_READ_LATE)}

        def command(control: int | str) -> list[str]:
            found: tuple[list[str], list[str]] = find(argv, settings.preload, control, settings.idle_timeout)
            return found[1]

        key = tuple(made[0]), settings.preload, frozenset(early.items()), only
        return cls(key, command, early, make, is_once=only is not None)


class Templates:
    """The templates of this process, by what their kernels have in common."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._templates: dict[_Key, TemplateProcess] = {}
        self._starting: dict[_Key, threading.Timer] = {}
        #: The processes of kernels that are no children of this one.
        self._others: set[int] = set()

    async def start_kernel(
        self, argv: list[str], kwargs: Mapping[str, Any], settings: TemplateSettings
    ) -> ForkedProcess | None:
        """Return a new warm kernel; None where it is to start cold, after which the next one may be warm.

        ``argv`` and ``kwargs`` are those of ``jupyter_client.launcher.launch_kernel``.
        """
        try:
            wait_for_unwanted()
            template = self.find(Kind.of(argv, kwargs, settings), settings)
            if template is None:
                return None
            with contextlib.ExitStack() as opened:
                streams = Streams(kwargs, opened)
                pid = await template.fork(argv, _environment(kwargs), kwargs.get("cwd"), streams.theirs)
                process = ForkedProcess(pid, argv)
                process.stdout, process.stderr = streams.keep()
                return process
        except StartColdError as why:
            get_logger().info("This kernel starts cold: %s.", why)
        except Exception as error:  # noqa: BLE001 - no student gets an error because of a template
            get_logger().warning("This kernel starts cold: %r", error)
        return None

    def find(self, kind: Kind, settings: TemplateSettings) -> TemplateProcess | None:
        """Return the template of a kernel if it is ready; where there is none, let one start soon."""
        with self._lock:
            found = self._templates.get(kind.key)
            if found is not None and found.has_ended and not found.refusal:
                self._templates.pop(kind.key).end()
                found = None
            ready = found if found is not None and found.is_ready else None
            if ready is not None and kind.is_once:
                self._templates.pop(kind.key)
                found = None
            if found is None and kind.key not in self._starting and settings.max_templates:
                # Not now, since it would slow the kernel that starts.
                timer = threading.Timer(STARTS_AFTER, self._start, (kind, settings))
                timer.daemon = True
                self._starting[kind.key] = timer
                try:
                    timer.start()
                except RuntimeError:  # no thread could be started: the next kernel tries again
                    del self._starting[kind.key]
                    raise
        return ready

    def note_kernel(self, pid: int) -> None:
        """Let no template start while this kernel computes either, which is no child of this process."""
        self._others.add(pid)

    def start_before_kernels(
        self, find: Callable[[], Kind], settings: TemplateSettings
    ) -> TemplateProcess | None:
        """Start the template of kernels before the first of them, unless it is there or there are enough.

        ``find`` returns their probable kind. Returns what was started.
        """
        try:
            kind = find()
        except StartColdError as why:
            get_logger().info("No template starts with the server: %s.", why)
            return None
        with self._lock:
            known = {*self._templates, *self._starting}
            if kind.key in known or len(known) >= settings.max_templates:
                return None
            return self._start_now(kind, settings)

    def _start(self, kind: Kind, settings: TemplateSettings) -> None:
        put_off_until = time.monotonic() + PAUSES_WITHIN
        while kind.key in self._starting and time.monotonic() < put_off_until and self._kernels_compute():
            pass
        with self._lock:
            if self._starting.pop(kind.key, None) is None:
                return  # ended meanwhile
            self._make_room(settings.max_templates)
            self._start_now(kind, settings)

    def _start_now(self, kind: Kind, settings: TemplateSettings) -> TemplateProcess | None:
        try:
            started = kind.make(kind, settings.max_mib)
        except OSError as error:
            get_logger().warning("Kernels of this kind start cold: their template did not start: %s", error)
            return None
        self._templates[kind.key] = started
        return started

    def _make_room(self, count: int) -> None:
        """End the templates that were not used for longest, so that one more may start."""
        by_use = sorted(self._templates, key=lambda key: self._templates[key].used_at)
        for key in by_use[: max(0, len(by_use) - count + 1)]:
            self._templates.pop(key).end()

    def all(self) -> list[TemplateProcess]:
        """Return those that there are, in no order."""
        with self._lock:
            return list(self._templates.values())

    def end(self) -> None:
        """End all; their kernels go on."""
        with self._lock:
            for timer in self._starting.values():
                timer.cancel()
            self._starting.clear()
            for template in self._templates.values():
                template.end()
            self._templates.clear()

    def forget(self) -> None:
        """Leave all to the process that has forked this one."""
        for template in self._templates.values():
            template.forget()

    def _kernels_compute(self) -> bool:
        """Look for a moment whether this process' children want a processor, or other kernels of its."""
        others = [*self._others]
        before = _times_of_children(others)
        time.sleep(_PAUSE)
        after = _times_of_children(others)
        self._others.difference_update({*others} - {*after})
        return sum(after[pid] - before.get(pid, 0.0) for pid in after) > _PAUSE_BELOW * _PAUSE


def _times_of_children(others: Iterable[int] = ()) -> dict[int, float]:
    """Return for how many seconds each child has run or waited for a processor, where the system tells it.

    Of ``others`` as well that have not ended.
    """
    pids = [*others]
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            pids += map(int, (task / "children").read_text().split())
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            ran, waited, _ = map(int, Path(f"/proc/{pid}/schedstat").read_text().split())
            found[pid] = (ran + waited) / 1e9
    return found


def _environment(kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return a kernel's environment as ``launch_kernel`` completes it."""
    return {**kwargs["env"], PARENT_VARIABLE: str(os.getpid())}


@functools.cache
def templates() -> Templates:
    """Return the templates of this process."""
    return Templates()


def _forget_templates() -> None:
    """Forget what a process that was forked from this one has not."""
    if templates.cache_info().currsize:
        templates().forget()
        templates.cache_clear()
    _lasting_thread.cache_clear()


os.register_at_fork(after_in_child=_forget_templates)
