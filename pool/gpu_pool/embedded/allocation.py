"""The Slurm job that this process runs in: what it was given of its node's GPUs, and when it ends.

What a job was given stands in its environment; how many shards a GPU has there, and when the job ends, are
Slurm's to say. ``gres/shard`` limits nothing: that a job has 40 of a GPU's 100 shards means that all others
together have 60.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from gpu_pool.devices import discover
from gpu_pool.devices.visible import counts_in
from gpu_pool.slurm.commands import ask
from gpu_pool.store import files
from gpu_pool.store.device_table import ForeignUse, write_device
from gpu_pool.worker import Worker
from gpu_pool_client import (
    WHOLE,
    Device,
    NeverFits,
    NotAllowed,
    PoolUnreachable,
    SliceRequest,
    format_share,
)
from gpu_pool_client._log import get_logger

#: Seconds until it is asked again when a job ends, and for which anybody waits for the answer.
_AGAIN_AFTER, _AWAITED = 60.0, 2.0
#: Places for files of a job, the best first: sites that make a folder for each job name it by one of these.
_TEMPORARY: Final = ("SLURM_TMPDIR", "TMPDIR")
_WORD: Final = re.compile(r"[0-9A-Za-z_.,-]{1,64}", re.ASCII)


class SlurmSilent(Exception):
    """Slurm did not say what it was asked; the text says why, in a few words."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a job was given of its node's GPUs, as its environment has it."""

    job: str
    #: Its node that this process runs on; empty where that is none of its nodes.
    node: str
    #: The numbers of its GPUs among those of the node, as Slurm writes them; empty for none.
    gpus: str = ""
    #: Shards on its GPUs; None where these are wholly the job's.
    shards: int | None = None
    #: Where its node has ``gres/mps``, its part of its one GPU in hundredths; our own limits set that, too.
    percent: int | None = None
    #: Whether the job has other nodes, and this process is not of a step that runs on several: there each is
    #: its own node's.
    has_others: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Allocation | None:
        """Return that of a process with this environment; None outside any job.

        A shell of salloc has the variables of its job, and need not run on a node of it: all of its nodes
        are others then.
        """
        job, node = environ.get("SLURM_JOB_ID", ""), environ.get("SLURMD_NODENAME", "")
        if job.isdecimal() and not node and environ.get("SLURM_JOB_NODELIST"):
            return cls(job, "", has_others=True)
        if not (job.isdecimal() and _WORD.fullmatch(node)):
            return None
        gpus = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS", "")
        shards = environ.get("SLURM_SHARDS_ON_NODE", "")
        percent = environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")
        return cls(
            job,
            node,
            gpus if _WORD.fullmatch(gpus) else "",
            int(shards) if shards.isdecimal() else None,
            int(percent) if percent.isdecimal() and not shards else None,
            has_others=_number(environ, "SLURM_JOB_NUM_NODES") > 1
            and _number(environ, "SLURM_STEP_NUM_NODES") <= 1,
        )

    @property
    def may_have_parts(self) -> bool:
        """Whether its GPUs may not be wholly its own; only Slurm can say."""
        return self.shards is not None or self.percent is not None

    def __str__(self) -> str:
        return f"Slurm job {self.job}"

    def store(self, environ: Mapping[str, str]) -> Path:
        """Return the file of its pool's store: in the job's temporary folder, or elsewhere on a local disk.

        Steps that were given other GPUs than the job have a pool of their own.
        """
        folders = [environ[name] for name in _TEMPORARY if environ.get(name)]
        folders += [tempfile.gettempdir(), *filter(None, [environ.get("XDG_RUNTIME_DIR")])]
        base = files.first_local(map(Path, folders)) or Path(folders[0])
        given = "".join((self.gpus and f"-gpu-{self.gpus}", "" if self.shards is None else f"-{self.shards}"))
        return base / f"gpu-pool-{os.geteuid()}-slurm-{self.job}{given}" / "store.db"

    def shares(self, devices: Iterable[Device], gres: str) -> Mapping[str, int]:
        """Return how many thousandths of each device are the job's, by uuid.

        Of several GPUs Slurm does not say how many shards it gave of which: each has as many as are left of
        all where the others are full. ``gres`` is what the node has, as Slurm writes it. Raises
        ``SlurmSilent`` where that says nothing of shards.
        """
        known, shards = list(devices), self.shards
        if shards is None:
            is_part = self.percent is not None and "mps:" in gres and "shard:" not in gres
            share = min(WHOLE, (self.percent or 0) * WHOLE // 100) if is_part else WHOLE
            return {each.uuid: share for each in known}
        per_gpu = shards_per_gpu(gres)
        if not per_gpu:
            raise SlurmSilent(f"of its GPUs it says {gres!a}")
        found: dict[str, int] = {}
        for each in known:
            # Where the model is called otherwise than the type, nobody gets more than there is.
            own = [count for kind, count in per_gpu.items() if kind and kind.lower() in each.model.lower()]
            count = max(own or per_gpu.values())
            left = shards - (len(known) - 1) * count
            found[each.uuid] = max(0, min(WHOLE, left * WHOLE // count))
        return found


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def shards_per_gpu(gres: str) -> Mapping[str, int]:
    """Return how many shards a GPU has, by its type as Slurm calls it, of ``gpu:v100:2,shard:v100:200``."""
    gpus, shards = counts_in(gres)
    if not shards.keys() <= gpus.keys():  # the types of one of them are not told
        gpus, shards = {"": sum(gpus.values())}, {"": sum(shards.values())}
    return {kind: count // gpus[kind] for kind, count in shards.items() if gpus[kind] and count >= gpus[kind]}


def others_use(devices: Iterable[Device], shares: Mapping[str, int]) -> Mapping[str, ForeignUse] | None:
    """Return what others than the job have of the devices, by uuid; None where all are wholly the job's."""
    if all(share == WHOLE for share in shares.values()):
        return None
    return {
        each.uuid: ForeignUse(
            WHOLE - shares[each.uuid], each.memory_mib * (WHOLE - shares[each.uuid]) // WHOLE
        )
        for each in devices
    }


def check_fits(
    request: SliceRequest, devices: Iterable[Device], shares: Mapping[str, int], job: Allocation
) -> None:
    """Raise ``NeverFits`` for a request that is for more of a GPU than the job was given of it."""
    able, known = 0, list(devices)
    for each in known:
        needs = request.milli or -(-(request.memory_mib or 0) * WHOLE // each.memory_mib)
        able += needs <= shares.get(each.uuid, WHOLE)
    most = max(shares.values(), default=WHOLE)
    # Of more GPUs than there are, the pool's rules speak.
    if able < min(request.count, len(known)) and most < WHOLE:
        raise NeverFits(
            f"You asked for {request.named}; {job} was given {format_share(most)} of a GPU, "
            f"{'by gres/mps' if job.shards is None else 'as its shards say'}.",
            f"Ask for {format_share(most)} or less, or start the server in a job with more: --gres=shard:N "
            "or --gres=gpu:1.",
        )


def gres_of(node: str) -> str:
    """Ask Slurm which GPUs and shards a node has. Raises ``SlurmSilent``."""
    return _field(_show("node", node), "Gres")


def end_of(job: str) -> float | None:
    """Ask Slurm when a job ends, in Unix seconds; None where it has no end. Raises ``SlurmSilent``."""
    text = _field(_show("job", job), "EndTime")
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # "Unknown"
        return None


def _show(kind: str, name: str) -> str:
    try:
        return ask("scontrol", "--oneliner", "show", kind, name)
    except (NotAllowed, PoolUnreachable) as error:
        raise SlurmSilent(error.message.rstrip(".")) from error


def _field(line: str, name: str) -> str:
    found = re.search(rf"(?:^|\s){name}=(\S*)", line)
    return found[1] if found else ""


def shares_of(job: Allocation | None, devices: Iterable[Device]) -> Mapping[str, int]:
    """Return how many thousandths of each device are a job's, by uuid; Slurm is asked where it may be a part.

    Where it does not answer, GPUs with ``gres/mps`` count as wholly the job's, since its percentage limits it
    anyway. Shards limit nothing: raises ``SlurmSilent``.
    """
    known = list(devices)
    try:
        if job is not None and job.may_have_parts:
            return job.shares(known, gres_of(job.node))
    except SlurmSilent:
        if job is not None and job.shards is not None:
            raise
    return {each.uuid: WHOLE for each in known}


class JobEnd:
    """When a job ends, as Slurm said last: an administrator can change it. Used in any event loop."""

    def __init__(self, job: str) -> None:
        self._job = job
        #: In Unix seconds; None where it is not known, or never.
        self.at: float | None = None
        self._ask_at = 0.0
        self._worker: Worker | None = None

    async def follow(self) -> None:
        """Ask again, if it was not asked lately; nobody waits for the answer for long."""
        now = time.monotonic()
        if now < self._ask_at:
            return
        self._ask_at = now + _AGAIN_AFTER
        self._worker = self._worker or Worker("gpu-pool-slurm")
        try:
            await self._worker.run(self._ask, _AWAITED)
        except TimeoutError:
            get_logger().debug("Slurm has not said yet when job %s ends", self._job)

    def _ask(self) -> None:
        try:
            self.at = end_of(self._job)
        except SlurmSilent as error:  # what it said last is still the best that is known
            get_logger().warning("Slurm does not say when job %s ends: %s", self._job, error)

    def close(self) -> None:
        """Ask no more."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


def main() -> None:
    """Print which GPUs this node has, and how much of each is the job's: the pool of its first node asks."""
    job, found, problem = Allocation.of(os.environ), discover(), ""
    try:
        shares = shares_of(job, found.devices)
    except SlurmSilent as error:
        problem, shares = f"Slurm does not say how many shards a GPU has there: {error}.", {}
    devices = [write_device(each) for each in found.devices if each.uuid in shares]
    problem = problem or ("" if found.devices else found.problems[0])
    print(json.dumps({"devices": devices, "shares": shares, "problem": problem}))


if __name__ == "__main__":
    main()
