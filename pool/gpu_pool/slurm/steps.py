"""Kernels in steps of the job that their server runs in, on the other nodes of that job.

Slurm counts nothing for steps that overlap: what a job was given of its other nodes is divided by the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpu_pool.slurm import jobs, launching
from gpu_pool.slurm.commands import ask, environment_of_looks, environment_of_steps
from gpu_pool.store import files
from gpu_pool.store.device_table import read_device, write_device
from gpu_pool_client import (
    Activity,
    BadRequest,
    Device,
    KernelCommand,
    KernelPod,
    Lease,
    NotAllowed,
    PodPhase,
    PoolUnreachable,
)
from gpu_pool_client._forks import close_in_children
from gpu_pool_client._framework_caps import slice_environment
from gpu_pool_client._log import get_logger

if TYPE_CHECKING:
    from gpu_pool.audit.callers import Caller
    from gpu_pool.pool.backend import PoolSide

#: What prints the GPUs of the node where it runs, see ``gpu_pool.embedded.allocation.main``.
#: Nothing of the folder in which it begins is imported, as with -P of Python 3.11.
_LOOKS: Final = (
    sys.executable,
    "-c",
    "import sys; sys.path = [each for each in sys.path if each]; "
    "from gpu_pool.embedded.allocation import main; main()",
)
#: What an IPython kernel's command runs.
_IPYTHON: Final = frozenset({"ipykernel", "ipykernel_launcher"})
#: How Slurm says in the output of a step that it has ended it.
_ENDED_BY_SLURM: Final = re.compile(
    launching.SLURMS_OWN + r" error: (?:\*\*\* )?(.*?(?:CANCELLED|oom|FAILURE).*?)(?: \*\*\*)?$", re.M
)
#: Nodes that are asked at once; seconds in which one answers; and until those are asked again that did not.
_AT_ONCE, _SAYS_WITHIN, _AGAIN_AFTER = 16, 20.0, 60.0
#: Seconds between two looks at a step that starts, at one that runs; and for one that is to end.
_SOON, _GLANCE, _ENDS_WITHIN = 0.03, 0.25, 10.0
#: Becomes ``srun``, and ends it, and with it its step, once the server's end of its standard input is closed
#: without a word: the server was killed. Nobody would ever remove the step's folder then.
_WITH_ITS_SERVER: Final = """\
exec 3<&0
{ read -r told <&3 || { kill -TERM $$; rm -rf -- "$0"; }; } &
exec "$@" </dev/null 3<&-
"""


@dataclass(frozen=True, slots=True)
class JobNode:
    """What a job was given of one of its nodes."""

    name: str
    #: All of its GPUs there, as ``srun --gres`` calls them.
    gres: str
    cpus: int
    #: Where it is reached.
    address: str

    def step(self, job: str) -> list[str]:
        """Return the beginning of a command that runs another one in a step there, beside all others."""
        where = [f"--jobid={job}", f"--nodelist={self.name}", "--nodes=1", "--ntasks=1"]
        what = [f"--cpus-per-task={self.cpus}", f"--gres={self.gres}"]
        return ["srun", "--overlap", "--export=ALL", *where, *what]


@dataclass(frozen=True, slots=True)
class OtherNodes:
    """The GPUs of a job's other nodes."""

    nodes: Mapping[str, JobNode] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    #: How many thousandths of each are the job's, by uuid.
    shares: Mapping[str, int] = field(default_factory=dict)
    #: Why it is not known what nodes have, by their names; of no name, why it is not known which there are.
    problems: Mapping[str, str] = field(default_factory=dict)
    #: When they were asked last, in Unix seconds.
    asked_at: float = 0.0

    def is_due(self, after: float = _AGAIN_AFTER) -> bool:
        """Whether something is not known yet, and was asked more than so many seconds ago."""
        return bool(self.problems) and not 0 <= time.time() - self.asked_at < after

    def of(self, name: str) -> OtherNodes | None:
        """Return what is known of one node; None where that is not all."""
        if name not in self.nodes or name in self.problems:
            return None
        devices = tuple(each for each in self.devices if each.node == name)
        return OtherNodes(devices=devices, shares={each.uuid: self.shares[each.uuid] for each in devices})

    def write(self, file: Path) -> None:
        """Write it down for the other processes of the job, in a folder that is this user's."""
        told = {**asdict(self), "devices": [write_device(each) for each in self.devices]}
        descriptor, draft = tempfile.mkstemp(prefix=f"{file.stem}-", dir=file.parent)  # 0600, and no link
        with open(descriptor, "w") as opened:
            json.dump(told, opened)
        Path(draft).replace(file)

    @classmethod
    def read(cls, file: Path) -> OtherNodes | None:
        """Return what one of these processes has written; None where none of this version has."""
        try:
            told = json.loads(file.read_text())
            nodes = {name: JobNode(**each) for name, each in told["nodes"].items()}
            return cls(**{**told, "nodes": nodes, "devices": tuple(map(read_device, told["devices"]))})
        except (FileNotFoundError, AttributeError, KeyError, TypeError, ValueError):
            return None


