#!/usr/bin/python3 -I
"""Puts kernels to disk and lets them go on, for any user. To be installed as root's own file, with sudoers.

    check         say why no kernel can sleep here, in a sentence; "" where one can
    launch        run a kernel that may sleep; say its ID, and its pid
    dump ID       write it to disk, and end it once its image is whole
    restore ID    let it go on from there
    note ID       keep something beside it that the caller is told again by list
    remove ID     remove its image
    list          say what kernels of the caller's there are; to root, all

Nothing else is accepted. The first line of its standard input is a JSON object, with what a verb needs
besides (launch: argv, env, cwd, umask; note: note; dump: note, which may be left out). One line of JSON is
printed: {"ok": true, …} or {"ok": false, "error": "why"}. launch and restore stay until the kernel has ended.
The kernel ends when their standard input does; a dump is given up then.

CRIU never runs with more rights than the user has who calls, but for CAP_CHECKPOINT_RESTORE and
CAP_SYS_PTRACE, in a pid namespace in which there is nobody else. So what it opens, creates or removes by a
name, the user could. The program needs the standard library alone, uses no shell, and takes no path, no id
and no setting from a user. Root alone may say other settings, in the first line: "settings".
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import pwd
import re
import select
import signal
import stat
import struct
import sys
import syslog
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

#: The oldest CRIU with which this was seen to work on today's kernels.
OLDEST = (4, 1)
_MIB = 1 << 20
_ID = re.compile("[0-9a-f]{32}", re.ASCII)
#: Bytes of the first line, of a note, and of what is read of CRIU's log.
_LONGEST_REQUEST, _LONGEST_NOTE, _LONGEST_LOG = 2 << 20, 64 << 10, 256 << 10
#: Seconds that CRIU may take at most, and between two looks at how much it has written.
_LONGEST, _LOOK_EVERY = 600.0, 0.05
#: What CRIU is told for either way; files that are open and have no name go into the image, up to this size.
_BOTH = ("--no-default-config", "--manage-cgroups=ignore", "--file-locks", "--link-remap")
_GHOST_BYTES = 64 << 20
#: What an image may take beyond a tenth more than its kernel's memory.
_MARGIN = 64 << 20
#: Seconds in which files of the user's must be seen, a call that is given up ends, and a launch has begun.
_SEEN_WITHIN, _ENDS_WITHIN, _BEGINS_WITHIN = 10.0, 30.0, 60.0
#: How deep a note may be.
_DEEPEST = 20
#: What CRIU has open as itself: it is opened by its path here, and run by that.
_CRIU = 8
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
#: Of what is said and written; another version's is refused.
VERSION = 1
_HEADER, _STATE, _NOTE, _LOCK, _NEEDS = "header.json", "kernel.json", "note.json", "lock", "needs"
#: The bytes of the lock's file: who does something with a kernel holds one, a kernel that lives the other.
_BUSY, _LIVES = 0, 1
#: From unshare(2), mount(2), ioctl_ns(2), prctl(2), capabilities(7) and the system's capability.h.
_NEWPID, _NEWNS = 0x20000000, 0x00020000
_NOSUID, _NODEV, _NOEXEC, _REC, _SLAVE = 2, 4, 8, 0x4000, 0x80000
_GET_USERNS = 0xB701
_PDEATHSIG, _DUMPABLE, _KEEPCAPS, _CAPBSET_DROP = 1, 4, 8, 24
_SUBREAPER, _NO_NEW_PRIVS, _AMBIENT = 36, 38, 47
_SYS_PTRACE, _SYS_ADMIN, _CHECKPOINT_RESTORE = 19, 21, 40
_OF_CRIU = (_SYS_PTRACE, _CHECKPOINT_RESTORE)
#: The pids in a namespace: of what CRIU writes, the kernel's parent; and of the kernel.
_ROOT, _KERNEL = 2, 3
#: The kernel's parent: reaps what others leave behind, and goes to disk with it. What it has to start with is
#: open as 3, the kernel's output, and as 4, where it says that the kernel could not be run.
_REAPER = """
import os, signal, sys
kernel = os.fork()
if not kernel:
    try:
        os.setsid()
        os.set_inheritable(4, False)
        os.dup2(3, 1), os.dup2(3, 2), os.close(3)
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        os.write(4, f"{error.errno} {error.strerror}: {sys.argv[1]}".encode())
    finally:
        os._exit(127)
os.close(3), os.close(4)
while os.wait()[0] != kernel:
    pass
"""


class Refused(Exception):
    """It is not done; the text says why. ``more`` is said besides."""

    def __init__(self, text: str, **more: object) -> None:
        super().__init__(text)
        self.more = more


class System(NamedTuple):
    """Where things are. Only tests have them elsewhere."""

    settings: str = "/etc/gpu-pool/hibernation.json"
    limits: str = "/proc/sys/user"


class Settings(NamedTuple):
    """What the file says, or root."""

    criu: str = "/usr/sbin/criu"
    folder: str = "/var/lib/gpu-pool/asleep"
    #: MiB that images may take, of one user who is not root and of all; 0 for as much as the disk has.
    user_mib: int = 20_480
    all_mib: int = 0
    #: After how many days an image is removed that nobody has asked for.
    days: int = 7


class Caller(NamedTuple):
    """The user for whom it is done."""

    uid: int
    gid: int
    name: str
    groups: tuple[int, ...]


class Call(NamedTuple):
    """One call: whose, with what."""

    system: System
    settings: Settings
    caller: Caller
    request: dict[str, Any]


# -- Who calls, and with what ----------------------------------------------------


def _caller() -> Caller:
    if os.geteuid() != 0:
        raise Refused("this program must be run by root: sudo -n gpu-pool-hibernation")
    if others := [name for name in ("PKEXEC_UID", "DOAS_USER") if name in os.environ]:
        raise Refused(f"{others[0]} is set: this program is called by sudo, and by nothing else of that kind")
    told = os.environ.get("SUDO_UID", "")
    if not told:
        parent = os.getppid()  # 0 where it is outside of this container
        if parent and _status(parent)["Uid"][0] != "0":
            raise Refused("SUDO_UID is not set, and who calls is not root: sudo -n gpu-pool-hibernation")
        told = "0"
    if not re.fullmatch("0|[1-9][0-9]{0,9}", told, re.ASCII) or int(told) >= 2**32 - 1:
        raise Refused(f"SUDO_UID is {told[:60]!r}, which is no user")
    if told == "0":
        return Caller(0, 0, "root", tuple(os.getgroups()))
    try:
        user = pwd.getpwuid(int(told))
    except KeyError:
        raise Refused(f"this machine knows no user {told}") from None
    has, groups = _groups_of_sudos_caller(user.pw_uid), os.getgrouplist(user.pw_name, user.pw_gid)
    has = {*(groups if has is None else has), user.pw_gid}
    return Caller(user.pw_uid, user.pw_gid, user.pw_name, tuple(each for each in groups if each in has))


def _groups_of_sudos_caller(uid: int) -> set[int] | None:
    """Return the groups of the process of the user's that has run sudo; None where there is none any more."""
    pid = os.getpid()
    with suppress(OSError):
        while pid := int(_status(pid)["PPid"][0]):
            status = _status(pid)
            if set(status["Uid"]) == {str(uid)}:
                return {*map(int, status["Groups"]), int(status["Gid"][0])}
    return None


