"""Whether memory is short: of the machine, or in the control groups of a process."""

import os
from pathlib import Path
from typing import Iterator, NamedTuple  # noqa: UP035 - for Python 3.8

#: The part of the memory that must be free, or else templates end: kernels need it more.
_FREE_PART = 0.05


class MemoryFiles(NamedTuple):
    """What a cgroup says of its memory."""

    #: The file that says what is used.
    used: str
    #: Those of its limits.
    limits: "tuple[str, ...]"
    #: What of that which is used can be dropped at once, by its names in ``memory.stat``.
    droppable: "tuple[str, ...]"
    #: The file that counts the processes that were ended since it was used up.
    kills: str


_MEMORY_FILES = {
    "cgroup2": MemoryFiles(
        "memory.current",
        ("memory.max", "memory.high"),
        ("active_file", "inactive_file"),
        "memory.events",
    ),
    "cgroup": MemoryFiles(
        "memory.usage_in_bytes",
        ("memory.limit_in_bytes",),
        ("total_active_file", "total_inactive_file"),
        "memory.oom_control",
    ),
}


def is_short(machine: str = "/proc/meminfo", process: str = "/proc/self") -> bool:
    """Whether less memory is available than kernels may soon need: of the machine, or of their cgroup."""
    with open(machine, "rb") as file:
        lines = (line.partition(b":") for line in file)
        found = {name: int(value.split()[0]) for name, _, value in lines}
    if found.get(b"MemAvailable", 1) < _FREE_PART * found.get(b"MemTotal", 1):
        return True
    return any(_is_short_in(folder, files) for folder, files in groups_of(process))


def groups_of(process: str) -> "Iterator[tuple[Path, MemoryFiles]]":
    """Yield the folders of the cgroups that may limit a process' memory."""
    mounts = {}
    for line in _lines(Path(process, "mountinfo")):
        # proc_pid_mountinfo(5): root and place, then after a dash the kind, the source and its options.
        before, after = (words.split(" ") for words in line.split(" - ", 1))
        if after[0] == "cgroup2" or (after[0] == "cgroup" and "memory" in after[2].split(",")):
            mounts[after[0]] = before[3], Path(before[4])
    for line in _lines(Path(process, "cgroup")):
        _, kinds, own = line.split(":", 2)
        kind = "cgroup" if "memory" in kinds.split(",") else "cgroup2"
        if kind in mounts and (kind == "cgroup" or not kinds):
            root, place = mounts[kind]
            below = Path(os.path.relpath(own, root))
            # One that lies outside of what is mounted here cannot be seen.
            for part in (below, *below.parents) if ".." not in below.parts else ():
                yield place / part, _MEMORY_FILES[kind]


def _is_short_in(group: Path, files: MemoryFiles) -> bool:
    """Whether a cgroup's memory is nearly used up; no if it has no limit, or cannot be seen."""
    try:
        limits = [(group / name).read_text().strip() for name in files.limits]
        most = min((int(limit) for limit in limits if limit != "max"), default=None)
        if most is None:
            return False
        # What the system has read from files and can drop at once is counted as used, too.
        kinds = (line.split() for line in _lines(group / "memory.stat"))
        droppable = sum(int(size) for kind, size in kinds if kind in files.droppable)
        used = int((group / files.used).read_text()) - droppable
    except (OSError, ValueError):
        return False
    return most - used < _FREE_PART * most


def _lines(path: Path) -> "list[str]":
    # At newlines alone: a folder's name may have any other character.
    return [line for line in path.read_bytes().decode("utf-8", "surrogateescape").split("\n") if line]


def memory_kills() -> int:
    """Return how many processes of this container were ended since its memory was used up."""
    for group, files in groups_of("/proc/self"):
        try:
            lines = (group / files.kills).read_text().splitlines()
        except OSError:
            return 0
        return sum(int(number) for name, number in map(str.split, lines) if name == "oom_kill")
    return 0