def find_other_nodes(job: str, here: str, before: OtherNodes | None = None) -> OtherNodes:
    """Ask Slurm for the other nodes of a job, and each of these for its GPUs. Blocks.

    They are the pool's of its first node: on another one, there are none. ``here`` is empty where this
    process runs on none of them. Nodes that have said what they have ``before`` are not asked again. Raises
    ``PoolUnreachable`` and ``NotAllowed``.
    """
    known = before or OtherNodes()
    shown = ask("scontrol", "--oneliner", "--details", "show", "job", job)
    names = _names(jobs.read_job(shown).node)
    others = [name for name in names if name != here]
    if not others or here not in ("", names[0]):
        return OtherNodes()
    addresses = jobs.read_addresses(
        ask(
            "sinfo",
            "--noheader",
            "--all",
            "--Node",
            f"--nodes={','.join(others)}",
            f"--format={jobs.SINFO_FORMAT}",
        )
    )
    nodes = [
        JobNode(name, gres, cpus, addresses.get(name, name))
        for several, gres, cpus in jobs.read_given(shown)
        for name in _names(several)
        if name in others
    ]
    with ThreadPoolExecutor(_AT_ONCE, "gpu-pool-nodes") as threads:
        found = list(threads.map(lambda node: known.of(node.name) or _look(job, node), nodes))
    return OtherNodes(
        {node.name: node for node in nodes},
        tuple(device for each in found for device in each.devices),
        {uuid: share for each in found for uuid, share in each.shares.items()},
        {name: problem for each in found for name, problem in each.problems.items()},
        time.time(),
    )


def _names(nodes: str) -> list[str]:
    """Return the names of nodes that Slurm writes as one: ``n[1-3]``."""
    return ask("scontrol", "show", "hostnames", nodes).split()


def _look(job: str, node: JobNode) -> OtherNodes:
    """Return the GPUs of one node, and how much of each is the job's."""
    try:
        told = ask(*node.step(job), "--chdir=/", *_LOOKS, environ=environment_of_looks(), within=_SAYS_WITHIN)
        said = json.loads(told.strip().splitlines()[-1])
        devices = tuple(replace(read_device(each), node=node.name) for each in said["devices"])
        shares = {str(uuid): int(share) for uuid, share in said["shares"].items()}
        problems = {node.name: str(said["problem"])} if said["problem"] else {}
        return OtherNodes({}, devices, shares, problems)
    except (NotAllowed, PoolUnreachable) as error:
        problem = error.message
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        problem = "It does not say what it has."
    get_logger().warning("The GPUs of %s are left out: %s", node.name, problem)
    return OtherNodes(problems={node.name: problem})


