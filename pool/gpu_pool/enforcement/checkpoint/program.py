"""The program that calls the driver: ``python program.py --idle SECONDS``, run by :mod:`.driver_worker`.

It imports hardly anything of this project, so that it starts fast. Its standard input is a
socket, from which it takes one job after another: each a packet with a JSON list of
arguments, such as ``["suspend", "--limit", "30", "--lock-ms", "5000", "12"]``, and with open
files, which it keeps until the job is done. Nothing else reaches it. It ends when nothing is
asked for so many seconds, when whoever asks has ended, and when it is asked for what cannot be.

On its standard output it prints one JSON object a line, for each job:

``{"begun": true}``
    first;
``{"pid": 12, "step": "lock", "state": "locked"}``
    after each step: the state of the process as the driver has it;
``{"used": {"GPU-…": 512}, "computing": [12]}``
    what the processes hold, in MiB by the UUID of a GPU, and which of them hold it (``measure``);
``{"error": "…"}``
    why it stops here (``suspend``), or goes on with the next process (``restore``);
``{"done": 0}``
    last: 0 all was done; 1 not, and ``error`` says why; 3 nothing was done for want of device memory.

After ``--limit`` seconds the kernel ends it (SIGALRM), wherever it is.
Each process is then in one of the driver's states, and ``restore`` brings it
back from any but ``failed``.

The driver's calls go through NVIDIA's cuda-bindings and are described in
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__CHECKPOINT.html:
running → lock → locked → checkpoint → checkpointed → restore → locked → unlock → running.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

#: What a job ends with when nothing was done, for want of device memory.
NO_FREE_MEMORY: Final = 3
#: CUDA 12.8, which came with driver 570: the first that has all these calls.
_FIRST_VERSION: Final = 12_080
_STATES: Final = {0: "running", 1: "locked", 2: "checkpointed", 3: "failed"}
#: What a suspended process may still hold, in MiB: NVIDIA says that it holds nothing.
_LEFT_MIB: Final = 64
#: Seconds in which NVML sees that memory is free.
_SEEN_WITHIN: Final = 5.0
_LOOK_EVERY: Final = 0.1
_MIB: Final = 1 << 20
#: Linux gives no pid above this (proc(5), pid_max), and nothing waits for longer than a day.
_MOST_PID: Final = 1 << 22
_MOST_SECONDS: Final = 86_400
#: A socket takes no packet as large as this.
_MOST_BYTES: Final = 1 << 20
#: Files that come with a job.
_MOST_FILES: Final = 4


class DriverRefused(Exception):
    """The driver, or NVML, would not; ``str()`` says why."""


def main() -> int:
    """Do one job after the other; return the exit status once there is none any more."""
    options = argparse.ArgumentParser(allow_abbrev=False)
    options.add_argument("--idle", type=_seconds, required=True)
    idle, jobs = options.parse_args().idle, job_parser()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with socket.socket(fileno=sys.stdin.fileno()) as asker:
        asked = select.poll()
        asked.register(asker, select.POLLIN)
        while asked.poll(idle * 1000):
            job, files, _, _ = socket.recv_fds(asker, _MOST_BYTES, _MOST_FILES, socket.MSG_CMSG_CLOEXEC)
            if not job:
                break
            _do(jobs.parse_args(json.loads(job)), files)
    return 0


def _do(job: argparse.Namespace, files: Sequence[int]) -> None:
    signal.alarm(job.limit)
    _say(begun=True)
    try:
        code = int(job.verb(job))
    except (ImportError, DriverRefused) as error:
        code = _stop(error)
    for file in files:
        os.close(file)
    # Whoever asked may let others at what these files lock as soon as this is said.
    _say(done=code)
    signal.alarm(0)


def _say(**fields: Any) -> None:
    # Where nobody listens any more, what was begun is done all the same.
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(fields), flush=True)


def _is_alone() -> bool:
    """Whether the process that asked has ended."""
    watched = select.poll()
    watched.register(sys.stdin.fileno(), 0)
    return bool(watched.poll(0))


# ---- What it may be asked ----


def job_parser() -> argparse.ArgumentParser:
    """Return what reads the arguments of a job; ends this program if they make no sense."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    verbs = parser.add_subparsers(required=True)
    for verb in (_probe, _measure, _suspend, _restore):
        sub = verbs.add_parser(verb.__name__.strip("_"), allow_abbrev=False)
        sub.set_defaults(verb=verb)
        sub.add_argument("--limit", type=_positive, required=True, help="seconds")
        if verb is not _probe:
            sub.add_argument("pids", type=_pid, nargs="+", metavar="PID")
        if verb is _suspend:
            sub.add_argument("--lock-ms", type=_positive, required=True)
        if verb is _restore:
            sub.add_argument("--free", type=_uuid_and_mib, action="append", default=[], metavar="UUID=MIB")
            sub.add_argument("--wait", type=_seconds, default=0.0, help="seconds to wait for that")
    return parser


