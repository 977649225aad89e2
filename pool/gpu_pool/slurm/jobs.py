"""What Slurm says of its nodes and jobs: read, put in order and said in words. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from gpu_pool.devices.visible import counts_in
from gpu_pool.slurm.reasons import why_it_waits
from gpu_pool_client import WHOLE, Device, Limit, NeverFits, Place, SliceRequest, Strength

#: What squeue is asked for of each job, between bars. Nothing of it is for a user to choose: the name of a
#: stranger's job may have lines of its own, which look like those of other jobs.
SQUEUE_FORMAT: Final = "%i|%T|%r|%Q|%P|%S|%e|%N"
#: And of the user's own jobs, besides.
SQUEUE_NAMES_FORMAT: Final = "%i|%j"
#: And sinfo of each node and partition.
SINFO_FORMAT: Final = "%N|%o|%G|%P"
#: And of which of each node's GPUs are in use.
SINFO_USED_FORMAT: Final = "NodeList:|,Gres:|,GresUsed:|,StateCompact:|,PartitionName:|"
#: States of a node that starts jobs; one that is about to be shut down or rebooted has a sign behind it.
_STARTS_JOBS: Final = frozenset({"idle", "mix"})
#: States of a job in which nothing of it runs yet, and in which something does.
_WAITS: Final = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
_RUNS: Final = frozenset(
    {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
)
_NAMED_MEMORY: Final = re.compile(r"(?<![0-9.])([0-9]{1,4})_?gb?(?![a-z0-9])", re.ASCII | re.IGNORECASE)
#: A reason that is a word, and not a sentence.
_IS_WORD: Final = re.compile(r"\w+ *(?:[,(]|$)", re.ASCII)
_MIB_PER_GIB: Final = 1024
#: What a job was given of some of its nodes: their names, its processors there, and its GPUs, or their parts.
_GIVEN: Final = re.compile(r"(?<!\S)Nodes=(\S+) CPU_IDs=([0-9,-]+) Mem=\S+ GRES=(\S*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Job:
    """One job, as Slurm showed it last."""

    id: str
    state: str
    reason: str = ""
    priority: int = 0
    partition: str = ""
    #: Unix seconds; None where nobody says it.
    starts_at: float | None = None
    ends_at: float | None = None
    node: str = ""
    #: The status with which its main process has ended; None where that is not known.
    exit_status: int | None = None
    #: Who has cancelled it; empty where that is not known.
    cancelled_by: str = ""

    @property
    def waits(self) -> bool:
        """Whether nothing of it runs yet."""
        return self.state in _WAITS

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state not in _WAITS | _RUNS


@dataclass(frozen=True, slots=True)
class GpuKind:
    """One type of GPU that the cluster has."""

    #: Slurm's word for it; empty where it has none.
    type: str
    #: The most that one node has, and the shards of each; 0 where it has none.
    per_node: int
    shards: int = 0
    #: Slurm's word for these: ``shard``, or ``mps``.
    part: str = "shard"

    @property
    def parts(self) -> str:
        """How many parts each has, in words."""
        return f"{self.shards} {'shards' if self.part == 'shard' else self.part}"

    def gres(self, request: SliceRequest) -> str:
        """Return what a job asks for, for a request that was :meth:`counted`."""
        kind = f"{self.type}:" if self.type else ""
        if request.milli == WHOLE or not self.shards:
            return f"gpu:{kind}{request.count}"
        return f"{self.part}:{kind}{-(-(request.milli or 0) * self.shards // WHOLE)}"

    def counted(self, milli: int) -> int:
        """Return how many thousandths of it a job gets that needs so many: whole shards, or all of it."""
        if not self.shards:
            return WHOLE
        return min(WHOLE, -(-milli * self.shards // WHOLE) * WHOLE // self.shards)


def read_jobs(printed: str) -> dict[str, Job]:
    """Read what squeue printed in :data:`SQUEUE_FORMAT`; return jobs by their ids."""
    found: dict[str, Job] = {}
    for line in printed.splitlines():
        parts = line.split("|")
        if len(parts) == 8:
            number, state, reason, priority, partition, start, end, node = parts
            rank = int(priority) if priority.isdecimal() else 0
            times = read_time(start), read_time(end)
            found[number] = Job(number, state, _word(reason), rank, partition, *times, node)
    return found


def read_names(printed: str) -> dict[str, str]:
    """Read what squeue printed in :data:`SQUEUE_NAMES_FORMAT`; return jobs' ids by their names."""
    rows = (line.partition("|") for line in printed.splitlines())
    return {name: number for number, bar, name in rows if bar}


def read_job(printed: str) -> Job:
    """Read what ``scontrol --oneliner show job`` printed of one."""
    told: dict[str, str] = {}
    for name, _, value in (word.partition("=") for word in printed.split()):
        told.setdefault(name, value)  # what a comment or a path has, which may be anything, comes later
    status, rank = told.get("ExitCode", "").partition(":")[0], told.get("Priority", "")
    return Job(
        told.get("JobId", ""),
        told.get("JobState", ""),
        _word(told.get("Reason", "")),
        int(rank) if rank.isdecimal() else 0,
        told.get("Partition", ""),
        read_time(told.get("StartTime", "")),
        read_time(told.get("EndTime", "")),
        told.get("NodeList", "").replace("(null)", ""),
        int(status) if status.isdecimal() else None,
    )


