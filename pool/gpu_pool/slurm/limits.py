"""What Slurm's accounting allows one user's jobs, and what of a course goes beyond it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from gpu_pool_client import format_duration

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