def _request() -> dict[str, Any]:
    """Return the first line of the standard input; nothing of what follows is read."""
    line = b""
    while not line.endswith(b"\n"):
        read = os.read(0, _LONGEST_REQUEST + 1 - len(line))
        line += read
        if not read or len(line) > _LONGEST_REQUEST:
            break
    try:
        if len(line) <= _LONGEST_REQUEST and isinstance(request := json.loads(line), dict):
            return request
    except (ValueError, RecursionError):
        pass
    raise Refused(
        f"the standard input must begin with a JSON object in one line of at most {_LONGEST_REQUEST} bytes"
    )


def untrusted(path: str) -> str:
    """Return what makes a path one that others than root can change; empty where nothing does."""
    if not path.startswith("/") or os.path.realpath(path) != path:
        return f"{path} is not the full path of a file without links"
    while True:
        seen = os.lstat(path)
        others_write = seen.st_mode & 0o022 and not (
            stat.S_ISDIR(seen.st_mode) and seen.st_mode & stat.S_ISVTX
        )
        if seen.st_uid != 0 or others_write:
            return f"{path} is not root's alone: chown root {path}; chmod go-w {path}"
        if path == "/":
            return ""
        path = os.path.dirname(path)


def _settings(system: System, caller: Caller, request: dict[str, Any]) -> Settings:
    """Return the settings of the file, which root may say otherwise."""
    said: Any = {}
    if os.path.lexists(system.settings):
        if why := untrusted(system.settings):
            raise Refused(why)
        with open(system.settings, "rb") as file:
            try:
                said = json.load(file)
            except ValueError as error:
                raise Refused(f"{system.settings} is not JSON: {error}") from None
    if caller.uid == 0 and isinstance(said, dict) and isinstance(request.get("settings"), dict):
        said = {**said, **request["settings"]}
    kinds = {name: type(value) for name, value in Settings._field_defaults.items()}
    if not isinstance(said, dict) or any(type(value) is not kinds.get(name) for name, value in said.items()):
        accepted = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
        raise Refused(f"{system.settings} must be an object with, of these, what is to differ: {accepted}")
    settings = Settings(**said)
    if min(settings.user_mib, settings.all_mib, settings.days - 1) < 0 or not settings.folder.startswith("/"):
        raise Refused(
            f"{system.settings}: no number is below 0, days is 1 or more, and folder is a full path"
        )
    return settings


def _why_not(call: Call) -> str:
    """Return why no kernel of the caller's can sleep here, in a sentence; empty where one can."""
    with open("/proc/self/status", "rb") as file:
        found = re.search(rb"\nCapEff:\s*([0-9a-f]+)", file.read())
    if found is None or not int(found[1], 16) >> _SYS_ADMIN & 1:
        return "it takes root with CAP_SYS_ADMIN: this is a container without it."
    for kind in ("pid", "mnt"):
        limit = f"{call.system.limits}/max_{kind}_namespaces"
        with suppress(OSError), open(limit) as file:
            if file.read().strip() == "0":
                setting = f"user.max_{kind}_namespaces"
                return f"this system allows no {kind} namespaces: set {setting} (sysctl) to more than 0."
    try:
        _folder(call)
    except Refused as error:
        return f"{error}."
    if not os.path.exists(criu := call.settings.criu):
        oldest = ".".join(map(str, OLDEST))
        return f"there is no {criu}: install CRIU {oldest} or newer, or say where it is."
    try:
        found = re.search(rb"Version: (\d+)\.(\d+)", _said(call, "--version")[1])
    except Refused as error:
        return f"{error}."
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        has = f"is {int(found[1])}.{int(found[2])}" if found else "does not say its version"
        return f"{criu} {has}, and {OLDEST[0]}.{OLDEST[1]} or newer is needed."
    status, said = _said(call, "check", *_way_of(call.caller))
    if status:
        return f"{criu} check says that this machine cannot: {first_error(said)}"
    return ""


def _criu(call: Call) -> int:
    """Open CRIU. Raises ``Refused`` where others can change what would get capabilities."""
    if call.caller.uid != 0 and (why := untrusted(call.settings.criu)):
        raise Refused(why)
    return os.open(call.settings.criu, os.O_RDONLY | os.O_CLOEXEC)


def _said(call: Call, *words: str) -> tuple[int, bytes]:
    """Run CRIU; return its status, and what it says."""
    criu, (output, written) = _criu(call), os.pipe()
    pid = os.fork()
    if pid == 0:
        _run(_CRIU, ["criu", *words], call.caller, _OF_CRIU, {1: written, 2: written, _CRIU: criu})
    os.close(written)
    said = b""
    while (read := os.read(output, _LONGEST_LOG)) and len(said) < _LONGEST_LOG:
        said += read
    os.close(output)
    return os.waitpid(pid, 0)[1], said


def _way_of(caller: Caller) -> list[str]:
    return ["--unprivileged"] if caller.uid else []


def first_error(log: bytes) -> str:
    """Return the first error in what CRIU says, as a sentence has it."""
    lines = log.decode(errors="replace").splitlines()
    errors = [line.partition("): ")[2] or line for line in lines if "Error" in line]
    # It says of each process of root in a container that its limits cannot be raised, and goes on.
    told = [each for each in errors if "RLIMIT" not in each]
    return f"{told[0].strip().rstrip('.')[:300]}." if told else "it does not say why."