def read_given(printed: str) -> Iterator[tuple[str, str, int]]:
    """Read what a job was given of which nodes, as ``scontrol --details show job`` prints it in one line.

    Yield nodes, of which Slurm writes several as one (``n[1-3]``), with what ``srun --gres`` calls all of the
    GPUs that each of them gives, and the number of processors. Nodes without any are left out.
    """
    for nodes, cpus, gres in _GIVEN.findall(printed):
        gpus, parts = (sum(counts.values()) for counts in counts_in(gres))
        if gpus or parts:
            yield nodes, f"gpu:{gpus}" if gpus else f"{_part_in(gres)}:{parts}", _count(cpus)


def _count(ranges: str) -> int:
    """Return how many numbers there are in ``0-3,8``."""
    ends = (each.partition("-") for each in ranges.split(","))
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def _word(reason: str) -> str:
    """Return Slurm's word of a reason, without details; or the sentence that it has in place of one."""
    said = reason.replace("_", " ")  # as scontrol writes spaces
    return said.partition(",")[0].partition("(")[0].strip() if _IS_WORD.match(said) else said


def read_time(text: str) -> float | None:
    """Return a time as Slurm writes it in Unix seconds; None for none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def read_kinds(printed: str, partition: str) -> tuple[GpuKind, ...]:
    """Read the GPUs of a partition, or of the default one, as sinfo prints them in :data:`SINFO_FORMAT`."""
    found: list[GpuKind] = []
    for line in printed.splitlines():
        parts = line.split("|")
        if len(parts) != 4 or not _is_in(parts[3], partition):
            continue
        gpus, shards_of = counts_in(parts[2])
        found += [
            GpuKind(kind, count, shards_of.get(kind, 0) // max(1, count), _part_in(parts[2]))
            for kind, count in gpus.items()
        ]
    return merged(found)


def _part_in(gres: str) -> str:
    return "mps" if re.search(r"\bmps:", gres) and not re.search(r"\bshard:", gres) else "shard"


def limit_of(gres: str) -> Limit:
    """Return what keeps a kernel within its part of a GPU, where nodes are in parts of this kind."""
    if _part_in(gres) == "mps":
        told = "gres/mps of Slurm counts, and limits the share of threads where the site runs MPS; no memory"
    else:
        told = "gres/shard of Slurm counts, and limits nothing"
    return Limit(Strength.NONE, told)


def merged(kinds: Iterable[GpuKind]) -> tuple[GpuKind, ...]:
    """Return each type once, as several nodes or partitions have it.

    Of those with different shards, the coarsest are what any of them can give.
    """
    most: dict[str, GpuKind] = {}
    for kind in kinds:
        known = most.get(kind.type, GpuKind(kind.type, 0))
        least = min(filter(None, (known.shards, kind.shards)), default=0)
        most[kind.type] = GpuKind(kind.type, max(known.per_node, kind.per_node), least, kind.part)
    return tuple(most[kind] for kind in sorted(most))


def _is_in(shown: str, partition: str) -> bool:
    """Whether sinfo shows this partition; for an empty name, the default one, which has a star."""
    return shown.rstrip("*") == partition if partition else shown.endswith("*")


def read_config(printed: str) -> dict[str, str]:
    """Read what ``scontrol show config`` prints."""
    lines = (line.partition("=") for line in printed.splitlines())
    return {name.strip(): value.strip() for name, sign, value in lines if sign}


def read_free_types(printed: str, partition: str) -> frozenset[str]:
    """Read of what types a GPU is wholly free now, as sinfo prints it in :data:`SINFO_USED_FORMAT`.

    A node on which shards are in use does not count: 22.05 does not tell how many, or of which GPUs.
    """
    free: set[str] = set()
    for line in printed.splitlines():
        parts = line.split("|")
        if len(parts) < 5 or parts[3] not in _STARTS_JOBS or not _is_in(parts[4], partition):
            continue
        (gpus, _), (used, shards) = counts_in(parts[1]), counts_in(parts[2])
        if not any(shards.values()):
            free |= {kind for kind, count in gpus.items() if count > used.get(kind, 0)}
    return frozenset(free)


def would_start_sooner(request: SliceRequest, free: Collection[str]) -> str:
    """Say what else a job could have at once that waits for a GPU of one type; empty for nothing."""
    others = sorted(set(free) - {request.filters.model, ""}) if request.count == 1 else []
    if not others or request.filters.model in free:
        return ""
    types = " or ".join(others)
    return f"A GPU of the type {types} is free now: with model={others[0]} it would start sooner."


def read_federation(printed: str) -> str:
    """Read the name of a cluster's federation as ``scontrol show federation`` prints it; empty for none."""
    found = re.search(r"^Federation:\s*(\S+)", printed, re.MULTILINE)
    return found[1] if found else ""


def read_addresses(printed: str) -> dict[str, str]:
    """Read of the same where each node can be reached."""
    rows = (line.split("|") for line in printed.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 4}