@dataclass(slots=True)
class KernelStep:
    """The step of one lease's kernel."""

    node: JobNode
    folder: Path
    command: KernelCommand
    process: subprocess.Popen[bytes]
    ports: Mapping[str, int] = field(default_factory=dict)
    #: Where its kernel is reached; empty as long as it is not.
    address: str = ""
    ended_by_us: bool = False
    #: What ends it, for all that wait for that.
    ending: Future[None] | None = None


class StepHost:
    """Runs kernels on the other nodes of a job, each in a step; it has those of this process alone."""

    #: The pool that it belongs to; set before anything is started.
    pool: PoolSide

    def __init__(self, job: str, here: str, store: Path) -> None:
        self._job, self._here, self._store = job, here, store
        # A job that was requeued may have others; and a store that somebody has named may be of many jobs.
        mark = hashlib.sha256(f"{job} {os.environ.get('SLURM_JOB_NODELIST')}".encode()).hexdigest()[:8]
        self._file = store.with_name(f"other-nodes-{mark}.json")
        #: What there is; None where that is not known yet.
        self.others: OtherNodes | None = None
        #: Seconds until those nodes are asked again that did not answer.
        self.again_after = _AGAIN_AFTER
        self._is_looking = False
        #: By lease.
        self._steps: dict[str, KernelStep] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, "gpu-pool-steps")
        self._is_stopped = False

    def known(self) -> OtherNodes | None:
        """Return the GPUs of the other nodes, where a process of the job has asked them; nobody is asked.

        Raises ``StoreUnusable`` where others can write what is read.
        """
        if self.others is None and self._file.parent.exists():
            files.prepare_folder(self._store)
            self.others = OtherNodes.read(self._file)
        return self.others

    def look(self) -> OtherNodes:
        """Return the GPUs of the other nodes, which are asked where no process of the job has. Blocks.

        Raises ``StoreUnusable`` where others can write what is read.
        """
        files.prepare_folder(self._store)
        self.others = self.known() or self._found(OtherNodes())
        return self.others

    def missing(self) -> str:
        """Say which nodes have not said what they have, and why not, in sentences; empty where all have."""
        problems = self.others.problems if self.others is not None else {}
        if not problems:
            return ""
        told = "; ".join(f"{name}: {why}" if name else why for name, why in problems.items()).rstrip(".")
        return f"not all nodes of Slurm job {self._job} have said yet which GPUs they have ({told})."

    def look_again(self) -> None:
        """Ask nodes again that did not answer, if it is time; nobody waits for that."""
        if self.others is not None and self.others.is_due(self.again_after) and not self._is_looking:
            self._is_looking = True
            threading.Thread(target=self._look_again, name="gpu-pool-nodes", daemon=True).start()

    def _look_again(self) -> None:
        try:
            known = OtherNodes.read(self._file) or self.others or OtherNodes()
            self.others = self._found(known) if known.is_due(self.again_after) else known
        finally:
            self._is_looking = False

    def _found(self, before: OtherNodes) -> OtherNodes:
        """Return what there is, or else what is known of it; and write it down."""
        try:
            found = find_other_nodes(self._job, self._here, before)
        except (NotAllowed, PoolUnreachable) as error:
            get_logger().warning("Slurm does not say which other nodes job %s has: %s", self._job, error)
            found = replace(before, problems=before.problems or {"": error.message}, asked_at=time.time())
        with contextlib.suppress(OSError):  # other processes ask themselves then
            found.write(self._file)
        return found

    # -- Kernels -----------------------------------------------------------------

    async def launch(self, lease: Lease, kernel: KernelCommand, caller: Caller | None) -> KernelPod:  # noqa: ARG002
        """See ``KernelHost.launch``: start a step, whose main process is the kernel's supervisor."""
        known = self._steps.get(lease.id)
        if known is not None:
            if known.command == kernel and not known.ended_by_us and known.process.poll() is None:
                return self._state(known)
            await self._end(lease.id)
        name = lease.slices[0].device.node if lease.slices else ""
        node = self.others.nodes.get(name) if self.others is not None else None
        if node is None:
            raise NotAllowed(f"The node {name!a} is not of Slurm job {self._job}.", "Start the kernel anew.")
        own, is_ipython = {**os.environ, **kernel.environment}, not _IPYTHON.isdisjoint(kernel.argv_here)
        variables = slice_environment(lease, "".join(kernel.argv_here[:1]), own, hook=is_ipython)
        launcher = launching.launcher()
        with contextlib.suppress(NotAllowed, PoolUnreachable):  # the next kernel's start tries again
            await asyncio.to_thread(_remove_leftovers, self._job)
        if self._is_stopped:
            raise PoolUnreachable("The pool was closed meanwhile.")
        folder = launching.write_order(
            f"step-{self._job}-{lease.id}",
            lease,
            kernel,
            alone=launching.ALONE,
            tunnel={},
            variables=variables,
        )
        named = [f"--job-name={_step_name(lease.id)}", f"--chdir={folder}"]
        words = [*node.step(self._job), *named, *launching.command(kernel, launcher, folder)]
        try:
            process = _started(words, folder)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise PoolUnreachable(f"Slurm's srun cannot be run: {error.strerror}.") from error
        step = self._steps[lease.id] = KernelStep(node, folder, kernel, process)
        get_logger().info("A step of Slurm job %s on %s was started for lease %s", self._job, name, lease.id)
        return self._state(step)

    async def follow(self, lease_id: str, seen: str, seconds: float) -> KernelPod:
        """See ``KernelHost.follow``."""
        give_up_at = time.monotonic() + seconds
        while True:
            await self.pool.living(lease_id)
            step = self._steps.get(lease_id)
            if step is None:
                raise BadRequest("No kernel was started on this slice by this server.", "Start one.")
            await _reach(step)
            found = self._state(step)
            if found.version != seen or time.monotonic() > give_up_at or self._is_stopped:
                return found
            await self._until_news(step, give_up_at)

    async def _until_news(self, step: KernelStep, give_up_at: float) -> None:
        """Return once something may be known of a step that was not; that its lease is over, settle tells."""
        before = step.address, bool(step.ports)
        while time.monotonic() < give_up_at and not self._is_stopped:
            await asyncio.sleep(_GLANCE if any(before) else _SOON)
            if step.ended_by_us or step.process.poll() is not None:
                return
            await _reach(step)
            if (step.address, bool(step.ports)) != before:
                return

    def _state(self, step: KernelStep) -> KernelPod:
        now = self._phase(step)
        told = f"{step.process.pid} {now.phase.value} {now.message} {now.address}"
        return replace(now, version=hashlib.sha256(told.encode()).hexdigest()[:12])

    def _phase(self, step: KernelStep) -> KernelPod:
        code = step.process.poll()
        if code is not None:
            _let_go(step.process)
        if step.ended_by_us:
            return KernelPod("", PodPhase.ENDED, message="It was ended.")
        if code is not None:
            return KernelPod("", PodPhase.ENDED, message=self._how_ended(step, code), exit_code=code)
        if step.address:
            return KernelPod("", PodPhase.RUNNING, step.address, ports=step.ports)
        unreached = f"Its step listens on {step.node.name}, which cannot be reached from here."
        return KernelPod("", PodPhase.STARTING, message=unreached if step.ports else "Its step starts.")

    def _how_ended(self, step: KernelStep, code: int) -> str:
        """Say how a step has ended that failed: as Slurm says it, or with its last words."""
        if not code:
            return ""
        found = _ENDED_BY_SLURM.search(launching.output_end(step.folder))
        last = f" Slurm says: {found[1]}" if found else launching.last_words(step.folder)
        return f"The step of Slurm job {self._job} on {step.node.name} ended with status {code}.{last}"

    async def end(self, lease_id: str) -> None:
        """See ``KernelHost.end``."""
        step = self._steps.get(lease_id)
        if step is None:
            return
        if step.ending is None:
            step.ended_by_us = True
            name = _step_name(lease_id)
            step.ending = self._threads.submit(_stop, step.process, self._job, name)
        await asyncio.shield(asyncio.wrap_future(step.ending))

    async def _end(self, lease_id: str) -> None:
        step = self._steps.get(lease_id)
        await self.end(lease_id)
        if step is not None and self._steps.get(lease_id) is step:
            del self._steps[lease_id]
            shutil.rmtree(step.folder, ignore_errors=True)

    async def settle(self, living: Callable[[], Awaitable[Sequence[Lease]]]) -> None:
        """End the steps of leases that have ended."""
        known = set(self._steps)
        if known:
            ended = known - {lease.id for lease in await living()}
            await asyncio.gather(*map(self._end, ended))

    def activity(self, lease_id: str) -> Activity:
        """Return nothing: nobody looks at the GPUs of other nodes."""
        return Activity() if self.has_kernel(lease_id) else Activity(initialised=False)

    def has_kernel(self, lease_id: str) -> bool:
        """See ``KernelHost.has_kernel``."""
        step = self._steps.get(lease_id)
        return step is not None and not step.ended_by_us and step.process.poll() is None

    def stop_waiting(self) -> None:
        """See ``KernelHost.stop_waiting``."""
        self._is_stopped = True

    async def close(self) -> None:
        """End all steps: they end with this process at the latest."""
        self.stop_waiting()
        try:
            await asyncio.gather(*map(self._end, list(self._steps)))
        finally:
            self._threads.shutdown(wait=False)


