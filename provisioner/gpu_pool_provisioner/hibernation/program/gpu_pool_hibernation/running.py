"""Running things as the user, in namespaces of their own.

What runs here after a fork runs with the user's rights, or in mounts that are theirs: it imports nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress

from .values import SudoUser

_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
#: Seconds that CRIU may take at most.
LONGEST = 600.0
#: From unshare(2), mount(2), ioctl_ns(2), prctl(2), capabilities(7) and the system's capability.h.
NEWPID, NEWNS = 0x20000000, 0x00020000
_NOSUID, _NODEV, _NOEXEC, _REC, _SLAVE = 2, 4, 8, 0x4000, 0x80000
PDEATHSIG, _DUMPABLE, _KEEPCAPS, _CAPBSET_DROP = 1, 4, 8, 24
SUBREAPER, _NO_NEW_PRIVS, _AMBIENT = 36, 38, 47
_SYS_PTRACE, SYS_ADMIN, _CHECKPOINT_RESTORE = 19, 21, 40
OF_CRIU = (_SYS_PTRACE, _CHECKPOINT_RESTORE)
#: The pids in a namespace: of what CRIU writes, the kernel's parent; and of the kernel.
ROOT, KERNEL = 2, 3


def libc(name: str, *arguments: object) -> None:
    """Call a function of the system's library. Raises ``OSError``."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def prctl(option: int, *values: int) -> None:
    """Change what this process may and does. Raises ``OSError``."""
    libc("prctl", option, *(ctypes.c_ulong(each) for each in (*values, 0, 0, 0, 0)[:4]))


def become(caller: SudoUser, keeps: Sequence[int] = ()) -> None:
    """Become the user for good, with no capability but those. Root stays what it is."""
    if caller.uid == 0:
        return
    prctl(_KEEPCAPS, 1 if keeps else 0)
    with open("/proc/sys/kernel/cap_last_cap", "rb") as file:
        last = int(file.read())
    for each in range(last + 1):
        if each not in keeps:
            prctl(_CAPBSET_DROP, each)
    os.setgroups(caller.groups)
    os.setresgid(caller.gid, caller.gid, caller.gid)
    os.setresuid(caller.uid, caller.uid, caller.uid)
    has = sum(1 << each for each in keeps)
    low, high = has & 0xFFFFFFFF, has >> 32
    libc("capset", struct.pack("II", 0x20080522, 0), struct.pack("6I", low, low, low, high, high, high))
    for each in keeps:
        prctl(_AMBIENT, 2, each)
    prctl(_NO_NEW_PRIVS, 1)


def execute(
    program: str | int,
    argv: Sequence[str],
    caller: SudoUser,
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
        become(caller, keeps)
        start()
        os.execve(program, list(argv), environment)  # noqa: S606 - there is no shell
    except OSError as error:
        if 4 in opens:
            os.write(4, f"{error.errno} {error.strerror}".encode())
    finally:
        os._exit(127)


def in_namespaces(
    starts: Callable[[int], int], caller: SudoUser, output: int, written: int, held: int
) -> tuple[int, str]:
    """Run something in namespaces of pids and mounts of their own, which end with it and with our input.

    ``starts`` forks it there, and returns the pid of what is waited for first. Returns the pid of the first
    process, and what it says of that: empty for a program of ours that was run, or CRIU's status.
    """
    told, says = os.pipe()
    libc("unshare", NEWPID)
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


def close_but(*kept: int) -> None:
    """Close all descriptors but those."""
    for each in os.listdir("/proc/self/fd"):
        if int(each) not in kept:
            with suppress(OSError):
                os.close(int(each))


def _be_first(
    starts: Callable[[int], int], caller: SudoUser, output: int, written: int, held: int, says: int
) -> None:
    """Be the first process of a namespace, with the caller's rights and without what they can reach.

    It passes on what the kernel writes, and ends, and all with it, when the kernel does or our input.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the kernel's
    libc("unshare", NEWNS)
    libc("mount", b"none", b"/", None, ctypes.c_ulong(_REC | _SLAVE), None)
    libc("mount", b"proc", b"/proc", b"proc", ctypes.c_ulong(_NOSUID | _NODEV | _NOEXEC), None)
    awaited = starts(says)
    become(caller)
    prctl(_DUMPABLE, 0)  # others of the user's processes do not look into it
    os.chdir("/")
    os.close(written)
    close_but(0, 2, output, held, says)
    if awaited == ROOT:  # which says itself that it could not be run
        os.close(says)
    if awaited != ROOT:  # CRIU, which its user may have stopped
        signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
        signal.alarm(int(LONGEST))
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
                if found[0] == ROOT:
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
