"""A kernel's processes, as ``/proc`` shows them."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from .running import KERNEL, ROOT
from .values import Refusal, SudoUser

_GET_USERNS = 0xB701
#: From socket(2).
_INET, _INET6 = 2, 10
#: By tcp_states.h: LISTEN; ESTABLISHED, SYN_SENT, FIN_WAIT1 and 2, CLOSE_WAIT, LAST_ACK, CLOSING.
_LISTENS, _CONNECTED = "0A", ("01", "02", "04", "05", "08", "09", "0B")


def _address(family: int, packed: bytes) -> str:
    """Return an address as text, by inet_ntop(3): ``socket`` would take long to import."""
    text = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).inet_ntop(family, packed, text, ctypes.c_uint(len(text)))
    return text.value.decode()


def pids_in(namespace: str) -> list[int]:
    """Return the processes in a pid namespace, those that have ended and that nobody has seen as well."""
    return [
        int(each)
        for each in (os.listdir("/proc") if namespace else ())
        if each.isdigit() and namespace_of(int(each)) == namespace
    ]


def living(pids: Sequence[int]) -> list[int]:
    """Return those of processes that have not ended."""
    return [pid for pid in pids if _state(pid) not in "ZX"]


def _state(pid: int) -> str:
    with suppress(OSError):
        return status_of(pid)["State"][0]
    return "X"


def namespace_of(pid: int) -> str:
    """Return the name of a process's pid namespace; empty where it has ended."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def status_of(pid: int, task: str = "") -> dict[str, list[str]]:
    """Return the lines of a process's status by their names; a process may have any name but a newline's."""
    with open(f"/proc/{pid}{task}/status", "rb") as file:
        lines = [line.partition(b":\t") for line in file.read().split(b"\n")]
    return {name.decode(): value.decode().split() for name, _, value in lines[1:]}


def verify(namespace: str, caller: SudoUser) -> None:
    """Raise ``Refusal`` where a process of a namespace has more rights than the caller."""
    for pid in pids_in(namespace) if caller.uid else ():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            status = status_of(pid)
            if status["State"][0] in ("Z", "X"):
                continue
            same = set(status["Uid"]) == {str(caller.uid)} and set(status["Gid"]) == {str(caller.gid)}
            groups = set(map(int, status["Groups"])) <= {*caller.groups, caller.gid}
            none = all(int(status[f"Cap{which}"][0], 16) == 0 for which in ("Inh", "Prm", "Eff", "Amb"))
            if not (same and groups and none and status["NoNewPrivs"] == ["1"]):
                raise Refusal("a process of the kernel has other rights than its user")


def kernel_of(first: int) -> int:
    """Return the pid of the kernel, as we know it. Raises ``Refusal`` where it has ended."""
    pid = first
    for number in (ROOT, KERNEL):
        with suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(each) for each in file.read().split()]
            pid = next((each for each in children if status_of(each)["NSpid"][-1] == str(number)), 0)
    if not pid or pid == first:
        raise Refusal("it ended at once")
    return pid


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

    def end(self, within: float | None = None) -> None:
        """End it, and return once it has ended, or after so many seconds: its user may hold that up."""
        signal.pidfd_send_signal(self.first, signal.SIGKILL)
        select.select([self.first], [], [], within)


@contextmanager
def living_kernel(run: dict[str, Any]) -> Iterator[Living]:
    """Hold a kernel by its first process. Raises ``Refusal`` where it has ended, or is none of ours."""
    number, opened = run["first"], []
    try:
        with suppress(ProcessLookupError, FileNotFoundError):
            opened.append(os.pidfd_open(number))
            is_it = (run["started"], run["boot"]) == (start_of(number), boot_id())
            paths = [f"/proc/{number}/ns/{kind}" for kind in ("pid", "mnt") if is_it]
            opened.extend(os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths)
        # While it has not ended its number is nobody else's: so what was opened by that is its own.
        if len(opened) < 3 or select.select(opened[:1], [], [], 0)[0]:
            raise Refusal("it has ended")
        first, pids, mounts = opened
        ours, *own = (os.stat(f"/proc/self/ns/{kind}") for kind in ("user", "pid", "mnt"))
        for each in (pids, mounts):
            opened.append(fcntl.ioctl(each, _GET_USERNS))
            is_own = any(os.path.samestat(os.fstat(each), mine) for mine in own)
            if is_own or not os.path.samestat(os.fstat(opened[-1]), ours):
                raise Refusal("it is not in namespaces that this program has made")
        yield Living(first, pids, mounts, f"pid:[{os.fstat(pids).st_ino}]")
    finally:
        for each in opened:
            os.close(each)


def let_go_on(namespace: str) -> None:
    """Let processes go on that CRIU has left stopped."""
    for pid in pids_in(namespace):
        with suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            try:
                if namespace_of(pid) == namespace:
                    signal.pidfd_send_signal(process, signal.SIGCONT)
            finally:
                os.close(process)


def needs_bytes(pid: int) -> int:
    """Return how many bytes of memory the processes of a kernel have, by the pid of any of them."""
    return needs_of(pids_in(namespace_of(pid)))


def needs_of(pids: Sequence[int]) -> int:
    """Return how many bytes of memory processes have together."""
    needs = 0
    for each in pids:
        with suppress(OSError):
            status = status_of(each)
            needs += sum(int(status[name][0]) << 10 for name in ("VmRSS", "VmSwap") if name in status)
    return needs


def listens(pids: Sequence[int]) -> list[list[object]]:
    """Return the addresses and ports at which processes listen, of this machine's network."""
    return [list(each) for each in sorted({here for state, here, _ in _tcp(pids) if state == _LISTENS})]


def connected(pids: Sequence[int]) -> list[tuple[str, int]]:
    """Return the addresses and ports to which processes have connections, their own ports as well."""
    return sorted({there for state, _, there in _tcp(pids) if state in _CONNECTED})


def _tcp(pids: Sequence[int]) -> Iterator[tuple[str, tuple[str, int], tuple[str, int]]]:
    """Yield the state of each TCP socket of processes, and its address and port here and there."""
    sockets = {os.readlink(each.path) for pid in pids for each in os.scandir(f"/proc/{pid}/fd")}
    for family, name in ((_INET, "tcp"), (_INET6, "tcp6")) if pids else ():
        with suppress(FileNotFoundError), open(f"/proc/{pids[0]}/net/{name}") as file:
            for words in map(str.split, file.read().split("\n")[1:-1]):
                if f"socket:[{words[9]}]" in sockets:
                    yield words[3], _end_of(family, words[1]), _end_of(family, words[2])


def _end_of(family: int, said: str) -> tuple[str, int]:
    """Return an address and a port, as ``/proc/net`` says them."""
    address, _, port = said.partition(":")
    numbers = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
    return _address(family, struct.pack(f"={len(numbers)}I", *numbers)), int(port, 16)


def tasks(pids: Sequence[int]) -> Iterator[int]:
    """Yield the numbers of processes' threads in their namespace."""
    for pid in pids:
        for task in os.listdir(f"/proc/{pid}/task"):
            yield int(status_of(pid, f"/task/{task}")["NSpid"][-1])


def start_of(pid: int) -> int:
    """Return when a process has started, in the system's ticks; 0 where it has ended."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])
    return 0


def boot_id() -> str:
    """Return the system's id since it was started."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
