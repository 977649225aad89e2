"""A process that has imported what kernels need, and forks them.

Run as ``python launch.py template CONTROL MODULE,MODULE IDLE PADDING``.

It runs in the kernel's environment, with the standard library and ipykernel alone, and is a child of
the Jupyter server. ``CONTROL`` is the number of
an open socket (``AF_UNIX``, ``SOCK_SEQPACKET``) by which the server asks; each message is JSON::

    → {"ready": [MODULE, ...]}              once everything is imported; or {"failed": why}; or at once
                                            {"short": true} where memory is, and then it ends
    ← {"argv", "env", "cwd"} with the descriptors of a channel and of three standard streams; the first may
                                            come before all others: then it waits for no preloaded module
    → {"heard": true}                       at once: what follows may take a moment
    → {"pid": 123}                          of a kernel that waits for one byte on the channel
    → {"cold": "why no kernel was forked"}

The kernel's parent is the server and not the template: the process that has forked it ends at
once, while the server adopts what descends from it (``PR_SET_CHILD_SUBREAPER``). So the server
waits for its end as for any child's, and the end of the template concerns nobody.

Whatever is in doubt is not forked; the server then starts the kernel as it always did.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Iterator  # noqa: UP035 - for Python 3.8

from . import free_memory, launch
from .commands import PLACE, given_variables
from .importing import FirstSeen, ImportedFiles, hiding, names_in, prepared, top_levels
from .process_state import ProcessState, Seeds, draw_anew, statuses

#: What every kernel imports until its first cell runs: without these none is warm.
KERNEL_MODULES = ("ipykernel.kernelapp", "ipykernel.ipkernel", "ipykernel.zmqshell")
#: And these, as far as this version of ipykernel and IPython has them.
OPTIONAL_MODULES = (
    "ipykernel.debugger",
    "IPython.core.completer",
    "IPython.core.completerlib",
    "IPython.core.debugger",
    "IPython.core.logger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "faulthandler",
    "psutil",
    "sqlite3",
    "tornado.locks",
    "tornado.platform.asyncio",
    "tornado.queues",
)
_FILLER = PLACE.encode() + b"="
#: Seconds in which threads have ended that end before every fork.
_THREADS_END_WITHIN = 1.0
#: Seconds between two looks at the machine's memory.
_LOOK_EVERY = 20.0
#: Seconds for which the first kernel has the processor to itself, unless another one is asked for: it starts,
#: and what is left to import, and to look at, would take as long on the one processor of many jobs and pods.
_STARTS_WITHIN = 1.0
#: Files that keep what was written to them until they are closed.
_WRITTEN = (io.BufferedRandom, io.BufferedWriter, io.TextIOWrapper)
# prctl(2)
_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE = 1 << 20
_MAX_DESCRIPTORS = 4


class Template:
    """What this process has imported, and how it was before."""

    def __init__(self, control: socket.socket, modules: "list[str]", idle: float) -> None:
        self.control = control
        self.server = os.getppid()
        self.modules = modules
        #: Seconds after which it ends if no kernel was asked for.
        self.idle = idle
        self.handlers = _handled()
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.files = ImportedFiles()
        self.state = ProcessState()
        self.seeds = Seeds()
        #: Which module has left what it must not.
        self.first_seen = FirstSeen()
        #: What speaks against sharing the generators of random numbers.
        self.doubt_of_seeds = None  # type: str | None
        #: The modules that only the preloaded ones have imported, by the first part of their names.
        self.preloaded = set()  # type: set[str]
        #: Generators of random numbers that were given no seed.
        self.generators = []  # type: list[Any]
        #: The variables that this process was started with.
        self.given = given_variables()
        self.given.pop(PLACE, None)
        os.environ.pop(PLACE, None)

    def command_of_kernel(self) -> "list[str] | None":
        """Import everything, and serve; return as :meth:`serve`."""
        if free_memory.is_short():
            send(self.control, {"short": True})
            return None
        self.import_kernel()
        argv = self.serve_first()
        if argv is None:
            failed = self.prepare()
            argv = self.serve() if self.tell(failed) else None
        return argv

    def import_kernel(self) -> None:
        """Import what every kernel does. Raises ``ImportError``."""
        # Hardly anything that is imported is garbage, and to look for it takes an eighth of the time.
        gc.disable()
        try:
            for name in KERNEL_MODULES:
                importlib.import_module(name)
            for name in OPTIONAL_MODULES:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
        finally:
            gc.freeze()  # else it is looked at all of it now, by this process or the first kernel
            gc.enable()

    def prepare(self) -> "dict[str, str]":
        """Import what is preloaded; return what could not be imported, with the error's words."""
        before = top_levels()
        failed = {}
        with prepared(), self.seeds.noting(), self.state.noting_files():
            for name in self.modules:
                try:
                    importlib.import_module(name)
                except BaseException as error:  # noqa: BLE001 - SystemExit of a program, too
                    failed[name] = f"{type(error).__name__}: {error!s:.200}"
                self.first_seen.note(name, self._left)
        self.preloaded = top_levels() - before
        if self.files.change() is None:  # else what was imported before is not what is there now
            self.files = ImportedFiles()
        # Now, since the collector does not tell of what is frozen.
        self.generators, self.doubt_of_seeds = self.seeds.without(), self.seeds.doubt()
        gc.unfreeze()
        gc.collect()
        # Else every kernel would write it once more.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        ctypes.CDLL(None).fflush(None)
        # Kernels share these pages for as long as their collector does not touch them.
        gc.freeze()
        return failed

    def tell(self, failed: "dict[str, str]") -> bool:
        """Tell the server what came of the imports; return whether kernels can be forked."""
        why = "; ".join(f"{name}: {error}" for name, error in failed.items())
        doubt = None if failed else self.doubt_of_imports()
        if doubt is not None:
            why = self.first_seen.with_module(doubt)
        send(self.control, {"failed": why} if why else {"ready": self.modules})
        return not why

    def serve_first(self) -> "list[str] | None":
        """Answer a question that is there already: its kernel does not wait for what is preloaded.

        Returns twice, as :meth:`serve`.
        """
        if self._is_asked(0):
            content, descriptors = _receive(self.control)
            if content:
                argv = self._answer(json.loads(content), descriptors)[0]
                if argv is None:
                    self.files = ImportedFiles()  # as they are now, and not after the pause
                    self._is_asked(_STARTS_WITHIN)
                return argv
        return None

    def serve(self) -> "list[str] | None":
        """Answer the server until it has nothing more to ask.

        Returns twice: None in the template once it is no longer wanted, and in each kernel its command.
        """
        while True:
            content, descriptors = self._next()
            if not content:
                return None
            argv, is_outdated = self._answer(json.loads(content), descriptors)
            if argv is not None or is_outdated:
                return argv

    def _answer(self, wanted: "dict[str, Any]", descriptors: "list[int]") -> "tuple[list[str] | None, bool]":
        """Answer a question; return the command in the kernel, and whether this template is of no use now."""
        send(self.control, {"heard": True})
        outdated = self.doubt(descriptors) or self.outdated()
        doubt = outdated or self._hidden(wanted["cwd"]) or self._unshowable(wanted["env"])
        if doubt is not None:
            send(self.control, {"cold": doubt})
        elif self.fork():
            self.become_kernel(wanted, descriptors)
            return list(wanted["argv"]), False
        for descriptor in descriptors:
            os.close(descriptor)
        return None, outdated is not None

    def _next(self) -> "tuple[bytes, list[int]]":
        """Wait for a question; return nothing once this template is to end."""
        end = time.monotonic() + self.idle
        while time.monotonic() < end and not free_memory.is_short():
            if self._is_asked(_LOOK_EVERY):
                content, descriptors = _receive(self.control)
                return content, descriptors
        return b"", []

    def _is_asked(self, within: float) -> bool:
        """Whether there is a question, or the server has ended, or that comes within so many seconds."""
        asked = select.poll()  # not select(2): the socket has the number that it had in the server
        asked.register(self.control, select.POLLIN)
        return bool(asked.poll(within * 1000))

    # -- What speaks against a fork ------------------------------------------

    def doubt_of_imports(self) -> "str | None":
        """Return what speaks against every fork, as :meth:`doubt`, and takes longer to find out."""
        return self._left() or self.doubt_of_seeds

    def _left(self) -> "str | None":
        return self._of_python() or self.doubt_of_threads() or self.doubt([]) or self.state.doubt()

    def _of_python(self) -> "str | None":
        if threading.active_count() > 1:
            names = ", ".join(sorted(each.name for each in threading.enumerate()[1:]))
            return f"the preloaded modules have started threads: {names:.200}"
        return None

    def doubt_of_threads(self) -> "str | None":
        """Return that there are threads that a fork loses.

        A library that bears a fork ends its threads before (pthread_atfork(3)), as OpenBLAS does, and
        starts them again when it needs them. One that does not would wait for them in the kernel
        for ever, as GNU's OpenMP does once it was used.
        """
        if len(names_in("/proc/self/task")) == 1:
            return None
        with without_warnings():
            child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        give_up_at = time.monotonic() + _THREADS_END_WITHIN
        while len(names_in("/proc/self/task")) > 1:
            if time.monotonic() > give_up_at:
                return "the preloaded modules have started threads of their own, such as those of OpenMP"
            time.sleep(0.01)
        return None

    def doubt(self, expected: "list[int]") -> "str | None":
        """Return what the imports have left behind that no kernel may inherit; None if there is nothing."""
        if self._of_python() or len(names_in("/proc/self/task")) > 1:
            return self._of_python() or "the preloaded modules have started threads of their own"
        return self.doubt_at_once(expected)

    def doubt_at_once(self, expected: "list[int]") -> "str | None":
        """Return what speaks against a fork and is no thread, as :meth:`doubt`."""
        if _has_children():
            return "the preloaded modules have started processes"
        return self._opened({0, 1, 2, self.control.fileno(), *expected}) or self._mapped()

    def _opened(self, expected: "set[int]") -> "str | None":
        for name in names_in("/proc/self/fd"):
            try:
                what = os.readlink("/proc/self/fd/" + name)
            except OSError:  # the folder's own, which is closed by now
                continue
            if int(name) not in expected and not _is_library_to_read(int(name), what):
                return f"the preloaded modules have opened {what:.200}"
        return None

    def _mapped(self) -> "str | None":
        with open("/proc/self/maps", "rb") as maps:
            for line in maps:
                if b"/dev/nvidia" in line or b"/libcuda.so" in line:
                    return "the preloaded modules have opened the GPU's driver"
                # proc_pid_maps(5): a kernel would write to what other kernels read.
                if line.split(b" ", 2)[1] == b"rw-s":
                    return "the preloaded modules have memory that they share with other processes"
        return None

    def outdated(self) -> "str | None":
        """Return what a new child of the server would not have in common with this process."""
        server, own = f"/proc/{self.server}/", "/proc/self/"
        if os.getppid() != self.server:
            return "the server has ended"
        if statuses(server) != statuses(own):
            return "the server's user, groups, umask or rights are not those of before"
        for name in ("cgroup", "limits", "oom_score_adj"):
            if Path(server + name).read_bytes() != Path(own + name).read_bytes():
                return "the server's {} is not that of before".format(name.replace("_", " "))
        for name in sorted(names_in(own + "ns")):
            if os.readlink(server + "ns/" + name) != os.readlink(own + "ns/" + name):
                return f"the server's namespace {name} is not that of before"
        if os.sched_getaffinity(self.server) != os.sched_getaffinity(0):
            return "the server's processors are not those of before"
        if os.getpriority(os.PRIO_PROCESS, self.server) != os.getpriority(os.PRIO_PROCESS, 0):
            return "the server's priority is not that of before"
        return self.files.change()

    def _hidden(self, cwd: "str | None") -> "str | None":
        name = hiding(cwd or os.curdir, self.preloaded)
        return f"{name} in the notebook's folder has the name of a preloaded module" if name else None

    def _unshowable(self, wanted: "dict[str, str]") -> "str | None":
        place = place_of_variables()
        fits = place is not None and len(self._shown(wanted)) <= place[1]
        return None if fits else "its own variables are too long to be shown"

    def _shown(self, wanted: "dict[str, str]") -> bytes:
        own = self._own(wanted)
        return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in own.items()) + _FILLER

    def _own(self, wanted: "dict[str, str]") -> "dict[str, str]":
        return {name: value for name, value in wanted.items() if self.given.get(name) != value}

    # -- The fork ------------------------------------------------------------

    def fork(self) -> bool:
        """Fork a process that descends from the server, and tell the server its pid. True in that process."""
        reading, writing = os.pipe()
        with without_warnings():
            try:
                between = os.fork()
            except OSError as error:  # the user's processes, or the memory
                os.close(reading)
                os.close(writing)
                send(self.control, {"cold": f"no process could be forked: {error}"})
                return False
            if between == 0:
                try:
                    kernel = os.fork()
                    if kernel:
                        os.write(writing, b"%d" % kernel)
                except BaseException:  # noqa: BLE001 - the server is told that there is no pid
                    os._exit(1)
                if kernel:
                    os._exit(0)
        os.close(writing)
        if between == 0:
            os.close(reading)
            return True
        # Once it has been waited for, what it has forked is the server's.
        os.waitpid(between, 0)
        told = os.read(reading, 32)
        os.close(reading)
        send(self.control, {"pid": int(told)} if told else {"cold": "no process could be forked"})
        return False

    def become_kernel(self, wanted: "dict[str, Any]", descriptors: "list[int]") -> None:
        """Be what a new process of the server with this command would be."""
        channel = socket.socket(fileno=descriptors[0])
        self.control.close()
        if channel.recv(1) != b"1":
            # The server has started another kernel meanwhile. It waits for what ends in this group.
            os._exit(0)
        os.setsid()
        for standard, given in enumerate(descriptors[1:]):
            os.dup2(given, standard)
            os.close(given)
        with contextlib.suppress(AttributeError):  # Python before 3.8, and a name that is not public
            threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
        self.look_as_wanted(wanted)
        # Pages are shared for as long as the collector does not touch them.
        gc.freeze()
        draw_anew(self.generators)
        tell_when_bound(channel)

    def look_as_wanted(self, wanted: "dict[str, Any]") -> None:
        """Have the signals, variables, folder and command that a new process would have."""
        for number, handler in self.handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        self.set_variables(wanted["env"])
        place = place_of_variables()
        if place is not None:
            # Nothing ends early: some readers stop at an empty variable.
            ctypes.memmove(place[0], self._shown(wanted["env"]).ljust(place[1], b"-"), place[1])
        if wanted["cwd"] is not None:
            os.chdir(wanted["cwd"])
        show_command(wanted["argv"])

    def set_variables(self, wanted: "dict[str, str]") -> None:
        """Let the environment be what it would be had everything been imported in it."""
        # Those that Python itself (site) or modules have set otherwise; None if removed.
        now = {name: os.environ.get(name) for name in {*self.given, *os.environ}}
        own = {name: value for name, value in now.items() if self.given.get(name) != value}
        # Who has changed a variable here would have changed it there, if it was the same.
        changed = {name: value for name, value in own.items() if wanted.get(name) == self.given.get(name)}
        os.environ.clear()
        os.environ.update({n: v for n, v in {**wanted, **changed}.items() if v is not None})