# -- Rights and namespaces ---------------------------------------------------------


def _libc(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _prctl(option: int, *values: int) -> None:
    _libc("prctl", option, *(ctypes.c_ulong(each) for each in (*values, 0, 0, 0, 0)[:4]))


def _become(caller: Caller, keeps: Sequence[int] = ()) -> None:
    """Become the user for good, with no capability but those. Root stays what it is."""
    if caller.uid == 0:
        return
    _prctl(_KEEPCAPS, 1 if keeps else 0)
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for each in range(last + 1):
        if each not in keeps:
            _prctl(_CAPBSET_DROP, each)
    os.setgroups(caller.groups)
    os.setresgid(caller.gid, caller.gid, caller.gid)
    os.setresuid(caller.uid, caller.uid, caller.uid)
    has = sum(1 << each for each in keeps)
    low, high = has & 0xFFFFFFFF, has >> 32
    _libc("capset", struct.pack("II", 0x20080522, 0), struct.pack("6I", low, low, low, high, high, high))
    for each in keeps:
        _prctl(_AMBIENT, 2, each)
    _prctl(_NO_NEW_PRIVS, 1)


def _run(
    program: str | int,
    argv: Sequence[str],
    caller: Caller,
    keeps: Sequence[int],
    opens: dict[int, int],
    passes: Sequence[int] = (),
    environment: dict[str, str] = _ENVIRONMENT,
    start: Callable[[], object] = lambda: None,
) -> None:
    """Become a program, by its path or descriptor, with these descriptors alone. Does not return.

    ``opens`` are those that get another number, ``passes`` those that keep theirs. ``start`` is called last.
    """
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        # First out of the way of each other: above all that are to be.
        high = {number: fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 100) for number, each in opens.items()}
        for number in (0, 1, 2, *high):
            os.dup2(high.get(number, nothing), number)
        kept = {0, 1, 2, *high, *passes}
        for each in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                os.set_inheritable(int(each), int(each) in kept)
        _become(caller, keeps)
        start()
        os.execve(program, list(argv), environment)  # noqa: S606 - there is no shell
    except OSError as error:
        if 4 in opens:
            os.write(4, f"{error.errno} {error.strerror}".encode())
    finally:
        os._exit(127)


def _in_namespaces(
    starts: Callable[[int], int], caller: Caller, output: int, written: int, held: int
) -> tuple[int, str]:
    """Run something in namespaces of pids and mounts of their own, which end with it and with our input.

    ``starts`` forks it there, and returns the pid of what is waited for first. Returns the pid of the first
    process, and what it says of that: empty for a program of ours that was run, or CRIU's status.
    """
    told, says = os.pipe()
    _libc("unshare", _NEWPID)
    first = os.fork()
    if first == 0:
        try:
            _be_first(starts, caller, output, written, held, says)
        except OSError as error:
            os.write(says, f"{error.errno} {error.strerror}".encode())
        finally:
            os._exit(127)
    for descriptor in (says, output, written, held):
        os.close(descriptor)
    said = b""
    while read := os.read(told, 4096):
        said += read
    os.close(told)
    return first, said.decode(errors="replace")


def _close_but(*kept: int) -> None:
    for each in os.listdir("/proc/self/fd"):
        if int(each) not in kept:
            with suppress(OSError):
                os.close(int(each))


def _be_first(
    starts: Callable[[int], int], caller: Caller, output: int, written: int, held: int, says: int
) -> None:
    """Be the first process of a namespace, with the caller's rights and without what they can reach.

    It passes on what the kernel writes, and ends, and all with it, when the kernel does or our input.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the kernel's
    _libc("unshare", _NEWNS)
    _libc("mount", b"none", b"/", None, ctypes.c_ulong(_REC | _SLAVE), None)
    _libc("mount", b"proc", b"/proc", b"proc", ctypes.c_ulong(_NOSUID | _NODEV | _NOEXEC), None)
    awaited = starts(says)
    _become(caller)
    _prctl(_DUMPABLE, 0)  # others of the user's processes do not look into it
    os.chdir("/")
    os.close(written)
    _close_but(0, 2, output, held, says)
    if awaited == _ROOT:  # which says itself that it could not be run
        os.close(says)
    if awaited != _ROOT:  # CRIU, which its user may have stopped
        signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
        signal.alarm(int(_LONGEST))
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    watched = select.poll()
    watched.register(0, 0)  # its end alone
    for descriptor in (output, woken):
        watched.register(descriptor, select.POLLIN)
    while True:
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == _ROOT:
                    os.set_blocking(output, False)
                    with suppress(OSError):
                        while read := os.read(output, 65_536):
                            os.write(2, read)
                    return
                if found[0] == awaited:
                    signal.alarm(0)
                    os.write(says, str(os.waitstatus_to_exitcode(found[1])).encode())
                    os.close(says)
                    if found[1]:
                        return
        for descriptor, _ in watched.poll():
            if descriptor == 0:
                return
            read = os.read(descriptor, 65_536)
            if not read:
                watched.unregister(descriptor)
            elif descriptor == output:
                with suppress(OSError):
                    os.write(2, read)


def pids_in(namespace: str) -> list[int]:
    """Return the processes in a pid namespace, those that have ended and that nobody has seen as well."""
    return [
        int(each)
        for each in (os.listdir("/proc") if namespace else ())
        if each.isdigit() and _namespace(int(each)) == namespace
    ]


def _living(pids: Sequence[int]) -> list[int]:
    """Return those of processes that have not ended."""
    return [pid for pid in pids if _state(pid) not in "ZX"]


def _state(pid: int) -> str:
    with suppress(OSError):
        return _status(pid)["State"][0]
    return "X"


def _namespace(pid: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def _status(pid: int, task: str = "") -> dict[str, list[str]]:
    """Return the lines of a process's status by their names; a process may have any name but a newline's."""
    with open(f"/proc/{pid}{task}/status", "rb") as file:
        lines = [line.partition(b":\t") for line in file.read().split(b"\n")]
    return {name.decode(): value.decode().split() for name, _, value in lines[1:]}


def _verify(namespace: str, caller: Caller) -> None:
    """Raise ``Refused`` where a process of a namespace has more rights than the caller."""
    for pid in pids_in(namespace) if caller.uid else ():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            status = _status(pid)
            if status["State"][0] in ("Z", "X"):
                continue
            same = set(status["Uid"]) == {str(caller.uid)} and set(status["Gid"]) == {str(caller.gid)}
            groups = set(map(int, status["Groups"])) <= {*caller.groups, caller.gid}
            none = all(int(status[f"Cap{which}"][0], 16) == 0 for which in ("Inh", "Prm", "Eff", "Amb"))
            if not (same and groups and none and status["NoNewPrivs"] == ["1"]):
                raise Refused("a process of the kernel has other rights than its user")


def _kernel_of(first: int) -> int:
    """Return the pid of the kernel, as we know it. Raises ``Refused`` where it has ended."""
    pid = first
    for number in (_ROOT, _KERNEL):
        with suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(each) for each in file.read().split()]
            pid = next((each for each in children if _status(each)["NSpid"][-1] == str(number)), 0)
    if not pid or pid == first:
        raise Refused("it ended at once")
    return pid


# -- What is kept of a kernel ------------------------------------------------------


@contextmanager
def _locked(path: str, within: float = 0) -> Iterator[None]:
    """Hold a kernel, which the system lets go however this ends, in so many seconds. Raises ``Refused``."""
    give_up_at = time.monotonic() + within
    while (held := _taken(path, _BUSY)) is None:
        if time.monotonic() >= give_up_at:
            raise Refused("something else is done with that kernel now")
        time.sleep(_LOOK_EVERY)
    try:
        yield
    finally:
        os.close(held)


def _taken(path: str, byte: int) -> int | None:
    """Lock a byte of a kernel's file for as long as what is returned is open; None where another has it."""
    held = os.open(f"{path}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.fcntl(held, fcntl.F_OFD_SETLK, _lock_of(byte))
    except BlockingIOError:
        os.close(held)
        return None
    return held


def _lock_of(byte: int) -> bytes:
    return struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)


