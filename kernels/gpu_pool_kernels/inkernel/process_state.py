"""What modules may have changed of their process as they were imported, and a fork drops or shares.

A process that imports them itself has changed it; of a kernel that is forked, that cannot be said.
All of it, with what else a fork copies, is listed in docs/explanation/templates.md.

Generators of random numbers that kernels of one template have inherited are seeded anew. One that was given
a seed draws the same in all kernels, as it does in those that start cold.
"""

import _random
import contextlib
import ctypes
import gc
import os
import random
import signal
import sys
import tempfile
from typing import Any, Iterator  # noqa: UP035 - for Python 3.8

#: A process is as its parent in these, or it is not what a new child of that parent would be.
STATUS = ("Umask", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")
# prctl(2)
_PR_GET_PDEATHSIG = 2
_PR_GET_CHILD_SUBREAPER = 37
#: Of a mapping in /proc/PID/smaps: no child has it (proc_pid_smaps(5)).
_NOT_COPIED = b"dc"


class ProcessState:
    """What a process was before something was imported, and the temporary files that were made since."""

    def __init__(self) -> None:
        self._before = dict(_state())
        self._names = []  # type: list[str]

    @contextlib.contextmanager
    def noting_files(self) -> "Iterator[None]":
        """Note the names of temporary files and folders that are made in this block."""
        tempfile._name_sequence = _noting(self._names)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            tempfile._name_sequence = None  # type: ignore[attr-defined]

    def doubt(self) -> "str | None":
        """Return what is not as before, or is not in a forked process; None if there is nothing."""
        for what, now in _state():
            if self._before.get(what) != now:
                return f"the preloaded modules have {what}"
        if any(signal.getitimer(which) != (0.0, 0.0) for which in _TIMERS) or _read("/proc/self/timers"):
            return "the preloaded modules have set a timer"
        if any(
            _NOT_COPIED in line.split() for line in _read("/proc/self/smaps").split(b"\n") if _are_flags(line)
        ):
            return "the preloaded modules have memory that no forked process has"
        return self._left_file()

    def _left_file(self) -> "str | None":
        """Return that a temporary file is there: the first kernel that ends may remove it for all."""
        if not self._names:
            return None
        folder = tempfile.gettempdir()
        for entry in os.listdir(folder):  # noqa: PTH208 - as everywhere here
            if any(name in entry for name in self._names):
                return f"the preloaded modules have made {folder}/{entry:.200}"
        return None


_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


def statuses(process: str) -> "dict[str, str]":
    """Return what belongs to a process' user, group and rights; ``process`` is its folder in ``/proc``."""
    pairs = (
        line.decode("ascii", "replace").partition(":") for line in _read(process + "status").split(b"\n")
    )
    return {name: value.strip() for name, _, value in pairs if name in STATUS}


def _state() -> "Iterator[tuple[str, Any]]":
    """Yield what modules may have done, and what shows it."""
    yield "changed the folder of their process", _folder()
    yield "changed the umask, user, groups or rights of their process", statuses("/proc/self/")
    yield "changed the limits of their process", _read("/proc/self/limits")
    yield "changed the priority of their process", _priorities()
    yield "changed the processors of their process", os.sched_getaffinity(0)
    yield "changed the cgroup of their process", _read("/proc/self/cgroup")
    yield "changed the name of their process", (_read("/proc/self/comm"), _read("/proc/self/cmdline"))
    yield "chosen what happens as other processes end", [_asked(what) for what in _ASKED]
    yield "locked memory", [line for line in _read("/proc/self/status").split(b"\n") if b"VmLck" in line]


_ASKED = (_PR_GET_PDEATHSIG, _PR_GET_CHILD_SUBREAPER)


def _asked(what: int) -> int:
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(what, ctypes.byref(found), 0, 0, 0)
    return found.value


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - as Path.cwd, without its object
    except OSError:
        return ""


def _priorities() -> "tuple[Any, ...]":
    return (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), _read("/proc/self/oom_score_adj"))


def _noting(names: "list[str]") -> "Iterator[str]":
    for name in tempfile._RandomNameSequence():  # type: ignore[attr-defined]
        names.append(name)
        yield name


def _are_flags(line: bytes) -> bool:
    return line.startswith(b"VmFlags:")


def _read(file: str) -> bytes:
    """Return what is in a file; nothing where this system does not have it."""
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except OSError:
        return b""


#: A smaller seed of PyTorch's was chosen by somebody: its own has 53 bits from the system.
_LEAST_OF_TORCH = 1 << 32
#: How many objects are asked at once for what they refer to.
_AT_ONCE = 10_000


