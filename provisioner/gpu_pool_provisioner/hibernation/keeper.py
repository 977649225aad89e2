"""Holds one kernel that may hibernate: runs it in a pid namespace of its own, and ends it with its server.

A program of its own, by the standard library alone, with nothing imported that it does not need: there is one
for each such kernel. Its standard input is a pipe that its server holds: at its end the kernel is killed. It
writes one line of JSON to its standard output: the pids of the kernel and of the first process of its
namespace, and its output's pipe, or an error. What the kernel writes to its standard output and error passes
through to this program's standard error. It ends when the kernel does.

Usage: ``keeper.py launch COMMAND…`` or ``keeper.py restore PIPE CRIU-COMMAND…``, where PIPE is that of the
kernel's output when it went to disk, and CRIU's command lacks the file for the pid, which is added.
What else is open when it begins, the hold on an image, stays so until it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

#: unshare(2): the next child, and all of its own, in a pid namespace of its own.
_CLONE_NEWPID = 0x20000000
#: prctl(2): whoever a child of ours leaves behind becomes ours.
_PR_SET_CHILD_SUBREAPER = 36
_MOST = 65_536
#: The pid of a kernel in its namespace, where one process is before it.
_KERNEL = b"2"


def main(arguments: Sequence[str]) -> int:
    """Run a kernel until its end, or its server's."""
    way, *rest = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the kernel's
    output, written = os.pipe()
    try:
        first = _launched(rest, written) if way == "launch" else _restored(rest[0], rest[1:], written)
        pid = _kernel_of(first)
    except OSError as error:
        _say({"errno": error.errno or 0, "error": error.strerror or str(error)})
        return 1
    try:
        _say({"pid": pid, "first": first, "pipe": os.fstat(written).st_ino})
    except OSError:  # its server is gone, and would not hear of it
        os.kill(first, signal.SIGKILL)
    os.close(written)
    _until_its_end(first, output)
    return 0


def _say(what: dict[str, object]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")
    os.close(1)


def _libc(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _launched(command: Sequence[str], written: int) -> int:
    """Return the pid of the first process of a kernel that has begun to run its command."""
    began, failed = os.pipe()
    _libc("unshare", _CLONE_NEWPID)
    first = os.fork()
    if first == 0:
        try:
            _be_first(command, written, failed)
        finally:
            os._exit(127)
    os.close(failed)
    told = os.read(began, 32)
    os.close(began)
    if told:
        raise OSError(int(told), os.strerror(int(told)), command[0])
    return first


def _be_first(command: Sequence[str], written: int, failed: int) -> None:
    """Run the kernel, and reap what it and others leave behind, until it has ended.

    The first process of a pid namespace does not end by a signal that it does not handle, and children whose
    parents have ended are its own: no kernel expects either of itself.
    """
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    kernel = os.fork()
    if kernel == 0:
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            for descriptor, number in ((nothing, 0), (written, 1), (written, 2)):
                os.dup2(descriptor, number)
            os.execvp(command[0], list(command))  # noqa: S606 - there is no shell
        except OSError as error:
            os.write(failed, str(error.errno).encode())
        finally:
            os._exit(127)
    # It has nothing open that would have to be as it was when it wakes.
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    while os.wait()[0] != kernel:
        pass


def _kernel_of(first: int) -> int:
    """Return the pid of the kernel whose first process is given. Raises ``OSError`` where it has ended."""
    with open(f"/proc/{first}/task/{first}/children") as file:
        children = file.read().split()
    for child in children:
        with suppress(FileNotFoundError), open(f"/proc/{child}/status", "rb") as file:
            line = next(each for each in file if each.startswith(b"NSpid:"))
            if line.split()[-1] == _KERNEL:
                return int(child)
    raise OSError(0, "it ended at once")


def _restored(pipe: str, command: Sequence[str], written: int) -> int:
    """Return the pid of the first process of a kernel that CRIU has restored. Raises ``OSError``."""
    _libc("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for each in os.scandir("/proc/self/fd"):  # what holds the image is for this program alone
        with suppress(OSError):
            os.set_inheritable(int(each.name), int(each.name) in (0, 1, 2, written))
    argv = [*command, "--inherit-fd", f"fd[{written}]:pipe:[{pipe}]"]
    nothing = os.open(os.devnull, os.O_RDWR)
    pid = os.posix_spawn(
        argv[0], argv, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, nothing, n) for n in (0, 1, 2)]
    )
    _, status = os.waitpid(pid, 0)
    if status:
        raise OSError(0, f"criu ended with status {os.waitstatus_to_exitcode(status)}")
    pidfile = command[command.index("--pidfile") + 1]
    with open(pidfile) as file:
        return int(file.read())


def _until_its_end(first: int, output: int) -> None:
    """Pass on what the kernel writes until it has ended; kill it once its server is gone."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    watched = [0, output, woken]
    while True:
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                if found == first:
                    return
        for descriptor in select.select(watched, [], [])[0]:
            told = os.read(descriptor, _MOST)
            if descriptor == output and told:
                with suppress(OSError):
                    os.write(2, told)
            if told:
                continue
            watched.remove(descriptor)
            if descriptor == 0:
                os.kill(first, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