def _positive(text: str, most: int = (1 << 31) - 1) -> int:
    digits = len(text) <= len(str(most)) and text.isascii() and text.isdigit()
    if not (digits and 0 < int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text[:60]!a} is not an integer from 1 to {most}")
    return int(text)


def _pid(text: str) -> int:
    return _positive(text, _MOST_PID)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= _MOST_SECONDS:  # false for what is no number (nan)
            return float(text)
    raise argparse.ArgumentTypeError(f"{text[:60]!a} is not a number from 0 to {_MOST_SECONDS}")


def _uuid_and_mib(text: str) -> tuple[str, int]:
    uuid, _, mib = text.partition("=")
    if not re.fullmatch(r"[0-9A-Za-z/-]{1,100}", uuid):
        raise argparse.ArgumentTypeError(f"{uuid[:60]!a} is not a UUID")
    return uuid, _positive(mib)


# ---- The verbs ----


def _probe(_given: argparse.Namespace) -> int:
    """Say whether the driver can be asked at all: about this process itself."""
    found = _driver().state(os.getpid())
    return 0 if found == "running" else _stop(f"the driver says that this process is {found}")


def _measure(given: argparse.Namespace) -> int:
    held = _held(given.pids)
    _say(used=_sums_mib(held), computing=sorted({pid for each in held.values() for pid in each}))
    return 0


def _suspend(given: argparse.Namespace) -> int:
    """Lock all, so that it shows whether one is busy; then move the memory of all."""
    driver = _driver()
    try:
        for pid in given.pids:
            driver.step(pid, "lock", lambda pid: driver.lock(pid, given.lock_ms), "locked")
        for pid in given.pids:
            driver.step(pid, "checkpoint", driver.checkpoint, "checkpointed")
        return 0 if _is_free(given.pids) else _stop("its device memory is still taken")
    finally:
        if _is_alone():
            # Nobody is left who could park the lease, or bring its processes back.
            for pid in given.pids:
                _bring_back(driver, pid)


def _restore(given: argparse.Namespace) -> int:
    """Bring each process back, from whatever state it is in, before the next one is asked about.

    Processes that talk to each other may hold up every question about one of
    them while another is locked (https://github.com/NVIDIA/cuda-checkpoint/issues/30).
    """
    driver = _driver()
    lack = _lack(given.pids, dict(given.free), given.wait)
    if lack:
        _stop(lack)
        return NO_FREE_MEMORY
    return max([_bring_back(driver, pid) for pid in given.pids])


def _bring_back(driver: _Driver, pid: int) -> int:
    try:
        if driver.state(pid) == "checkpointed":
            driver.step(pid, "restore", driver.restore, "locked")
        if driver.state(pid) == "locked":
            driver.step(pid, "unlock", driver.unlock, "running")
        _say(pid=pid, step="state", state=driver.state(pid))
    except DriverRefused as error:
        return _stop(error)
    return 0


def _stop(why: object) -> int:
    _say(error=str(why))
    return 1


# ---- The driver ----