def _handled() -> "dict[int, Any]":
    """Return the handlers of all signals that may have one."""
    return {
        number: signal.getsignal(number)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    }


def _is_library_to_read(descriptor: int, path: str) -> bool:
    """Whether this is the file of a library that is loaded here, opened to be read only.

    libffi opens its own and keeps it, to map code for callbacks of ctypes from it, as it would in any kernel.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR):
        return False
    with open("/proc/self/maps", "rb") as maps:
        parts = [line.rstrip(b"\n").split(None, 5) for line in maps]
    return any(b"x" in part[1] and part[5] == os.fsencode(path) for part in parts if len(part) == 6)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


@contextlib.contextmanager
def without_warnings() -> "Iterator[None]":
    """Let Python not warn of a fork of a process with threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def end_with_server() -> None:
    """Let the system end this process once the server has gone, also if it imports for ever or is stopped."""
    # What is forked of it does not inherit that (prctl(2)).
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _receive(control: socket.socket) -> "Any":
    content, ancillary, _, _ = control.recvmsg(_MAX_MESSAGE, socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS))
    descriptors = []  # type: list[int]
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(data) - len(data) % 4
            descriptors += [int.from_bytes(data[n : n + 4], sys.byteorder) for n in range(0, whole, 4)]
    return content, descriptors


