"""What ``doctor`` says of a pool ``slurm:``: whether kernels can be jobs, and what of courses cannot."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil
from jupyter_core.paths import jupyter_data_dir
from traitlets import TraitError

from gpu_pool.cli.checks import Check
from gpu_pool.cli.courses import read_files
from gpu_pool.cli.formatting import safe
from gpu_pool.settings import load_config, load_settings
from gpu_pool.slurm import jobs
from gpu_pool.slurm.commands import ask
from gpu_pool.slurm.settings import SlurmSettings
from gpu_pool.store import files
from gpu_pool_client import GpuPoolError, format_duration
from gpu_pool_client._processes import account_of

if TYPE_CHECKING:
    from gpu_pool.courses import CourseFile

_COMMANDS: Final = ("sbatch", "scancel", "scontrol", "sinfo", "squeue")
#: The first version with gres/shard.
_SHARDS_SINCE: Final = (22, 5)
#: Seconds for an answer beyond which a note is made.
_SLOW: Final = 2.0
_LONGEST: Final = 300


def check_slurm() -> Iterator[Check]:
    """Look at Slurm's commands, its controller, its GPUs, the user's account, and where jobs are written."""
    absent = [name for name in _COMMANDS if shutil.which(name) is None]
    if absent:
        text = f"{', '.join(absent)} not on the PATH: no kernel can be a job"
        yield Check("slurm", "broken", text, "Start Jupyter on a node where Slurm's commands are.")
        return
    began = time.monotonic()
    try:
        config = jobs.read_config(ask("scontrol", "show", "config"))
        nodes = ask("sinfo", "--noheader", "--all", "--Node", f"--format={jobs.SINFO_FORMAT}")
    except GpuPoolError as error:
        by_munge = "munge" in error.message.lower()
        remedy = "See whether munge runs: systemctl status munge" if by_munge else "scontrol ping"
        yield Check("slurm", "broken", safe(error.message, _LONGEST), remedy)
        return
    took = time.monotonic() - began
    version = config.get("SLURM_VERSION", "")
    text = f"{safe(config.get('ClusterName', ''))}, Slurm {safe(version)}, answers in {took / 2:.1f} s"
    if took / 2 > _SLOW:
        yield Check("slurm", "note", text, "Its queue is asked less often then: positions are shown late.")
    else:
        yield Check("slurm", "ok", text)
    yield from _gpus(config, nodes)
    yield from _what_is_hidden(config)
    yield from _account(config)
    yield _folder()


def _gpus(config: Mapping[str, str], nodes: str) -> Iterator[Check]:
    """Say which GPUs the partition has, in how many shards, and of which the memory is not known."""
    types = config.get("GresTypes", "").split(",")
    if not {"shard", "mps"}.intersection(types):
        found = [int(each) for each in re.findall(r"\d+", config.get("SLURM_VERSION", ""))[:2]]
        is_old = len(found) == len(_SHARDS_SINCE) and tuple(found) < _SHARDS_SINCE
        why = "Slurm has them since 22.05." if is_old else "Add shard to GresTypes, and shards to the nodes."
        yield Check("slurm shards", "note", "none here: kernels get whole GPUs", why)
    try:
        settings = SlurmSettings(config=load_config())
    except (TraitError, GpuPoolError) as error:
        yield Check("slurm settings", "broken", safe(str(error), _LONGEST), "Correct c.SlurmSettings.")
        return
    kinds = jobs.read_kinds(nodes, settings.partition)
    where = jobs.partition_named(safe(settings.partition))
    if not kinds:
        yield Check(
            "slurm gpus",
            "broken",
            f"{where} has none",
            "Name another: c.SlurmSettings.partition; see sinfo --all -o '%P %G'",
        )
        return
    told = [
        f"{safe(kind.type) or 'GPU'} ({kind.per_node} on a node"
        + (f", {kind.parts} each)" if kind.shards else ")")
        for kind in kinds
    ]
    yield Check("slurm gpus", "ok", f"{where} has {', '.join(told)}")
    unknown = [kind.type or "GPU" for kind in kinds if not jobs.memory_mib(kind, settings.gpu_memory)]
    if unknown:
        yield Check(
            "slurm gpus",
            "note",
            f"the memory of {', '.join(map(safe, unknown))} is not known: only whole ones can be had",
            f"Say how many GiB each has: c.SlurmSettings.gpu_memory = {{{unknown[0]!r}: 32}}",
        )


def _what_is_hidden(config: Mapping[str, str]) -> Iterator[Check]:
    if "jobs" in config.get("PrivateData", ""):
        yield Check("slurm queue", "note", "others' jobs are hidden (PrivateData): no position is shown")
    plugins = config.get("JobSubmitPlugins", "(null)")
    if plugins not in ("(null)", ""):
        text = f"jobs pass {safe(plugins)}, which may change or refuse them; its words are shown in the cell"
        yield Check("slurm submit", "note", text)


def _account(config: Mapping[str, str]) -> Iterator[Check]:
    """Say in which accounts the user is, where Slurm keeps accounts."""
    if not config.get("AccountingStorageType", "").endswith("slurmdbd"):
        yield Check(
            "slurm accounting", "ok", "Slurm keeps none: nobody needs an account, and sacct says nothing"
        )
        return
    user = account_of(os.geteuid())  # as Slurm sees who asks, whatever LOGNAME says
    fields = "format=account,qos,maxjobs,maxsubmitjobs,maxtresperjob"
    try:
        shown = ask("sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={user}", fields)
    except GpuPoolError as error:
        yield Check("slurm accounting", "note", safe(error.message, _LONGEST), "See whether slurmdbd runs.")
        return
    rows = [line.split("|") for line in shown.splitlines() if line]
    if not rows:
        is_needed = "associations" in config.get("AccountingStorageEnforce", "")
        text = f"{safe(user)} has no association in Slurm's accounting"
        text += ": its jobs are refused" if is_needed else ""
        remedy = f"The administrator adds one: sacctmgr add user {user} account=ACCOUNT"
        yield Check("slurm accounting", "broken" if is_needed else "note", text, safe(remedy, _LONGEST))
    for account, qos, running, submitted, tres in rows:
        limits = {"QOS": qos, "running jobs": running, "jobs at once": submitted, "per job": tres}
        said = "; ".join(f"{name}: {safe(value)}" for name, value in limits.items() if value)
        yield Check("slurm accounting", "ok", f"account {safe(account)}{f' ({said})' if said else ''}")


def _folder() -> Check:
    """Say where jobs are written, which the nodes must see: that cannot be seen from here."""
    folder = Path(jupyter_data_dir())
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    mounts = ((part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True))
    kind = files.file_system(there.resolve(), mounts) or "unknown file system"
    text = f"jobs are written below {safe(str(folder), _LONGEST)} ({kind}); whether nodes have it is not seen"
    return Check(
        "slurm folder", "ok", text, f"To see it: srun --gres=gpu:1 ls -d {safe(str(there), _LONGEST)}"
    )


_LONGEST_LIMIT: Final = 400
_LIMIT_REMEDY: Final = "Change the course's file, or let the administrator raise the limit: sacctmgr modify."


def check_course_limits() -> Iterator[Check]:
    """Compare the courses with this user's accounts and QOS. What else is wrong, other checks say."""
    try:
        config = jobs.read_config(ask("scontrol", "show", "config"))
        pool = load_settings()
        if not pool.courses_dir or not config.get("AccountingStorageType", "").endswith("slurmdbd"):
            return
        settings, show = (
            SlurmSettings(config=load_config()),
            ("sacctmgr", "--noheader", "--parsable2", "show"),
        )
        nodes = ask("sinfo", "--noheader", "--all", "--Node", f"--format={jobs.SINFO_FORMAT}")
        user = account_of(os.geteuid())
        qos = read_qos(ask(*show, "qos", QOS_FIELDS))
        accounts = read_associations(ask(*show, "assoc", f"user={user}", ASSOCIATION_FIELDS))
        default = ask(*show, "user", user, "format=defaultaccount").strip()
        found = read_files((), pool)
    except (GpuPoolError, TraitError):
        return
    for each in found:
        if each.course is not None and accounts:
            for told in _beyond(each.course, settings, nodes, qos, accounts, default):
                yield Check(
                    "slurm limits", "note", safe(f"course {each.name} {told}", _LONGEST_LIMIT), _LIMIT_REMEDY
                )


