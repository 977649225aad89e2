"""What ``doctor`` says of courses whose kernels' jobs are beyond what Slurm's accounting allows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from traitlets import TraitError

from gpu_pool.cli.checks import Check
from gpu_pool.cli.courses import read_files
from gpu_pool.cli.formatting import safe
from gpu_pool.settings import load_config, load_settings
from gpu_pool.slurm import jobs, limits
from gpu_pool.slurm.commands import ask
from gpu_pool.slurm.settings import SlurmSettings
from gpu_pool_client import GpuPoolError
from gpu_pool_client._processes import account_of

if TYPE_CHECKING:
    from gpu_pool.courses import CourseFile

_LONGEST: Final = 400
_REMEDY: Final = "Change the course's file, or let the administrator raise the limit: sacctmgr modify."


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
        qos = limits.read_qos(ask(*show, "qos", limits.QOS_FIELDS))
        accounts = limits.read_associations(ask(*show, "assoc", f"user={user}", limits.ASSOCIATION_FIELDS))
        default = ask(*show, "user", user, "format=defaultaccount").strip()
        found = read_files((), pool)
    except (GpuPoolError, TraitError):
        return
    for each in found:
        if each.course is not None and accounts:
            for told in _beyond(each.course, settings, nodes, qos, accounts, default):
                yield Check("slurm limits", "note", safe(f"course {each.name} {told}", _LONGEST), _REMEDY)


def _beyond(
    course: CourseFile,
    settings: SlurmSettings,
    nodes: str,
    qos: dict[str, limits.JobLimits],
    accounts: dict[str, limits.Association],
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