def _is_held(path: str, byte: int = _LIVES) -> bool:
    """Whether a kernel lives, or something is done with it. Who asks is in nobody's way."""
    with suppress(FileNotFoundError), open(f"{path}/{_LOCK}", "rb") as file:
        found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _lock_of(byte))
        return bool(struct.unpack("hhqqi4x", found)[0] != fcntl.F_UNLCK)
    return False


def _folder(call: Call, make: bool = False) -> str:
    """Return the folder where kernels sleep, which need not be there. Raises ``Refused``, ``OSError``."""
    folder = there = call.settings.folder
    if make:
        os.makedirs(folder, 0o700, exist_ok=True)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    seen = os.stat(there)
    if call.caller.uid and (why := untrusted(there)):
        raise Refused(why)
    if there == folder and (seen.st_uid != 0 or seen.st_mode & 0o022):
        raise Refused(f"{folder} is not root's alone: chown root {folder}; chmod go-w {folder}")
    return folder


def _path(call: Call, kernel: str, by_root: bool = False) -> str:
    """Return the folder of the caller's kernel, or with ``by_root`` of anybody's. Raises ``Refused``."""
    path = os.path.join(_folder(call), kernel)
    state = _read(path, _STATE)
    mine = (state.get("uid"), state.get("user")) == (call.caller.uid, call.caller.name)
    # Root lets nobody else's kernel go on: it would with root's rights.
    if not state or not (mine or (by_root and call.caller.uid == 0)):
        raise Refused("there is no such kernel of yours: its image was removed.", gone=True)
    return path


def _read(folder: str, name: str) -> dict[str, Any]:
    """Return what a file of ours says; nothing where there is none that can be read."""
    with suppress(OSError, ValueError, RecursionError), open(os.path.join(folder, name), "rb") as file:
        said = json.load(file)
        if isinstance(said, dict) and said.get("version") == VERSION:
            return said
    return {}


def _write(folder: str, name: str, said: dict[str, Any]) -> None:
    """Write a file, on the disk, at once or not at all."""
    path = os.path.join(folder, name)
    with open(f"{path}.new", "w") as file:
        json.dump({"version": VERSION, **said}, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{path}.new", path)
    _sync(folder)


def _sync(folder: str) -> None:
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(held)
    os.close(held)


def _erase(path: str) -> None:
    """Remove a folder with what is in it, which may be deep."""
    folders = True
    while folders and os.path.lexists(path):
        folders = False
        for each in list(os.scandir(path)):
            if not each.is_dir(follow_symlinks=False):
                os.unlink(each.path)
                continue
            folders = True
            for deeper in list(os.scandir(each.path)):
                if deeper.is_dir(follow_symlinks=False):
                    os.rename(deeper.path, f"{path}/{os.urandom(16).hex()}")
                else:
                    os.unlink(deeper.path)
            os.rmdir(each.path)
    with suppress(FileNotFoundError):
        os.rmdir(path)


def _remove(path: str) -> None:
    """Remove all of a kernel that has ended; first what makes it one, or this may end in between."""
    for name in (f"image/{_HEADER}", _STATE):
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(path, name))
    _erase(path)


def _size(*paths: str) -> int:
    """Return the bytes in folders; what goes meanwhile may count or not."""
    size, folders = 0, [*paths]
    while folders:
        with suppress(OSError):
            for each in os.scandir(folders.pop()):
                if each.is_dir(follow_symlinks=False):
                    folders.append(each.path)
                else:
                    with suppress(FileNotFoundError):
                        size += each.stat(follow_symlinks=False).st_blocks * 512
    return size


def _kernels(folder: str) -> list[str]:
    with suppress(FileNotFoundError):
        return [each.path for each in os.scandir(folder) if _ID.fullmatch(each.name)]
    return []


def _sweep(call: Call) -> None:
    """Remove what nobody has asked for in days, and what is left of kernels that ended without an image."""
    for path in _kernels(call.settings.folder):
        with suppress(OSError, Refused):
            if _is_over(call, path):  # else it is in nobody's way
                with _locked(path):
                    if _is_over(call, path):
                        _remove(path)


def _is_over(call: Call, path: str) -> bool:
    age = time.time() - os.stat(path).st_mtime
    if age < _BEGINS_WITHIN or _is_held(path):
        return False
    is_old = age > call.settings.days * 86_400
    return not os.path.isdir(f"{path}/image") or (is_old and not _has_server(path))


# -- The verbs -----------------------------------------------------------------------


def _check(call: Call, _: str) -> dict[str, object]:
    return {"why": _why_not(call), "version": VERSION}