def _beyond(
    course: CourseFile,
    settings: SlurmSettings,
    nodes: str,
    qos: dict[str, JobLimits],
    accounts: dict[str, Association],
    default: str,
) -> Iterator[str]:
    """Yield what of a course Slurm would not start for this user."""
    options = dict(each.removeprefix("--").split("=", 1) for each in settings.options(course.slurm))
    account = options.get("account", default)
    association = accounts.get(account)
    if association is None:
        yield f"uses the account {account}, in which you are not: its jobs are refused"
        return
    name = options.get("qos", association.default_qos)
    if name and association.qos and name not in association.qos:
        yield f"uses the QOS {name}, which the account {account} does not give you: its jobs are refused"
        return
    seconds = None if course.slurm is None else course.slurm.time
    kinds = jobs.read_kinds(nodes, options.get("partition", ""))
    for offer in course.slices:
        try:
            request, chosen = jobs.counted(offer.request, kinds, settings.gpu_memory)
        except GpuPoolError:
            continue
        gres = next(kind for kind in kinds if kind.type == chosen).gres(request)
        for limit in filter(None, (qos.get(name), association.limits)):
            for told in limit.excesses(gres, seconds):
                yield f"offers {offer.name}, which {told}: its jobs are refused, or wait for ever"


#: What sacctmgr is asked for of a QOS, and of the association of a user with an account.
QOS_FIELDS: Final = "format=name,maxtresperuser,maxtresperjob,maxwall"
ASSOCIATION_FIELDS: Final = "format=account,maxtresperjob,maxwall,qos,defaultqos"
_TIME: Final = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class JobLimits:
    """The limits of a QOS, or of an association, that a single job can be beyond."""

    #: Whose they are: ``the QOS teaching``.
    whose: str
    #: How many of each resource, such as ``gres/gpu``, and how sacctmgr calls that limit.
    resources: Mapping[str, tuple[int, str]]
    #: Seconds; None for no limit.
    longest: float | None

    def excesses(self, gres: str, seconds: float | None) -> Iterator[str]:
        """Yield in which ways a job is beyond them that asks for this ``--gres``, and runs for so long."""
        name, _, rest = gres.partition(":")
        kind, _, number = rest.rpartition(":")
        for resource in filter(None, (f"gres/{name}", kind and f"gres/{name}:{kind}")):
            most, limit = self.resources.get(resource, (None, ""))
            if most is not None and int(number) > most:
                yield f"needs {resource}={number}, and {self.whose} allows {most} ({limit})"
        if seconds is not None and self.longest is not None and seconds > self.longest:
            yield (
                f"has a time limit of {format_duration(seconds)}, "
                f"and {self.whose} allows {format_duration(self.longest)} (MaxWall)"
            )


