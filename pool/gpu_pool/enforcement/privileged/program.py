#!/usr/bin/python3 -I
"""The few things a pool needs root for. To be reviewed, installed as root's own file, and allowed in sudoers.

    compute-mode UUID exclusive|default   who may use a GPU: its MPS server alone, or everybody
    cgroup-make LEASE                     make the control group of a lease
    cgroup-limit LEASE UUID MIB           limit its memory on a GPU; 0 for none at all
    cgroup-join LEASE PID                 move a process of the caller into it
    cgroup-remove LEASE                   lift its limits and remove it; it must be empty

Nothing else is accepted. Arguments are checked as a whole, no shell is used,
tools are run by their full paths with an empty environment, and one line of
JSON is printed: {"ok": true} or {"ok": false, "error": "why"}. It needs the
standard library alone and reads no file that a user could have written.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_UUID = r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_LEASE = r"[0-9]{1,18}-[0-9a-f]{8}"
_PID, _MIB = "[1-9][0-9]{0,6}", "0|[1-9][0-9]{0,7}"  # Linux gives no pid above 2^22 (proc(5), pid_max)
#: Every verb with what its arguments must look like, from beginning to end.
_VERBS = {
    "compute-mode": (_UUID, "exclusive|default"),
    "cgroup-make": (_LEASE,),
    "cgroup-limit": (_LEASE, _UUID, _MIB),
    "cgroup-join": (_LEASE, _PID),
    "cgroup-remove": (_LEASE,),
}
#: Above all users: 2^32 - 1 means none (setreuid(2)).
_NO_USER = 2**32 - 1
#: Seconds that nvidia-smi may take.
_TIMEOUT = 60
_CONTROLLER = "+dmem"


class PrivilegedRefused(Exception):
    """It is not done; the text says why."""


@dataclass(frozen=True)
class SystemPaths:
    """Where things are. Only tests have them elsewhere."""

    nvidia_smi: str = "/usr/bin/nvidia-smi"
    cgroups: Path = Path("/sys/fs/cgroup")

    @property
    def folder(self) -> Path:
        """The control group that has all leases' below it."""
        return self.cgroups / "gpu-pool"


def perform(arguments: Sequence[str], system: SystemPaths, caller: int) -> dict[str, object]:
    """Do one thing for the user ``caller``, 0 for root. Raises :class:`PrivilegedRefused`, or ``OSError``."""
    verb, *values = arguments or ("",)
    patterns = _VERBS.get(verb)
    if patterns is None or len(values) != len(patterns):
        raise PrivilegedRefused(f"accepted are {', '.join(_VERBS)}, each with its arguments")
    for value, pattern in zip(values, patterns):  # noqa: B905 - of one length, and zip's strict is Python 3.10's
        if not re.fullmatch(pattern, value, re.ASCII):
            raise PrivilegedRefused(f"{value[:60]!r} is not accepted by {verb}")
    do: dict[str, Callable[..., dict[str, object]]] = {
        "compute-mode": _compute_mode,
        "cgroup-make": _cgroup_make,
        "cgroup-limit": _cgroup_limit,
        "cgroup-join": _cgroup_join,
        "cgroup-remove": _cgroup_remove,
    }
    return do[verb](system, caller, *values)


def _compute_mode(system: SystemPaths, _caller: int, uuid: str, mode: str) -> dict[str, object]:
    _smi(system, "-i", uuid, "-c", {"exclusive": "EXCLUSIVE_PROCESS", "default": "DEFAULT"}[mode])
    return {}


def _cgroup_make(system: SystemPaths, _caller: int, lease: str) -> dict[str, object]:
    if not (system.cgroups / "cgroup.controllers").exists():
        raise PrivilegedRefused(f"{system.cgroups} is not cgroup v2")
    system.folder.mkdir(exist_ok=True)
    if "dmem" in (system.cgroups / "cgroup.controllers").read_text().split():
        for folder in (system.cgroups, system.folder):
            (folder / "cgroup.subtree_control").write_text(_CONTROLLER)
    (system.folder / lease).mkdir(exist_ok=True)
    return {}