def _remove_leftovers(own_job: str) -> None:
    """Remove what steps of jobs that are over have left: all of a job may be killed at its end."""
    old = time.time() - launching.LEFT_OVER_AFTER
    left: list[Path] = []
    for each in launching.base().glob("step-*-*"):
        with contextlib.suppress(FileNotFoundError):  # its own process has removed it meanwhile
            left += [each] if each.stat().st_mtime < old else []
    if left:
        live = {own_job, *ask("squeue", "--noheader", "--all", "--me", "--format=%A").split()}
        for folder in left:
            if folder.name.split("-")[1] not in live:
                shutil.rmtree(folder, ignore_errors=True)


async def _reach(step: KernelStep) -> None:
    """Take note of where a kernel listens, and whether it is reached there."""
    if step.address or step.process.poll() is not None:
        return
    step.ports = step.ports or launching.read_ports(step.folder)[0]
    if step.ports and await launching.answers(step.node.address, step.ports["supervisor"]):
        step.address = step.node.address


def _started(words: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / launching.OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _WITH_ITS_SERVER, str(folder), *words],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment_of_steps(),
            start_new_session=True,
        )
    assert process.stdin is not None
    close_in_children(process.stdin)  # by which the step knows that this server lives
    return process


def _step_name(lease_id: str) -> str:
    return f"gpu-pool-{lease_id}"


def _stop(process: subprocess.Popen[bytes], job: str, name: str) -> None:
    """End a step by ending its srun, whose end is its own; or else by Slurm. Blocks."""
    _let_go(process)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_ENDS_WITHIN)
        return
    process.kill()
    words = ("squeue", "--noheader", "--all", "--steps", f"--jobs={job}", "--format=%i %j")
    try:
        shown = [line.split() for line in ask(*words, within=_ENDS_WITHIN).splitlines()]
        for number in [each[0] for each in shown if each[1:] == [name]]:
            ask("scancel", number, within=_ENDS_WITHIN)
    except (NotAllowed, PoolUnreachable) as error:
        get_logger().warning("A step of Slurm job %s may not have ended: %s", job, error)
    with contextlib.suppress(subprocess.TimeoutExpired):  # it is in the kernel's hands
        process.wait(_ENDS_WITHIN)


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """Let nothing wait any more for this server to be killed."""
    assert process.stdin is not None
    if not process.stdin.closed:
        with contextlib.suppress(OSError), process.stdin:  # it does not wait any more
            process.stdin.write(b"\n")