def _launch(call: Call, _: str) -> dict[str, object]:
    argv, cwd, umask = (call.request.get(name) for name in ("argv", "cwd", "umask"))
    environment = call.request.get("env")
    texts = (
        [argv, list(environment) + list(environment.values())] if isinstance(environment, dict) else [None]
    )
    if not argv or not all(isinstance(each, list) and all(map(_is_text, each)) for each in texts):
        raise Refused("argv must be a list of texts, and env an object of them, all without zero bytes")
    assert isinstance(environment, dict)
    if not isinstance(cwd, str) or "\0" in cwd or type(umask) is not int or not 0 <= umask <= 0o777:
        raise Refused("cwd must be a path, and umask a number up to 511")
    folder = _folder(call, make=True)
    _sweep(call)
    kernel = os.urandom(16).hex()
    path = os.path.join(folder, kernel)
    os.mkdir(path, 0o700)
    held = _hold(path)
    output, written = os.pipe()

    def goes() -> None:
        _prctl(_SUBREAPER, 1)
        os.umask(umask)
        os.chdir(cwd)

    def starts(says: int) -> int:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            reaper = [sys.executable, "-I", "-S", "-c", _REAPER, *argv]
            _run(
                sys.executable,
                reaper,
                call.caller,
                (),
                {3: written, 4: says},
                environment=environment,
                start=goes,
            )
        return pid

    try:
        return {"id": kernel, **_begun(call, path, starts, output, written, held, "")}
    except BaseException:
        _remove(path)
        raise


def _is_text(given: object) -> bool:
    return isinstance(given, str) and "\0" not in given


def _hold(path: str) -> int:
    """Hold a kernel for as long as it lives. Raises ``Refused`` where it does already."""
    held = _taken(path, _LIVES)
    if held is None:
        raise Refused("it goes on already.")
    return held


def _begun(
    call: Call, path: str, starts: Callable[[int], int], output: int, written: int, held: int, well: str
) -> dict[str, object]:
    """Run a kernel in namespaces of its own, which has begun once ``well`` is said; return what it is."""
    pipe = os.fstat(written).st_ino
    os.fchown(written, call.caller.uid, call.caller.gid)  # CRIU opens it once more, by /proc
    first, said = _in_namespaces(starts, call.caller, output, written, held)
    try:
        if said != well:
            number, _, text = said.partition(" ")
            errno = int(number) if number.isdigit() else 0
            raise Refused(text or f"it ended with {said}.", errno=errno)  # noqa: TRY301 - as what follows
        kernel = _kernel_of(first)
        _verify(_namespace(first), call.caller)
        run = {"first": first, "started": _started(first), "boot": _boot_id()}
        _write(path, _STATE, {"uid": call.caller.uid, "user": call.caller.name, "pipe": pipe, "run": run})
    except BaseException:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        raise
    return {"pid": kernel, "first": first, "started": run["started"]}


def _dump(call: Call, kernel: str) -> dict[str, object]:
    path = _path(call, kernel)
    with _locked(path):
        if "note" in call.request:
            _keep_note(call, path)
        state = _read(path, _STATE)
        run, header = state["run"], _read(f"{path}/image", _HEADER)
        with _living_kernel(run) as kept:
            if header.get("run") != run:  # or all is done but that it has not ended
                header = _dumped(call, path, state, kept)
            signal.pidfd_send_signal(kept.first, signal.SIGKILL)
            select.select([kept.first], [], [])
    return _told(path, header)


class Living(NamedTuple):
    """A kernel that lives, by descriptors: a number may be another process's by now."""

    #: Of the first process of its namespaces, and of these.
    first: int
    pids: int
    mounts: int
    #: The name of the first, by which its processes are found.
    namespace: str

    @property
    def is_given_up(self) -> bool:
        """Whether it has ended, or its server, meanwhile."""
        ready = select.select([self.first, 0], [], [], 0)[0]
        return self.first in ready or (0 in ready and not os.read(0, 4096))


@contextmanager
def _living_kernel(run: dict[str, Any]) -> Iterator[Living]:
    """Hold a kernel by its first process. Raises ``Refused`` where it has ended, or is none of ours."""
    number, opened = run["first"], []
    try:
        with suppress(ProcessLookupError, FileNotFoundError):
            opened.append(os.pidfd_open(number))
            is_it = (run["started"], run["boot"]) == (_started(number), _boot_id())
            paths = [f"/proc/{number}/ns/{kind}" for kind in ("pid", "mnt") if is_it]
            opened.extend(os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths)
        # While it has not ended its number is nobody else's: so what was opened by that is its own.
        if len(opened) < 3 or select.select(opened[:1], [], [], 0)[0]:
            raise Refused("it has ended")
        first, pids, mounts = opened
        ours, *own = (os.stat(f"/proc/self/ns/{kind}") for kind in ("user", "pid", "mnt"))
        for each in (pids, mounts):
            opened.append(fcntl.ioctl(each, _GET_USERNS))
            is_own = any(os.path.samestat(os.fstat(each), mine) for mine in own)
            if is_own or not os.path.samestat(os.fstat(opened[-1]), ours):
                raise Refused("it is not in namespaces that this program has made")
        yield Living(first, pids, mounts, f"pid:[{os.fstat(pids).st_ino}]")
    finally:
        for each in opened:
            os.close(each)


def _let_go_on(namespace: str) -> None:
    """Let processes go on that CRIU has left stopped."""
    for pid in pids_in(namespace):
        with suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            try:
                if _namespace(pid) == namespace:
                    signal.pidfd_send_signal(process, signal.SIGCONT)
            finally:
                os.close(process)


def _dumped(call: Call, path: str, state: dict[str, Any], kept: Living) -> dict[str, Any]:
    """Write a kernel, and leave it stopped; return what its image says. Raises ``Refused``: it goes on."""
    new, work = f"{path}/image.new", f"{path}/work"
    if os.path.isdir(new):  # one that was killed may have left it stopped, and it would be so in the image
        _let_go_on(kept.namespace)
    _verify(kept.namespace, call.caller)
    for folder in (new, work):
        _erase(folder)
    try:
        most = _reserved(call, path, _needs(pids_in(kept.namespace)))
        for folder in (new, work):
            os.mkdir(folder, 0o700)
            os.chown(folder, call.caller.uid, call.caller.gid)
        _written(call, kept, new, work, most)
        header = _finished(call, new, state, kept)
        _erase(f"{path}/image")
        os.rename(new, f"{path}/image")
        _sync(path)
        os.utime(path)
    except BaseException:
        if os.path.isdir(new):
            _let_go_on(kept.namespace)
            _erase(new)
        raise
    finally:
        _erase(work)
        with suppress(FileNotFoundError):
            os.unlink(f"{path}/{_NEEDS}")
    return header