def memory_mib(kind: GpuKind, known: Mapping[str, object]) -> int:
    """Return the memory of a GPU: what is ``known`` in GiB by type, or what its type's name says; else 0."""
    said = known.get(kind.type)
    if isinstance(said, (int, float)) and said > 0:
        return int(said * _MIB_PER_GIB)
    named = _NAMED_MEMORY.search(kind.type)
    return int(named[1]) * _MIB_PER_GIB if named else 0


def devices_of(kinds: Iterable[GpuKind], known: Mapping[str, object]) -> tuple[Device, ...]:
    """Return devices that stand for all GPUs of their types, as many of each as go together."""
    found: list[Device] = []
    for kind in kinds:
        model, memory = kind.type or "GPU", memory_mib(kind, known)
        for index in range(kind.per_node):
            any_of_it = Device(
                f"slurm-{model}-{index}", index, model, memory, node=f"any {model}", unbounded=True
            )
            # Whole ones can be had of which nobody knows how much memory they have.
            found.append(any_of_it if memory else replace(any_of_it, context_mib=0))
    return tuple(found)


def partition_named(name: str) -> str:
    """Return what a partition is called in a sentence; an empty name is that of the default one."""
    return f"partition {name}" if name else "the default partition"


def counted(
    request: SliceRequest, kinds: Sequence[GpuKind], known: Mapping[str, object], partition: str = ""
) -> tuple[SliceRequest, str]:
    """Return what a job would really get for a request, and of which type of GPU. Raises ``NeverFits``.

    ``kinds`` are the GPUs of this ``partition``; empty for the default one.
    """
    named = request.filters.model
    able = [kind for kind in kinds if named is None or named.lower() in kind.type.lower()]
    why = ""
    for kind in sorted(able, key=lambda each: memory_mib(each, known)):
        found = _of_kind(request, kind, memory_mib(kind, known))
        if not isinstance(found, str):
            return found, kind.type
        why = f" {found}"
    there = ", ".join(_described(kind) for kind in kinds) or "no GPU"
    raise NeverFits(
        f"You asked for {request.named}; {partition_named(partition)} of Slurm has {there}.{why}",
        "Ask for what it has, such as 1 for a whole GPU, or for another model: 1 model=TYPE.",
    )


def _of_kind(request: SliceRequest, kind: GpuKind, memory: int) -> SliceRequest | str:
    """Return what a job would get of GPUs of this type; or why not, in a sentence."""
    name, milli = kind.type or "GPU", request.milli
    if milli is None:
        if not memory:
            return f"Slurm does not say how much memory a {name} has: c.SlurmSettings.gpu_memory can."
        milli = -(-(request.memory_mib or 0) * WHOLE // memory)
    if milli > WHOLE or request.count > kind.per_node:
        return f"No node can give that of the type {name}."
    given = kind.counted(milli)
    if given < WHOLE and request.count > 1:
        return "Slurm gives a job no parts of several GPUs."
    if given < WHOLE and not memory:
        return f"A part of a {name} needs to be known in memory: set c.SlurmSettings.gpu_memory."
    filters = replace(request.filters, model=kind.type or request.filters.model, memory_mib=None)
    return replace(request, milli=given, memory_mib=None, limit_milli=None, limit_mib=None, filters=filters)


def _described(kind: GpuKind) -> str:
    return f"{kind.type or 'GPUs'}{f' in {kind.parts} each' if kind.shards else ''}"


def place(job: Job, jobs: Iterable[Job], *, sees_others: bool) -> Place:
    """Return where a job stands in the queue of its partition, by priority, and why it waits."""
    said = why_it_waits(job.reason)
    if not sees_others:
        said = f"{said} Its position is not known: this cluster hides others' jobs.".lstrip()
        return Place(None, "", said, job.starts_at)
    before = (-job.priority, _number(job.id))
    ahead = sum(
        each.waits and each.partition == job.partition and (-each.priority, _number(each.id)) < before
        for each in jobs
    )
    return Place(ahead + 1, partition_named(job.partition), said, job.starts_at)


def _number(job: str) -> int:
    return int(re.match(r"[0-9]*", job)[0] or 0)  # type: ignore[index]


def how_ended(job: Job) -> str:
    """Say why a job has ended that was taken; empty where its main process ended by itself."""
    found = {
        "CANCELLED": f"was cancelled by {job.cancelled_by}."
        if job.cancelled_by
        else "was cancelled, by scancel or by an administrator.",
        "TIMEOUT": "reached its time limit. Its course, or c.SlurmSettings.time, can give it more.",
        "DEADLINE": "reached its deadline.",
        "OUT_OF_MEMORY": "used more than its memory (not of the GPU), and was ended. Load less at a time; "
        "its course, or c.SlurmSettings.mem, can give it more.",
        "NODE_FAIL": "ended since its node failed.",
        "BOOT_FAIL": "ended since its node did not start.",
        "PREEMPTED": "gave way to a job with a higher priority.",
        "REVOKED": "was taken over by another cluster.",
    }.get(job.state)
    return f"Slurm job {job.id} {found}" if found else ""
