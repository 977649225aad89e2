"""The backend of a Slurm cluster: its GPUs as sinfo shows them, and kernels in jobs of their own."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

from traitlets import TraitError

from gpu_pool.audit.callers import Caller
from gpu_pool.devices import Inventory
from gpu_pool.pool.backend import Adapted, Backend, DevicesFound, LeasesObserved, Taken
from gpu_pool.pool.core import PoolCore
from gpu_pool.pool.pool import GpuPool
from gpu_pool.settings import load_config, load_settings
from gpu_pool.slurm import jobs, launching
from gpu_pool.slurm.commands import ask
from gpu_pool.slurm.jobs import Job
from gpu_pool.slurm.launching import ALONE, ENDED, KernelJob
from gpu_pool.slurm.reverse_tunnels import ReverseTunnels
from gpu_pool.slurm.settings import SlurmSettings
from gpu_pool.slurm.watch import JobQueueWatch, cancelled_by, last_of
from gpu_pool.store import files, leases
from gpu_pool.store.device_table import SeenFrom
from gpu_pool.worker import Worker
from gpu_pool_client import (
    Activity,
    BadRequest,
    Device,
    EndReason,
    Enforcement,
    GpuPoolError,
    Holder,
    KernelCommand,
    KernelPod,
    Lease,
    NotAllowed,
    Place,
    PodPhase,
    PoolUnreachable,
    Process,
    SliceRequest,
)
from gpu_pool_client._home import expanded
from gpu_pool_client._log import get_logger
from gpu_pool_client._pool import split_url

if TYPE_CHECKING:
    from gpu_pool.courses.model import CourseJobs

#: Seconds for which what sinfo says is good; to wait for a command; and between two looks at what is known.
_KNOWN_FOR, _WITHIN, _GLANCE = 60.0, 130.0, 0.25
#: Seconds between two such looks at a job that has begun, or may any moment; and for how long after it was
#: submitted it may.
_GLANCE_AT_START, _MAY_START_WITHIN = 0.03, 5.0
_FOR_KERNELS: Final = (
    "A slice of a Slurm cluster is a kernel's, whose job is started with it.",
    "Start a command by Slurm itself: srun --gres=gpu:1 COMMAND.",
)
#: The file in a job's folder with its id, once it was submitted.
_SUBMITTED: Final = "job"
#: Seconds between two looks at the folders of jobs.
_FOLDERS_EVERY: Final = 3.0


class SlurmBackend(Backend):
    """The GPUs of a Slurm cluster, for one user's kernels. Slurm's queue is theirs."""

    is_owner = False

    def __init__(self, path: Path, settings: SlurmSettings, known_for: float = _KNOWN_FOR) -> None:
        """Take where the pool's store is; what sinfo says is good for so many seconds."""
        self._settings, self._known_for = settings, known_for
        self.host = self.queue = self
        self.watch = JobQueueWatch()
        self._worker = Worker("gpu-pool-slurm")
        #: Names this pool's jobs: another one of this user has other leases.
        self._mark = hashlib.sha256(f"{socket.gethostname()} {path}".encode()).hexdigest()[:8]
        #: What sinfo says of nodes; empty before it is asked.
        self._nodes = ""
        self._addresses: Mapping[str, str] = {}
        #: Where nodes try to reach this server.
        self._own: Sequence[str] = ()
        self._sees_others = True
        self._tracks_keys = self._has_accounting = False
        self._known_at = float("-inf")
        #: By lease.
        self._jobs: dict[str, KernelJob] = {}
        self._submitting: set[asyncio.Future[KernelJob]] = set()
        self._is_stopped = False
        self._adopts_at = float("-inf")
        self._tunnels = ReverseTunnels(settings.ports())

    def run(self) -> AbstractAsyncContextManager[object]:
        """Begin nothing: its thread is begun as it is needed."""
        return nullcontext()

    async def close(self) -> None:
        """Ask nothing more. Jobs live on, for as long as their servers do."""
        self._worker.stop()
        await self._tunnels.close()

    async def _ask(self, *words: str, told: str = "") -> str:
        try:
            return await self._worker.run(lambda: ask(*words, told=told), _WITHIN)
        except TimeoutError:
            raise PoolUnreachable("Slurm does not answer.") from None

    # -- What there is -----------------------------------------------------------

    async def devices(
        self,
        max_age: float,  # noqa: ARG002 - a cluster's types of GPUs change seldom
        patience: float = 0.0,  # noqa: ARG002
        known: Collection[Device] = (),  # noqa: ARG002
    ) -> DevicesFound:
        """See ``Backend.devices``: each stands for all GPUs of its type in the partition."""
        if time.monotonic() > self._known_at + self._known_for:
            await self._learn()
        self._adopt()
        if self._jobs and not self.watch.looks:
            with suppress(TimeoutError):
                await self._worker.run(self.watch.look, _WITHIN)
        names = {each.partition or "" for each in (await self._courses()).values()}
        every = (jobs.read_kinds(self._nodes, name) for name in {self._settings.partition, *names})
        kinds = jobs.merged(itertools.chain(*every))
        found = jobs.devices_of(kinds, self._settings.gpu_memory)
        problems = (
            ()
            if found
            else (
                f"Slurm has no GPU in {jobs.partition_named(self._settings.partition)}.",
                "Name another in c.SlurmSettings.partition.",
            )
        )
        return DevicesFound(Inventory(found, "Slurm", problems), SeenFrom("slurm"))

    async def _learn(self) -> None:
        try:
            nodes = await self._ask("sinfo", "--noheader", "--all", "--Node", f"--format={jobs.SINFO_FORMAT}")
            config = await self._ask("scontrol", "show", "config")
            federation = jobs.read_federation(await self._ask("scontrol", "show", "federation"))
        except (NotAllowed, PoolUnreachable) as error:
            if self._nodes:
                return  # what it said last is still the best that is known
            if isinstance(error, PoolUnreachable):
                raise
            raise PoolUnreachable(error.message, error.remedy) from error
        if federation:
            raise NotAllowed(
                f"This cluster is part of the federation {federation}, which may start a kernel's job on "
                "another cluster, whose nodes this server does not know.",
                "Start Jupyter on a cluster that is in no federation, or in a job.",
            )
        self._nodes = nodes
        self._addresses = jobs.read_addresses(nodes)
        with suppress(TimeoutError):  # a name may take long to be looked up
            self._own = await self._worker.run(
                lambda: self._settings.addresses(self._addresses.values()), _WITHIN
            )
        said = jobs.read_config(config)
        self._sees_others = "jobs" not in said.get("PrivateData", "") or os.geteuid() == 0
        self._has_accounting = said.get("AccountingStorageType", "").endswith("slurmdbd")
        self._tracks_keys = said.get("TrackWCKey", "").lower() == "yes"
        self._known_at = time.monotonic()

    async def adapt(
        self,
        request: SliceRequest,
        holder: Holder | None = None,
        caller: Caller | None = None,  # noqa: ARG002
    ) -> Adapted:
        """Return what Slurm would give in the partition of the holder's course: shards, or whole GPUs."""
        if not self._nodes:
            await self.devices(0.0)
        partition = self._partition(await self._course(holder.course if holder is not None else None))
        kinds = jobs.read_kinds(self._nodes, partition)
        counted, kind = jobs.counted(request, kinds, self._settings.gpu_memory, partition)
        return Adapted(counted, [f"slurm-{kind or 'GPU'}-{index}" for index in range(counted.count)], request)

    def describe(self, lease: Lease) -> Lease:
        """Say that Slurm's shards limit nothing, and which job it is."""
        terms = replace(lease.terms, revocable=True)
        job = self._jobs.get(lease.id)
        if job is not None:
            seen = self.watch.jobs.get(job.id, job.seen)
            terms = replace(terms, job=_named(job.id), job_ends_at=seen.ends_at if not seen.waits else None)
        limit = jobs.limit_of(self._nodes)
        return replace(lease, terms=terms, enforcement=Enforcement(limit, limit))

    async def bind(self, lease: Lease, process: Process | None = None) -> Lease:  # noqa: ARG002
        """Return the lease described: it takes effect in the job of its kernel, see :meth:`launch`."""
        if not lease.holder.yields:  # a command, which would run here without any GPU
            await self.pool.end_taken(lease.id, Taken(EndReason.NOT_ENFORCED, " ".join(_FOR_KERNELS)))
            raise NotAllowed(*_FOR_KERNELS)
        return self.describe(lease)

    async def unbind(self, living: Callable[[], Awaitable[Sequence[Lease]]]) -> None:
        """Cancel the jobs of leases that have ended; also those of a server that was killed."""
        known = set(self._jobs)
        shown = {name: job for name, job in self.watch.own.items() if name.startswith(self._name(""))}
        if not known and not shown:
            return
        live = {lease.id for lease in await living()}
        ending = [partial(self._end, lease_id) for lease_id in sorted(known - live)]
        for name, number in shown.items():
            if name.removeprefix(self._name("")) not in live and number in self.watch.jobs:
                ending.append(partial(self._cancel, number, name))
        try:
            await _each(ending)
        finally:
            if self._jobs:
                self.watch.keep()

    async def observe(self, living: Callable[[], Awaitable[Sequence[Lease]]]) -> LeasesObserved:
        """Return whose jobs Slurm has ended, and whose have begun."""
        self._adopt()
        self._remove_leftovers()
        for job in list(self._jobs.values()):
            await self._see(job)
        taken = {
            lease_id: Taken(EndReason.TAKEN, why)
            for lease_id, job in self._jobs.items()
            if (why := job.was_taken())
        }
        queued = [lease.id for lease in await living() if lease.is_queued] if self._jobs else []
        return LeasesObserved(taken, [each for each in queued if each in self._jobs and not self.place(each)])

    def _adopt(self) -> None:
        """Take note of jobs that other processes of this pool have launched, and of those that are over."""
        if time.monotonic() < self._adopts_at:
            return
        self._adopts_at = time.monotonic() + _FOLDERS_EVERY
        for lease_id, job in list(self._jobs.items()):
            if job.command is None and not job.folder.is_dir():
                del self._jobs[lease_id]
        for folder in sorted(launching.base().glob(f"{self._mark}-*-*")):
            lease_id = folder.name.removeprefix(f"{self._mark}-").rpartition("-")[0]
            if lease_id in self._jobs:
                continue
            try:
                number = (folder / _SUBMITTED).read_text().strip()
            except OSError:
                continue  # it is being submitted, or its server was killed as it was
            if not number:
                continue  # it was not written whole, by an earlier release or on a full disk
            self._jobs[lease_id] = KernelJob(number, folder, None, seen=Job(number, "PENDING"))

    def _remove_leftovers(self) -> None:
        """Remove the folders of jobs that were never submitted, since their server was killed."""
        for folder in launching.base().glob(f"{self._mark}-*-*"):
            with suppress(OSError):
                is_old = folder.stat().st_mtime < time.time() - launching.LEFT_OVER_AFTER
                if is_old and not (folder / _SUBMITTED).exists():
                    shutil.rmtree(folder, ignore_errors=True)

    async def _see(self, job: KernelJob) -> None:
        """Take note of how a job is, as squeue said last; of one that it does not show, Slurm is asked."""
        shown = self.watch.jobs.get(job.id)
        if shown is not None:
            if not (shown.waits and job.ports):  # it was looked before the job said itself that it runs
                job.seen = shown
        elif not job.seen.is_over and job.seen.id and not self.watch.trouble:
            try:
                found = await self._worker.run(lambda: last_of(job.id), _WITHIN)
            except (PoolUnreachable, TimeoutError):
                return
            job.seen = found or Job(job.id, "COMPLETED")
            if job.seen.state == "CANCELLED" and self._has_accounting and job.was_taken():
                with suppress(TimeoutError):
                    who = await self._worker.run(lambda: cancelled_by(job.id), _WITHIN)
                    job.seen = replace(job.seen, cancelled_by=who)

    # -- Kernels -----------------------------------------------------------------

    async def launch(self, lease: Lease, kernel: KernelCommand, caller: Caller | None) -> KernelPod:  # noqa: ARG002
        """See ``KernelHost.launch``: submit a job, whose main process is the kernel's supervisor."""
        known = self._jobs.get(lease.id)
        if known is not None:
            if known.command == kernel and not known.ended_by_us and not known.seen.is_over:
                return self._state(lease.id, known)
            await self.end(lease.id)
            shutil.rmtree(known.folder, ignore_errors=True)
        course, node = await self._course(lease.holder.course), lease.slices[0].device.node
        partition = self._partition(course)
        kinds = jobs.read_kinds(self._nodes, partition)
        kind = next((each for each in kinds if f"any {each.type or 'GPU'}" == node), None)
        if kind is None:
            where = jobs.partition_named(partition)
            raise NotAllowed(f"Slurm has no such GPU in {where} any more.", "Start the kernel anew.")
        launcher = launching.launcher()
        tunnel = {**await self._tunnels.expect(lease.id), "addresses": self._own}
        folder = launching.write_order(
            f"{self._mark}-{lease.id}", lease, kernel, alone=ALONE, tunnel=tunnel, variables={}
        )
        options = [
            *("--parsable", "--export=ALL", "--no-requeue", "--nodes=1", "--ntasks=1"),
            f"--gres={kind.gres(lease.request)}",
            f"--job-name={self._name(lease.id)}",
            f"--comment={_plain(lease.holder.course or '')}",
            f"--output={folder / launching.OUTPUT}",
            f"--chdir={folder}",
            *self._settings.options(course),
        ]
        if self._tracks_keys and lease.holder.course:
            options.append(f"--wckey={_plain(lease.holder.course)}")
        lines = None if course is None else course.prologue
        prologue = self._settings.prologue if lines is None else "\n".join(lines)
        script = launching.script(prologue, launching.command(kernel, launcher, folder), folder)
        # Who has asked for the kernel may give up meanwhile: what Slurm has taken by then is cancelled.
        submitting = asyncio.ensure_future(self._submit(lease, kernel, folder, options, script))
        self._submitting.add(submitting)
        submitting.add_done_callback(self._submitting.discard)
        return self._state(lease.id, await asyncio.shield(submitting))

    async def _submit(
        self, lease: Lease, kernel: KernelCommand, folder: Path, options: Sequence[str], script: str
    ) -> KernelJob:
        """Submit a job, and cancel it again where its lease has ended meanwhile."""
        try:
            number = (await self._ask("sbatch", *options, told=script)).strip().partition(";")[0]
        except GpuPoolError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        get_logger().info("Slurm job %s was submitted for lease %s", number, lease.id)
        job = self._jobs[lease.id] = KernelJob(
            number, folder, kernel, lease.request, seen=Job(number, "PENDING")
        )
        new = folder / f"{_SUBMITTED}.new"
        new.write_text(number)
        new.replace(folder / _SUBMITTED)  # another process of this pool may read it at any time
        try:
            await self.pool.living(lease.id)
        except GpuPoolError:
            await self._end(lease.id)
            raise
        await self.pool.store.run(leases.add_job, lease.id, _named(number))
        self.watch.look_soon()
        return job

    def _partition(self, course: CourseJobs | None) -> str:
        """Return the partition in which a course's kernels are jobs, or others; empty for the default one."""
        own = course.partition if course is not None else None
        return own or self._settings.partition

    async def _course(self, name: str | None) -> CourseJobs | None:
        """Return what the file of a course says of its kernels' jobs; None where there is no file."""
        return (await self._courses()).get(name) if name else None

    async def _courses(self) -> Mapping[str, CourseJobs]:
        """Return what the files of courses say of their kernels' jobs, by the courses' names."""
        files = self.pool.courses
        if files is None:
            return {}
        from gpu_pool.courses import Courses

        now = await asyncio.to_thread(files.now)
        return {name: course.slurm for name, course in now.usable.items()} if isinstance(now, Courses) else {}

    async def follow(self, lease_id: str, seen: str, seconds: float) -> KernelPod:
        """See ``KernelHost.follow``."""
        give_up_at = time.monotonic() + seconds
        while True:
            lease = await self.pool.living(lease_id)
            job = self._jobs.get(lease_id)
            if job is None:
                raise BadRequest("No kernel was started on this slice by this server.", "Start one.")
            self.watch.keep()
            await self._see(job)
            await job.reach(self._tunnels.ports(lease_id), self._addresses, self._own)
            found = self._state(lease_id, job)
            if why := job.was_taken():  # whoever reads of it would give the lease back, as if that were all
                await self.pool.end_taken(lease_id, Taken(EndReason.TAKEN, why))
            if lease.is_queued and found.phase is PodPhase.RUNNING:
                self.pool.wake()  # its lease is held first: what its kernel is told of it stays the same then
                found = replace(found, version="begun", phase=PodPhase.STARTING)
            if found.version != seen or time.monotonic() > give_up_at or self._is_stopped:
                return found
            if job.ports and found.phase is not PodPhase.RUNNING:
                await asyncio.sleep(_GLANCE_AT_START)
            else:
                await self._until_news(job, give_up_at)

    async def _until_news(self, job: KernelJob, give_up_at: float) -> None:
        """Return once something may be known of a job that was not: many wait, and one squeue tells all."""
        looks, was_ended, had_ports = self.watch.looks, job.ended_by_us, bool(job.ports)
        while time.monotonic() < give_up_at and not self._is_stopped:
            may_start = time.monotonic() < job.known_at + _MAY_START_WITHIN
            await asyncio.sleep(_GLANCE_AT_START if may_start else _GLANCE)
            if self.watch.looks != looks or job.ended_by_us != was_ended:
                return
            if not had_ports and launching.has_begun(job.folder):
                return

    def _state(self, lease_id: str, job: KernelJob) -> KernelPod:
        now = job.phase(self.place(lease_id), self.watch.trouble)
        told = f"{job.id} {now.phase.value} {now.message} {now.address}"
        return replace(now, version=hashlib.sha256(told.encode()).hexdigest()[:12])

    async def end(self, lease_id: str) -> None:
        """See ``KernelHost.end``."""
        job = self._jobs.get(lease_id)
        if job is None:
            return
        if not job.ended_by_us:
            job.ended_by_us = True
            with suppress(OSError):  # it is gone, or the disk is full: others take it for cancelled then
                (job.folder / ENDED).touch()
        if not (job.is_cancelled or job.seen.is_over):
            await self._cancel(job.id, self._name(lease_id))
            job.is_cancelled = True

    async def _end(self, lease_id: str) -> None:
        """End a job, and forget it: not before Slurm has taken that, so that it can be tried again."""
        job = self._jobs.get(lease_id)
        await self.end(lease_id)
        if job is not None and self._jobs.get(lease_id) is job:
            del self._jobs[lease_id]
            shutil.rmtree(job.folder, ignore_errors=True)
            self._tunnels.forget(lease_id)

    async def _cancel(self, number: str, name: str) -> None:
        """Cancel the job of this number and name. Raises ``PoolUnreachable`` where it may not have ended.

        A cluster that was set up anew counts from one again: the number that stands in a folder of the days
        before may be that of another job of this user.
        """
        try:
            await self._ask("scancel", f"--name={name}", number)
        except NotAllowed as error:
            with suppress(TimeoutError):
                found = await self._worker.run(lambda: last_of(number), _WITHIN)
                if found is None or found.is_over:
                    return
            raise PoolUnreachable(error.message, error.remedy) from error

    def activity(self, lease_id: str) -> Activity:
        """Return nothing: nobody looks at the GPUs of a job's node."""
        return Activity() if self.has_kernel(lease_id) else Activity(initialised=False)

    def has_kernel(self, lease_id: str) -> bool:
        """See ``KernelHost.has_kernel``."""
        job = self._jobs.get(lease_id)
        return job is not None and not job.ended_by_us and not job.seen.is_over

    def stop_waiting(self) -> None:
        """See ``KernelHost.stop_waiting``."""
        self._is_stopped = True

    # -- Slurm's queue -------------------------------------------------------------

    async def submit(self, lease: Lease) -> None:
        """Hand nothing over yet: what Slurm is handed is the job of a kernel."""

    def place(self, lease_id: str) -> Place | None:
        """See ``ExternalQueue.place``."""
        job = self._jobs.get(lease_id)
        if job is None or job.ended_by_us:
            return None
        shown = self.watch.jobs.get(job.id, job.seen)
        if not (shown.waits and job.seen.waits):
            return None
        found = jobs.place(shown, self.watch.jobs.values(), sees_others=self._sees_others)
        if job.request is None or not shown.partition:
            return found
        self.watch.keep_free_types(shown.partition)
        sooner = jobs.would_start_sooner(job.request, self.watch.free_types)
        return replace(found, reason=f"{found.reason} {sooner}".strip())

    async def withdraw(self, lease_id: str) -> None:
        """See ``ExternalQueue.withdraw``: where Slurm does not answer, :meth:`unbind` goes on with it."""
        try:
            await self.end(lease_id)
        except PoolUnreachable as error:
            get_logger().warning("The job of lease %s is not cancelled yet: %s", lease_id, error)

    def _name(self, lease_id: str) -> str:
        return f"gpu-pool-{self._mark}-{lease_id}"