class _Driver:
    """CUDA, initialised in this process: restoring needs that, or persistence mode."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._cuda = driver
        self._call(driver.cuInit, 0)
        (version,) = self._call(driver.cuDriverGetVersion)
        if version < _FIRST_VERSION:
            raise DriverRefused(
                f"the driver is for CUDA {version // 1000}.{version % 1000 // 10}, not 12.8 or newer"
            )

    def state(self, pid: int) -> str:
        (found,) = self._call(self._cuda.cuCheckpointProcessGetState, pid)
        return _STATES.get(int(found), f"in state {int(found)}")

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Let the process make no CUDA calls any more; wait so long for what it has submitted."""
        arguments = self._cuda.CUcheckpointLockArgs()
        arguments.timeoutMs = timeout_ms
        self._call(self._cuda.cuCheckpointProcessLock, pid, arguments)

    def checkpoint(self, pid: int) -> None:
        self._call(self._cuda.cuCheckpointProcessCheckpoint, pid, None)

    def restore(self, pid: int) -> None:
        self._call(self._cuda.cuCheckpointProcessRestore, pid, None)

    def unlock(self, pid: int) -> None:
        self._call(self._cuda.cuCheckpointProcessUnlock, pid, None)

    def step(self, pid: int, name: str, call: Callable[[int], None], after: str) -> None:
        """Make a call, and look whether it did what it says."""
        try:
            call(pid)
        except DriverRefused as error:
            raise DriverRefused(f"{name} of process {pid}: {error}") from error
        found = self.state(pid)
        _say(pid=pid, step=name, state=found)
        if found != after:
            raise DriverRefused(f"{name} of process {pid}: the driver reports success, but it is {found}")

    def _call(self, function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
        try:
            code, *values = function(*arguments)
        except RuntimeError as error:  # no driver, or one without this call
            raise DriverRefused(str(error)) from error
        if code != self._cuda.CUresult.CUDA_SUCCESS:
            raise DriverRefused(getattr(code, "name", str(code)))
        return tuple(values)


@functools.cache
def _driver() -> _Driver:
    """Initialise CUDA, once; it is tried again after it has failed."""
    return _Driver()


# ---- Device memory ----


def _is_free(pids: Sequence[int]) -> bool:
    give_up_at = time.monotonic() + _SEEN_WITHIN
    while (left := sum(_used_mib(pids).values())) > _LEFT_MIB and time.monotonic() < give_up_at:
        time.sleep(_LOOK_EVERY)
    return left <= _LEFT_MIB


def _lack(pids: Sequence[int], wanted: dict[str, int], wait: float) -> str:
    """Wait until these processes have, or could have, so many MiB on these GPUs; return what is missing.

    A restoration without free memory must not be tried: it cannot be tried again after
    it failed (https://github.com/NVIDIA/cuda-checkpoint/issues/44).
    """
    give_up_at = time.monotonic() + wait
    while short := _missing(pids, wanted):
        if time.monotonic() >= give_up_at:
            return "; ".join(
                f"{mib} MiB of {wanted[uuid]} are missing on {uuid}" for uuid, mib in short.items()
            )
        time.sleep(_LOOK_EVERY)
    return ""


def _missing(pids: Sequence[int], wanted: dict[str, int]) -> dict[str, int]:
    held, free = _used_mib(pids), _free_mib(wanted)
    missing = {uuid: mib - held.get(uuid, 0) - free[uuid] for uuid, mib in wanted.items()}
    return {uuid: mib for uuid, mib in missing.items() if mib > 0}


def _used_mib(pids: Collection[int]) -> dict[str, int]:
    """Return the MiB that these processes hold together, by the UUID of each GPU that they use."""
    return _sums_mib(_held(pids))


def _sums_mib(held: Mapping[str, Mapping[int, int]]) -> dict[str, int]:
    sums = {uuid: math.ceil(sum(each.values()) / _MIB) for uuid, each in held.items()}
    return {uuid: mib for uuid, mib in sums.items() if mib}


def _held(pids: Collection[int]) -> dict[str, dict[int, int]]:
    """Return the bytes that each of these processes holds, by the UUID of each GPU."""
    with _nvml() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
        return {str(nvml.nvmlDeviceGetUUID(each)): _held_on(each, pids) for each in handles}


def _held_on(handle: Any, pids: Collection[int]) -> dict[int, int]:
    from gpu_pool.nvml import computing

    found = {pid: used for pid, used in computing(handle).items() if pid in pids}
    held = {pid: used for pid, used in found.items() if used is not None}
    if len(held) < len(found):
        raise DriverRefused("NVML does not say how much memory the process holds")
    return held


def _free_mib(uuids: Collection[str]) -> dict[str, int]:
    with _nvml() as nvml:
        handles = {uuid: nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids}
        return {uuid: nvml.nvmlDeviceGetMemoryInfo(each).free // _MIB for uuid, each in handles.items()}


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    from gpu_pool.nvml import pynvml

    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
        raise DriverRefused(f"NVML says: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