def read_qos(printed: str) -> dict[str, JobLimits]:
    """Read what sacctmgr printed in :data:`QOS_FIELDS`, by the names of QOS."""
    found = {}
    for line in printed.splitlines():
        parts = line.split("|")
        if len(parts) == 4:
            name, per_user, per_job, wall = parts
            resources = {**_resources(per_user, "MaxTRESPerUser"), **_resources(per_job, "MaxTRESPerJob")}
            for resource, (most, limit) in _resources(per_user, "MaxTRESPerUser").items():
                if most < resources[resource][0]:
                    resources[resource] = most, limit
            found[name] = JobLimits(f"the QOS {name}", resources, read_duration(wall))
    return found


@dataclass(frozen=True, slots=True)
class Association:
    """What one user may have by one account."""

    limits: JobLimits
    #: The QOS that jobs may name, and the one that they have without naming any; empty for the cluster's.
    qos: tuple[str, ...]
    default_qos: str


def read_associations(printed: str) -> dict[str, Association]:
    """Read what sacctmgr printed in :data:`ASSOCIATION_FIELDS`, by the names of accounts."""
    found = {}
    for line in printed.splitlines():
        parts = line.split("|")
        if len(parts) == 5:
            account, per_job, wall, qos, default = parts
            limits = JobLimits(
                f"the account {account}", _resources(per_job, "MaxTRESPerJob"), read_duration(wall)
            )
            found[account] = Association(limits, tuple(filter(None, qos.split(","))), default)
    return found


def _resources(text: str, limit: str) -> dict[str, tuple[int, str]]:
    pairs = (each.rpartition("=") for each in text.split(",") if each)
    return {name: (int(number), limit) for name, _, number in pairs if number.isdecimal()}


def read_duration(text: str) -> float | None:
    """Return how long that is in seconds, as sacctmgr writes it: ``1-12:00:00``. None for no limit."""
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