def send(control: socket.socket, message: "dict[str, Any]") -> None:
    """Tell the server something."""
    # A server that has gone is noticed where it is asked for the next question.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        control.send(json.dumps(message).encode())


def _addresses() -> "list[int]":
    """Return where this process' command and its environment begin and end."""
    with open("/proc/self/stat", "rb") as file:
        numbers = file.read().rpartition(b")")[2].split()
    # proc_pid_stat(5): these are the fields 48 to 51, and the third is the first here.
    return [int(each) for each in numbers[45:49]]


def place_of_variables() -> "tuple[int, int] | None":
    """Return the address and the length of the variable in whose place a kernel's own are shown.

    Nobody has kept a pointer to it, as libraries may have to others.
    """
    _, _, start, end = _addresses()
    block = ctypes.string_at(start, end - start) if 0 < start < end else b""
    place = block.find(_FILLER)
    return (start + place, block.index(b"\0", place) - place) if place >= 0 else None


def show_command(argv: "list[str]") -> None:
    """Let ``ps`` show this command: it is written over the template's own, which is longer."""
    with contextlib.suppress(AttributeError):  # before Python 3.10
        sys.orig_argv[:] = argv
    start, end, _, _ = _addresses()
    command = b"".join(os.fsencode(word) + b"\0" for word in argv)
    if 0 < len(command) <= end - start:
        ctypes.memmove(start, command.ljust(end - start, b"\0"), end - start)