def _reserved(call: Call, path: str, needs: int) -> int:
    """Note that an image is about to take room, and return how many bytes at most. Raises ``Refused``.

    Nobody waits for anybody: each notes it and looks once more, so of two that are too much one is refused,
    or both. Who would be refused has noted nothing, and is in nobody's way.
    """
    most = needs + needs // 10 + _MARGIN
    _refuse_without_room(call, path, most)
    _write(path, _NEEDS, {"bytes": most})
    _refuse_without_room(call, path, most)
    return most


def _refuse_without_room(call: Call, path: str, most: int) -> None:
    folder, settings = call.settings.folder, call.settings
    free, mine, others = _free(folder), 0, 0
    for each in _kernels(folder):
        takes, is_mine = _size(each), _read(each, _STATE).get("uid") == call.caller.uid
        said = _read(each, _NEEDS).get("bytes", 0) if each != path and _is_held(each, _BUSY) else 0
        free -= max(0, said - takes)
        takes = max(said, takes)
        mine, others = (mine + takes, others) if is_mine else (mine, others + takes)
    bounds = [(free, "the disk has {} for it.")]
    for bound, taken, whose in (
        (settings.all_mib, mine + others, "kernels"),
        (settings.user_mib if call.caller.uid else 0, mine, "your kernels"),
    ):
        if bound:
            text = f"of the {bound} MiB that {whose} may take on disk {{}} are left."
            bounds.append((bound * _MIB - taken, text))
    for room, text in bounds:
        if most > room:
            left = text.format(f"{max(0, room) // _MIB} MiB")
            raise Refused(f"its image may take {most // _MIB} MiB, and {left}")


