"""How much host memory parked kernels may take, and how much there is for one of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from gpu_pool_client import _procfs as procfs

_MIB: Final = 1 << 20
#: The part of the memory that is used if the administrator names no other.
_PART: Final = 4
_CGROUPS: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host memory of all suspended leases of a pool."""

    leases: int
    taken_mib: int
    budget_mib: int

    def why_refused(self, need_mib: int, available_mib: int) -> str:
        """Return why one more lease cannot have so much, a clause after its name; empty if it can.

        ``available_mib`` is what its processes could take, whatever is left of the budget.
        """
        left = max(self.budget_mib - self.taken_mib, 0)
        if need_mib > left:
            return (
                f"holds {need_mib} MiB on its GPU, and {left} of the {self.budget_mib} MiB of host memory "
                f"for parked kernels are left (parked: {self.leases}; c.PoolSettings.checkpoint_host_mib)"
            )
        if need_mib > available_mib:
            available = max(available_mib, 0)
            return f"holds {need_mib} MiB on its GPU, and {available} MiB of host memory are available to it"
        return ""


def budget_mib(setting: int, cgroups: Path = _CGROUPS) -> int:
    """Return the MiB that all suspended processes may take together.

    ``setting`` 0 is a quarter of the machine's memory or, where that is less, of the limit of this process's
    own cgroup.
    """
    limits = [int(psutil.virtual_memory().total)]
    limits += [limit for group in _groups(os.getpid(), cgroups) if (limit := _limit(group)) is not None]
    return setting or min(limits) // _PART // _MIB


def available_mib(pids: Collection[int], cgroups: Path = _CGROUPS) -> int:
    """Return the MiB that are available to each of these processes: on the machine, and in its cgroup.

    What a process has on its GPU becomes its own host memory, so a limit on its
    cgroup counts (v2 only). One that goes over it is ended by the kernel.
    """
    found = [int(psutil.virtual_memory().available)]
    for pid in pids:
        limits = ((group, _limit(group)) for group in _groups(pid, cgroups))
        found += [limit - _taken(group) for group, limit in limits if limit is not None]
    return max(min(found), 0) // _MIB


def _groups(pid: int, cgroups: Path) -> Iterator[Path]:
    """Yield the cgroup of a process and those around it."""
    with contextlib.suppress(OSError):
        for line in procfs.lines_of(Path(f"/proc/{pid}/cgroup").read_bytes()):
            # Whoever may make groups names them.
            if line.startswith(b"0::/") and b".." not in line:
                group = cgroups / os.fsdecode(line.removeprefix(b"0::/"))
                yield from (each for each in (group, *group.parents) if each.is_relative_to(cgroups))


def _limit(group: Path) -> int | None:
    """Return the bytes that a cgroup may have; None where nothing limits it."""
    try:
        limit = (group / "memory.max").read_text().strip()
    except OSError:  # the root, or one without this controller
        return None
    return None if limit == "max" else int(limit)


def _taken(group: Path) -> int:
    fields = (line.split() for line in procfs.lines_of((group / "memory.stat").read_bytes()))
    # Files that were read lately are let go of when memory is needed.
    cached = sum(int(value) for name, value in fields if name == b"inactive_file")
    return int((group / "memory.current").read_text()) - cached