def tell_when_bound(channel: socket.socket) -> None:
    """Tell the server when the kernel listens: a client that comes earlier waits for its next attempt."""
    application = sys.modules["ipykernel.kernelapp"].IPKernelApp
    original = application.log_connection_info

    def log_connection_info(self: Any) -> None:
        application.log_connection_info = original
        with contextlib.suppress(OSError), channel:
            channel.send(b"1")
        original(self)

    application.log_connection_info = log_connection_info


def run(argv: "list[str]", launcher: str) -> None:
    """Run the kernel as ``launch.py`` in this folder does, which its command names as ``launcher``.

    Returns once it has ended, as a kernel that starts cold.
    """
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path.insert(0, str(Path(__file__).resolve().parent))
    sys.argv[:] = argv[argv.index(launcher) :]
    launch.main()


def end() -> None:
    """End this kernel as Python does, except that what was imported is not taken apart.

    That would write to all of the memory that is still shared with the template, and so copy it: half a
    second with PyTorch, for which everybody would wait who restarts a kernel.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):  # of which Python has told already
        atexit._run_exitfuncs()  # IPython's, among others, which drops what the cells have made
    gc.collect()
    files = [each for each in gc.get_objects() if issubclass(type(each), _WRITTEN)]
    for file in (*files, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            file.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(0)


def main() -> None:
    """Import what the command line names, and fork kernels until the server closes the socket."""
    launcher, _, control, modules, idle = sys.argv[:5]
    end_with_server()
    template = Template(socket.socket(fileno=int(control)), names(modules), float(idle))
    argv = template.command_of_kernel()
    if argv is None:
        # What modules do at the end of a process is up to the kernels: they may still use it.
        os._exit(0)
    run(argv, launcher)
    end()


def names(modules: str) -> "list[str]":
    """Return the modules that a command line names."""
    return list(filter(None, modules.split(",")))