def _cgroup_limit(system: SystemPaths, _caller: int, lease: str, uuid: str, mib: str) -> dict[str, object]:
    group = _group(system, lease)
    _smi(system, "memory-limits", "-i", uuid, "-n", group, "--soft-limit", mib, "--hard-limit", mib)
    return {"said": _smi(system, "memory-limits", "--get", "-i", uuid, "-n", group)}


def _cgroup_join(system: SystemPaths, caller: int, lease: str, pid: str) -> dict[str, object]:
    group = _group(system, lease)
    process = os.pidfd_open(int(pid))
    try:
        if caller and set(_uids(pid)) != {caller}:
            raise PrivilegedRefused(f"process {pid} is not one of user {caller}'s")
        Path(group, "cgroup.procs").write_text(pid)
        ended = select.poll()  # not select(2), which takes none from the 1,024th on
        ended.register(process, select.POLLIN)
        if ended.poll(0):  # it has ended, and another may have got its number
            raise PrivilegedRefused(f"process {pid} has ended")
    finally:
        os.close(process)
    return {}


def _cgroup_remove(system: SystemPaths, _caller: int, lease: str) -> dict[str, object]:
    if not (system.folder / lease).is_dir():
        return {}
    group = _group(system, lease)
    if Path(group, "cgroup.procs").read_text().strip():
        raise PrivilegedRefused(f"lease {lease} still has processes")
    # A soft limit that goes with its group would be reserved on the groups above it for ever.
    for uuid in re.findall(_UUID, _smi(system, "--query-gpu=uuid", "--format=csv,noheader")):
        _smi(system, "memory-limits", "-i", uuid, "-n", group, "--soft-limit", "0", "--hard-limit", "max")
    Path(group).rmdir()
    return {}


def _group(system: SystemPaths, lease: str) -> str:
    path = system.folder / lease
    if not path.is_dir():
        raise PrivilegedRefused(f"lease {lease} has no control group")
    return str(path)


def _uids(pid: str) -> list[int]:
    """Return the real, effective, saved and file system user of a process.

    Bytes, and no end of a line but b"\\n": the first line is the name that the process has given itself,
    in which the kernel escapes newlines, and none of the other characters that end a line in Python.
    """
    lines = Path("/proc", pid, "status").read_bytes().split(b"\n")
    (uids,) = (line for line in lines if line.startswith(b"Uid:\t"))
    return [int(word) for word in uids.split()[1:]]


def _smi(system: SystemPaths, *arguments: str) -> str:
    done = subprocess.run(
        [system.nvidia_smi, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={},
        timeout=_TIMEOUT,
        check=False,
    )
    words = done.stdout.decode(errors="replace").strip()
    if done.returncode:
        raise PrivilegedRefused(f"nvidia-smi failed: {words[-300:]}")
    return words


def _caller() -> int:
    """Return the user for whom this is done."""
    if os.geteuid() != 0:
        raise PrivilegedRefused("this program must be run by root: sudo -n gpu-pool-privileged")
    told = os.environ.get("SUDO_UID", "0")
    if not re.fullmatch("0|[1-9][0-9]{0,9}", told, re.ASCII) or int(told) >= _NO_USER:
        raise PrivilegedRefused(f"SUDO_UID is {told[:60]!r}, which is no user")
    return int(told)


def _print(line: str) -> bool:
    """Print a line; return whether it could be written."""
    try:
        print(line, flush=True)
    except OSError:
        sys.stdout = None  # or Python would write it once more when it exits, and complain
        return False
    return True


def main(arguments: Sequence[str] | None = None, system: SystemPaths | None = None) -> int:
    """Do what the command line says; return 0 if it was done and said so, 1 if not."""
    told = sys.argv[1:] if arguments is None else arguments
    try:
        answer = {"ok": True, **perform(told, system or SystemPaths(), _caller())}
    except (PrivilegedRefused, OSError, ValueError, subprocess.SubprocessError) as error:
        answer = {"ok": False, "error": str(error)}
    return 0 if _print(json.dumps(answer)) and answer["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