class Seeds:
    """What was given a seed while modules were imported, and what the system gave."""

    def __init__(self) -> None:
        #: Python's generators that were given one.
        self.given = []  # type: list[random.Random]
        #: Whether the generator of the functions of ``random`` was.
        self.shared_is_seeded = False
        #: What Python has drawn from the system.
        self.drawn = set()  # type: set[int]

    @contextlib.contextmanager
    def noting(self) -> "Iterator[None]":
        """Note what happens in this block."""
        original, shared, system = random.Random.seed, random.seed, getattr(random, "_urandom", None)

        def seed(generator: random.Random, a: Any = None, *arguments: Any, **named: Any) -> None:
            original(generator, a, *arguments, **named)
            if a is not None:
                self.given.append(generator)

        def seed_shared(a: Any = None, *arguments: Any, **named: Any) -> None:
            shared(a, *arguments, **named)
            self.shared_is_seeded = a is not None

        def draw(count: int) -> bytes:
            drawn = os.urandom(count)
            self.drawn.add(int.from_bytes(drawn, "big"))
            return drawn

        random.Random.seed, random.seed = seed, seed_shared  # type: ignore[assignment,method-assign]
        if system is not None:
            random._urandom = draw  # type: ignore[attr-defined]
        try:
            yield
        finally:
            random.Random.seed, random.seed = original, shared  # type: ignore[method-assign]
            if system is not None:
                random._urandom = system  # type: ignore[attr-defined]

    def without(self) -> "list[Any]":
        """Return the generators that were given no seed, and numpy's sequences of seeds."""
        given = {id(each) for each in self.given}
        kinds = {}  # type: dict[int, bool]
        found = []
        for each in gc.get_objects():
            # Its type, since an object may do anything when it is asked for its class.
            kind = type(each)
            if id(kind) not in kinds:
                kinds[id(kind)] = _is_of_generators(kind)
            if kinds[id(kind)] and id(each) not in given:
                found.append(each)
        return [each for each in found if isinstance(each, random.Random) or not self._has_own(each)]

    def doubt(self) -> "str | None":
        """Return what cannot be seeded anew, or must not be; None if there is nothing."""
        numpy, torch = sys.modules.get("numpy.random.mtrand"), sys.modules.get("torch")
        if self.shared_is_seeded:
            return "the preloaded modules have given the random module a seed"
        if numpy is not None and self._has_own(numpy._rand._bit_generator):
            return "the preloaded modules have given numpy.random a seed"
        if torch is not None:
            try:
                seed = torch.default_generator.initial_seed()
            except AttributeError:  # it is another module of that name, or is still being imported
                return "it is not known if the preloaded modules have given PyTorch a seed"
            if seed < _LEAST_OF_TORCH:
                return "the preloaded modules have given PyTorch a seed"
        if _has_bare_generator():
            return (
                "the preloaded modules keep a _random.Random, of which it is not known if it was given a seed"
            )
        return None

    def _has_own(self, candidate: Any) -> bool:
        """Whether what is numpy's was given a seed; else Python has drawn one from the system for it."""
        sequence = getattr(candidate, "seed_seq", getattr(candidate, "_seed_seq", candidate))
        entropy = getattr(sequence, "entropy", None)
        return not isinstance(entropy, int) or entropy not in self.drawn


def draw_anew(generators: "list[Any]") -> None:
    """Seed these generators, and those of Python and PyTorch that every program uses; make secrets anew."""
    random.seed()
    for each in generators:
        if isinstance(each, random.Random):
            each.seed()
        elif hasattr(each, "n_children_spawned"):
            each.__init__(
                spawn_key=each.spawn_key, pool_size=each.pool_size, n_children_spawned=each.n_children_spawned
            )
        else:
            each.state = type(each)().state
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)
    uuid = sys.modules.get("uuid")
    # On a machine without network cards, the node is a random number (RFC 9562, 6.10).
    if uuid is not None and (getattr(uuid, "_node", None) or 0) >> 40 & 1:
        uuid._node = None  # type: ignore[attr-defined]


def _is_of_generators(kind: type) -> bool:
    """Whether its objects are generators of random numbers: Python's, or numpy's and what seeds those."""
    if issubclass(kind, random.Random):
        return not issubclass(kind, random.SystemRandom)
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and issubclass(kind, (numpy.BitGenerator, numpy.SeedSequence))


def _has_bare_generator() -> bool:
    """Whether there is one of the type below ``random.Random``, of which the collector is not told."""
    if _has_no_unknown_references(_random.Random):
        return False
    objects = gc.get_objects()
    for start in range(0, len(objects), _AT_ONCE):
        found = gc.get_referents(*objects[start : start + _AT_ONCE])
        while found:
            each = found.pop()
            kind = type(each)
            if issubclass(kind, _random.Random) and not issubclass(kind, random.Random):
                return True
            # The collector is not told either of what holds nothing else.
            if kind in (dict, tuple) and not gc.is_tracked(each):
                found.extend(gc.get_referents(each))
    return False


class _WithoutObjects:
    """A type of which there are none."""


def _has_no_unknown_references(kind: type) -> bool:
    """Whether the collector knows of all that refers to a type, so that there are no objects of it.

    It does not know of the objects, if they hold nothing else. No where objects do not count, as those of
    Pythons before 3.10.
    """
    before = sys.getrefcount(kind)
    one = kind()
    counts = sys.getrefcount(kind) == before + 1
    del one
    none = _WithoutObjects  # a variable of this function refers to it as well
    return counts and _unknown_references(kind) <= _unknown_references(none)


def _unknown_references(kind: type) -> int:
    return sys.getrefcount(kind) - len(gc.get_referrers(kind))