async def _each(works: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Do all of these, one after the other. Raises the first error once each was tried.

    Where Slurm does not answer at all the rest are left for later: each would take as long.
    """
    errors: list[Exception] = []
    for work in works:
        try:
            await work()
        except Exception as error:  # noqa: BLE001, PERF203 - the rest is tried first; it takes longer
            get_logger().warning("A job that is to end is not cancelled yet: %s", error)
            errors.append(error)
            if isinstance(error, PoolUnreachable) and not isinstance(error.__cause__, NotAllowed):
                break
    if errors:
        raise errors[0]


def _named(job: str) -> str:
    return f"Slurm job {job}"


def _plain(text: str) -> str:
    return "".join(each for each in text if each.isprintable())[:100]


def open_slurm(url: str) -> GpuPool:
    """Return the pool at ``slurm:[path]``; see :func:`gpu_pool_client.connect`. ``path`` is its store."""
    parts = split_url(url)
    text = "" if parts is None else unquote(parts.netloc + parts.path)
    if parts is None or parts.query or parts.fragment or (text and not text.isprintable()):
        raise BadRequest(f"{url[:200]!a} is not the URL of a Slurm pool.", "Accepted: slurm:[path].")
    path = expanded(text) if text else _default_path()
    settings = load_settings()
    settings.in_pods = True
    try:
        of_jobs = SlurmSettings(config=load_config())
    except TraitError as error:
        raise BadRequest(f"A setting in gpu_pool_config is wrong: {error}") from error
    core = PoolCore(path.absolute(), SlurmBackend(path, of_jobs), settings)
    core.url = f"slurm:{quote(str(path.absolute()))}"
    return GpuPool(core)


def _default_path() -> Path:
    """Return this user's store: beside that of the embedded pool, or else on a disk of this machine."""
    usual = files.default_path().parent
    home = next(each for each in (usual, *usual.parents) if each.is_dir())
    if files.first_local([home]) is not None:
        return usual / "slurm.db"
    others = [*filter(None, [os.environ.get("XDG_RUNTIME_DIR")]), tempfile.gettempdir()]
    base = files.first_local(map(Path, others)) or home
    return base / f"gpu-pool-{os.geteuid()}" / "slurm.db"