def _free(folder: str) -> int:
    """Return the bytes that the disk has for images: a twentieth of it stays free."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize - disk.f_blocks * disk.f_frsize // 20


def needs_bytes(pid: int) -> int:
    """Return how many bytes of memory the processes of a kernel have, by the pid of any of them."""
    return _needs(pids_in(_namespace(pid)))


def _needs(pids: Sequence[int]) -> int:
    needs = 0
    for each in pids:
        with suppress(OSError):
            status = _status(each)
            needs += sum(int(status[name][0]) << 10 for name in ("VmRSS", "VmSwap") if name in status)
    return needs


def _written(call: Call, kept: Living, new: str, work: str, most: int) -> None:
    """Let CRIU write a kernel to a folder. Raises ``Refused``."""
    argv = ["criu", "dump", *_way_of(call.caller), *_BOTH, "-t", str(_ROOT), "-o", "log"]
    argv += ["-D", "/proc/self/fd/5", "-W", "/proc/self/fd/6"]
    argv += ["--leave-stopped", "--ghost-limit", str(_GHOST_BYTES)]
    opens = {_CRIU: _criu(call)}
    for number, folder in ((5, new), (6, work)):
        opens[number] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    ours = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    _libc("setns", kept.pids, _NEWPID)
    criu = os.fork()
    if criu == 0:
        try:
            _libc("setns", kept.mounts, _NEWNS)
            dies = lambda: _prctl(_PDEATHSIG, signal.SIGKILL)  # noqa: E731
            _run(_CRIU, argv, call.caller, _OF_CRIU, opens, start=dies)
        finally:
            os._exit(127)
    _libc("setns", ours, _NEWPID)
    process, give_up_at, why = os.pidfd_open(criu), time.monotonic() + _LONGEST, ""
    while not (ready := select.select([process, 0], [], [], _LOOK_EVERY)[0]) or process not in ready:
        if ready and not os.read(0, 4096):
            why = "its server has ended."
        elif _size(new, work) > most:
            why = f"its image takes more than the {most // _MIB} MiB that it may."
        elif time.monotonic() > give_up_at:
            why = f"CRIU has not written it within {_LONGEST:g} seconds."
        if why:
            os.kill(criu, signal.SIGKILL)
            break
    status = os.waitstatus_to_exitcode(os.waitpid(criu, 0)[1])
    if why or status:
        raise Refused(why or _log_says(work, status))


def _log_says(work: str, status: int) -> str:
    with suppress(OSError):
        log = os.open(f"{work}/log", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(log, "rb") as file:
            return f"CRIU says: {first_error(file.read(_LONGEST_LOG))}"
    return f"CRIU says: it ended with {status}."


def _finished(call: Call, new: str, state: dict[str, Any], kept: Living) -> dict[str, Any]:
    """Make the image of a stopped kernel whole: root's, on the disk, with what it says of itself."""
    # Without the first, which is ours, and has the server's log open.
    everyone = [each for each in pids_in(kept.namespace) if each != state["run"]["first"]]
    pids = _living(everyone)
    mapped, opened = _files_of(pids, call.caller)
    os.chown(new, 0, 0)
    os.chmod(new, 0o755)  # noqa: S103 - for the user's CRIU, which comes by no name: the folder above is root's alone
    files = {}
    for name in os.listdir(new):
        file = os.open(f"{new}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        os.fchown(file, 0, 0)
        os.fchmod(file, 0o444)
        os.fsync(file)
        files[name] = _digest(file)
        if kept.is_given_up:
            raise Refused("it was ended meanwhile.")
    header = {
        "run": state["run"],
        "pipe": state["pipe"],
        "since": time.time(),
        "groups": sorted(call.caller.groups),
        "cpu": _cpu(),
        "mapped": mapped,
        "opened": opened,
        "listens": _listens(pids),
        "top": max(_tasks(everyone), default=_KERNEL),
        "files": files,
    }
    _write(new, _HEADER, header)
    # What is stopped ends by nobody but who ends it, and a number may be another process's then.
    if kept.is_given_up or set(pids) - set(_living(pids_in(kept.namespace))):
        raise Refused("it was ended meanwhile.")
    return header


def _restore(call: Call, kernel: str) -> dict[str, object]:
    path = _path(call, kernel)
    image, work = f"{path}/image", f"{path}/work"
    with _locked(path):
        held = _hold(path)
        header = _checked(call, image)
        _erase(work)
        os.mkdir(work, 0o700)
        os.chown(work, call.caller.uid, call.caller.gid)
        output, written = os.pipe()
        argv = ["criu", "restore", *_way_of(call.caller), *_BOTH, "-d", "-o", "log"]
        argv += ["-D", "/proc/self/fd/5", "-W", "/proc/self/fd/6"]
        argv += ["--inherit-fd", f"fd[7]:pipe:[{header['pipe']}]"]
        opens = {_CRIU: _criu(call), 7: written}
        for number, folder in ((5, image), (6, work)):
            opens[number] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

        def starts(_: int) -> int:
            with open("/proc/sys/kernel/ns_last_pid", "w") as file:  # where CRIU is in the way of none
                file.write(str(header["top"] + 64))
            criu = os.fork()
            if criu == 0:
                _run(_CRIU, argv, call.caller, _OF_CRIU, opens)
            return criu

        try:
            begun = _begun(call, path, starts, output, written, held, "0")
        except Refused as error:
            raise Refused(_log_says(work, 1) if os.path.exists(f"{work}/log") else str(error)) from None
        finally:
            _erase(work)
        os.utime(path)
    return begun


def _note(call: Call, kernel: str) -> dict[str, object]:
    path = _path(call, kernel)
    _keep_note(call, path)
    os.utime(path)
    return {}


def _keep_note(call: Call, path: str) -> None:
    """Keep what the caller says of a kernel, and which process of theirs has it."""
    note, server = call.request.get("note"), call.request.get("server", 0)
    is_note = isinstance(note, dict) and not _is_deep(note) and len(json.dumps(note)) <= _LONGEST_NOTE
    if not is_note or type(server) is not int:
        raise Refused(
            f"note must be an object of at most {_LONGEST_NOTE} bytes as JSON and {_DEEPEST} levels, "
            "and server a pid"
        )
    if server and call.caller.uid and not _is_of(server, call.caller):
        raise Refused("server must be the pid of a process of yours")
    _write(path, _NOTE, {"note": note, "server": [server, _started(server), _boot_id()]})


def _is_deep(note: object) -> bool:
    level = [note]
    for _ in range(_DEEPEST):
        inner = [each for each in level if isinstance(each, (dict, list))]
        level = [deeper for each in inner for deeper in (each.values() if isinstance(each, dict) else each)]
    return bool(level)


def _is_of(pid: int, caller: Caller) -> bool:
    with suppress(OSError):
        return _status(pid)["Uid"][0] == str(caller.uid)
    return False


def _has_server(path: str) -> bool:
    """Whether the process lives that has a kernel."""
    server, started, boot = _read(path, _NOTE).get("server", (0, 0, ""))
    return bool(started) and (_started(server), _boot_id()) == (started, boot)


def _remove_image(call: Call, kernel: str) -> dict[str, object]:
    path = _path(call, kernel, by_root=True)
    with _locked(path, _ENDS_WITHIN):  # a dump that is given up ends soon
        if not _is_held(path):
            _remove(path)
        elif os.path.isdir(f"{path}/image"):
            _erase(f"{path}/image.old")
            os.rename(f"{path}/image", f"{path}/image.old")
            _erase(f"{path}/image.old")
    return {}


def _list(call: Call, _: str) -> dict[str, object]:
    found = []
    for path in _kernels(_folder(call)):
        state = _read(path, _STATE)
        if state and call.caller.uid in (0, state["uid"]):
            found.append(_told(path, _read(f"{path}/image", _HEADER)))
    return {"folder": call.settings.folder, "kernels": found}


def _told(path: str, header: dict[str, Any]) -> dict[str, object]:
    """Return what a caller may know of a kernel."""
    told: dict[str, object] = {"id": os.path.basename(path), "uid": _read(path, _STATE).get("uid")}
    told |= {"goes_on": _is_held(path), "note": _read(path, _NOTE).get("note"), "image": None}
    if header:
        size = sum(size for size, _ in header["files"].values())
        told["image"] = {"bytes": size, "since": header["since"], "listens": header["listens"]}
    return told


# -- What an image says of itself, and whether it can go on here ----------------------


def _checked(call: Call, image: str) -> dict[str, Any]:
    """Return what an image says, once it is seen that it is whole and can go on here. Raises ``Refused``."""
    if not os.path.isdir(image):
        raise Refused("its image was removed.", gone=True)
    header, files = _read(image, _HEADER), {}
    if not header:
        raise Refused("what is on disk cannot be read, or another version of this program has written it.")
    for name in os.listdir(image):
        if name != _HEADER:
            files[name] = _digest(os.open(f"{image}/{name}", os.O_RDONLY | os.O_NOFOLLOW))
    if files != header["files"]:
        raise Refused("what is on disk is damaged: it is not what was written.")
    if header["cpu"] != _cpu():
        raise Refused("this machine has another processor than the one on which it fell asleep.")
    if lost := sorted(set(header["groups"]) - set(call.caller.groups)) if call.caller.uid else []:
        raise Refused(
            f"your account is no longer in the group {lost[0]}, in which it was when the kernel fell asleep."
        )
    seen = _seen([*header["mapped"], *header["opened"]], call.caller)
    changed = {path for path, was in header["mapped"].items() if seen[path][:2] != was}
    changed |= {path for path, size in header["opened"].items() if seen[path][:1] != [size]}
    if changed:
        first, *others = sorted(changed)
        named = (
            f"{len(others) + 1} files that it uses (such as {first}) have" if others else f"the file {first}"
        )
        raise Refused(f"{named} changed, or went, while it slept.")
    return header


def _digest(file: int) -> list[object]:
    """Return the bytes of a file and their digest, and close it."""
    digest, size = hashlib.sha256(), 0
    with open(file, "rb", buffering=0) as read:
        while block := read.read(_MIB):
            digest.update(block)
            size += len(block)
    return [size, digest.hexdigest()]


def _seen(paths: Sequence[str], caller: Caller) -> dict[str, list[int]]:
    """Return files' bytes, when they changed, and whether they are regular ones, as the user sees them.

    By a process of its own: a file system of the user's may never answer. Raises ``Refused``.
    """
    told, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _close_but(says)
            _become(caller)
            with open(says, "w") as file:
                json.dump({path: _identity(path) for path in paths}, file)
        finally:
            os._exit(0)
    os.close(says)
    said, give_up_at = b"", time.monotonic() + _SEEN_WITHIN
    with open(told, "rb", buffering=0) as answers:
        while select.select([answers], [], [], max(0, give_up_at - time.monotonic()))[0]:
            if not (read := answers.read(_MIB)):
                os.waitpid(pid, 0)
                with suppress(ValueError):
                    seen: dict[str, list[int]] = json.loads(said)
                    return seen
                raise Refused("the files that it uses could not be looked at.")
            said += read
    os.kill(pid, signal.SIGKILL)  # and is not waited for: the system may wait for the file system
    raise Refused(f"a file system with files that it uses has not answered within {_SEEN_WITHIN:g} seconds.")


def _identity(path: str) -> list[int]:
    with suppress(OSError):
        found = os.stat(path)
        return [found.st_size, found.st_mtime_ns, stat.S_ISREG(found.st_mode)]
    return []


def _files_of(pids: Sequence[int], caller: Caller) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Return the files that processes have mapped, and the regular ones that they have open."""
    mapped: set[str] = set()
    opened: set[str] = set()
    for pid in pids:
        with open(f"/proc/{pid}/maps", "rb") as file:  # a name may hold any character but a newline
            mapped |= {os.fsdecode(line.split(b" ", 5)[-1].strip(b" ")) for line in file.read().split(b"\n")}
        opened |= {os.readlink(each.path) for each in os.scandir(f"/proc/{pid}/fd")}
    paths = [each for each in mapped | opened if each.startswith("/")]
    seen = {path: found for path, found in _seen(paths, caller).items() if found}
    return (
        {path: found[:2] for path, found in seen.items() if path in mapped},
        {path: found[0] for path, found in seen.items() if path in opened and found[2]},
    )


def _listens(pids: Sequence[int]) -> list[list[object]]:
    """Return the addresses and ports at which processes listen, of this machine's network."""
    import socket

    sockets = {os.readlink(each.path) for pid in pids for each in os.scandir(f"/proc/{pid}/fd")}
    found = set()
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")) if pids else ():
        with suppress(FileNotFoundError), open(f"/proc/{pids[0]}/net/{name}") as file:
            for words in map(str.split, file.read().split("\n")[1:-1]):
                if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                    address, _, port = words[1].partition(":")
                    numbers = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                    packed = struct.pack(f"={len(numbers)}I", *numbers)
                    found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return [list(each) for each in sorted(found)]


def _tasks(pids: Sequence[int]) -> Iterator[int]:
    """Yield the numbers of processes' threads in their namespace."""
    for pid in pids:
        for task in os.listdir(f"/proc/{pid}/task"):
            yield int(_status(pid, f"/task/{task}")["NSpid"][-1])


def _started(pid: int) -> int:
    """Return when a process has started, in the system's ticks; 0 where it has ended."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])
    return 0


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _cpu() -> str:
    """Return a digest of what the processor can do."""
    with open("/proc/cpuinfo", "rb") as file:
        lines = file.read().split(b"\n")
    features = next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
    return hashlib.sha256(os.uname().machine.encode() + b" ".join(sorted(features.split()))).hexdigest()


#: Each verb, and whether it names a kernel.
_VERBS = {
    "check": (_check, False),
    "launch": (_launch, False),
    "dump": (_dump, True),
    "restore": (_restore, True),
    "note": (_note, True),
    "remove": (_remove_image, True),
    "list": (_list, False),
}


def perform(arguments: Sequence[str], system: System) -> int:
    """Do one thing for who calls, and say so; return 1 where it is refused, with the reason, and 0 else.

    Of a kernel that was launched or restored it returns once that has ended.
    """
    words, uid = " ".join(arguments)[:80], "unknown"
    try:
        caller = _caller()
        uid = str(caller.uid)
        do, kernel = _asked(arguments)
        request = _request()
        call = Call(system, _settings(system, caller, request), caller, request)
        answer = do(call, kernel)
    except (Refused, OSError) as error:
        _audit(f"{words!a} for uid {uid}: refused")
        return _refuse(error)
    kernel = kernel or str(answer.get("id", ""))
    _audit(f"{arguments[0]} {kernel} for uid {uid}: done")
    _say({"ok": True, **answer})
    if do in (_launch, _restore):
        os.waitpid(int(str(answer["first"])), 0)
        path = os.path.join(call.settings.folder, kernel)
        with suppress(Refused, OSError), _locked(path):
            if not _is_held(path) and not os.path.isdir(f"{path}/image"):
                _remove(path)
    return 0


def _asked(arguments: Sequence[str]) -> tuple[Callable[[Call, str], dict[str, object]], str]:
    """Return what is to be done, and with which kernel; "" for none. Raises ``Refused``."""
    verb, *rest = arguments or ("",)
    do, names_kernel = _VERBS.get(verb, (None, False))
    if do is None or len(rest) != names_kernel:
        raise Refused(f"accepted are {', '.join(_VERBS)}; dump, restore, note and remove with an ID")
    kernel = rest[0] if rest else ""
    if names_kernel and not _ID.fullmatch(kernel):
        raise Refused(f"{kernel[:60]!r} is no kernel's ID")
    return do, kernel


def _audit(line: str) -> None:
    syslog.openlog("gpu-pool-hibernation", syslog.LOG_PID, syslog.LOG_AUTHPRIV)
    syslog.syslog(line)


def _refuse(error: Refused | OSError) -> int:
    """Say why something is not done; return 1."""
    if isinstance(error, Refused):
        _say({"ok": False, "error": str(error), **error.more})
    else:
        _say({"ok": False, "error": error.strerror or str(error), "errno": error.errno or 0})
    return 1


def _say(answer: dict[str, object]) -> None:
    with suppress(OSError):  # whoever asked is gone
        os.write(1, json.dumps(answer).encode() + b"\n")
    os.close(1)


def main(arguments: Sequence[str] | None = None, system: System | None = None) -> int:
    """Do what the command line says; return the exit status."""
    # No terminal stops it, nor its first process: others' kernels wait for nobody's.
    with suppress(PermissionError):
        os.setsid()
    for each in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(each, lambda *_: None)
    return perform(sys.argv[1:] if arguments is None else arguments, system or System())


if __name__ == "__main__":
    sys.exit(main())
