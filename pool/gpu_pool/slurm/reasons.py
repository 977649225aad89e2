"""Why a Slurm job waits, said in words. Pure.

Slurm has a word for each reason: squeue's manual, JOB REASON CODES, and all of them in Slurm's source,
src/common/job_state_reason.c (26.05, most in older versions). Most words are of limits, and built of parts:
whose limit, how it counts and what it counts, as in ``QOSMaxGRESPerUser``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_NEVER: Final = "so that it never starts."

#: How a sentence of Slurm's begins that it has in place of a word (src/slurmctld/job_scheduler.c), and ours.
_NODES_DOWN: Final = (
    "Nodes required for job are DOWN",
    "The nodes that it could have are down, drained, or kept for partitions with a higher priority.",
)
#: Reasons that are no limits, and those that older versions have.
_SINGLE: Final[Mapping[str, str]] = {
    "None": "Slurm has not looked at it yet.",
    "WaitingForScheduling": "Slurm has not looked at it yet.",
    "SchedDefer": "Slurm has put it off until it next looks at the queue.",
    "Priority": "Jobs with a higher priority come first.",
    "Resources": "It waits until what it needs is free.",
    "ReqNodeNotAvail": "A node that it needs is down, reserved or in use.",
    "NodeDown": "A node that it needs is down.",
    "FrontEndDown": "No front end is there that could start it.",
    "MaxPoweredUpNodes": "As many nodes are powered up as may be.",
    "Prolog": "Its node is being prepared.",
    "Reservation": "It waits for its reservation to begin.",
    "ReservationDeleted": "Its reservation was deleted: ask for the GPU without it.",
    "ReservationInvalid": "Its reservation is not valid: ask for the GPU without it.",
    "PartitionDown": "Its partition is closed.",
    "PartitionInactive": "Its partition takes no jobs.",
    "PartitionConfig": "Its partition does not allow what it asks for.",
    "PartitionNodeLimit": "It asks for more nodes than its partition allows.",
    "PartitionTimeLimit": f"Its time limit is longer than its partition allows, {_NEVER}",
    "AccountingPolicy": "Limits of the cluster's accounting do not allow it now.",
    "AssociationJobLimit": "Your account runs as many jobs as it may.",
    "AssociationResourceLimit": "Your account uses as much as it may.",
    "AssociationTimeLimit": "Your account has used up its time.",
    "QOSJobLimit": "As many jobs of its QOS run as may.",
    "QOSResourceLimit": "Jobs of its QOS use as much as they may.",
    "QOSTimeLimit": "Its QOS has used up its time.",
    "QOSUsageThreshold": "Its QOS takes no jobs of those who have used the cluster as much as you have.",
    "QOSNotAllowed": "Its partition or account does not allow its QOS.",
    "AccountNotAllowed": "Its partition does not allow its account.",
    "InvalidAccount": "Its account is not valid.",
    "InvalidQOS": "Its QOS is not valid.",
    "MaxMemPerLimit": "It asks for more memory than a job may have.",
    "JobHeldAdmin": "An administrator holds it back.",
    "JobHeldUser": "It is held back: scontrol release lets it go on.",
    "JobHoldMaxRequeue": "It has failed to start too often, and is held back.",
    "JobLaunchFailure": "It could not be started. Its node may be at fault.",
    "JobArrayTaskLimit": "As many jobs of its array run as may.",
    "Dependency": "It waits for another job to end.",
    "DependencyNeverSatisfied": f"It waits for a job that has failed, {_NEVER}",
    "BeginTime": "It was asked for a later time.",
    "DeadLine": "It cannot end before its deadline.",
    "Licenses": "It waits for a licence.",
    "BadConstraints": f"No node is what it asks for, {_NEVER}",
    "Constraints": "No node that is there now is what it asks for.",
    "Cleaning": "It is started anew, and its last run is being cleaned up.",
    "BurstBufferResources": "It waits for space in the burst buffer.",
    "BurstBufferStageIn": "Its data are being copied into the burst buffer.",
    "BurstBufferOperation": "Something went wrong with the burst buffer.",
    "MpiPortsBusy": "It waits for ports of its nodes.",
    "NvidiaImexChannels": "It waits for a channel between the memories of GPUs (IMEX).",
    "FedJobLock": "It waits for the other clusters of its federation.",
    "SystemFailure": "Slurm, its network or its disk has failed.",
    "InactiveLimit": "It did nothing for too long.",
    "TimeLimit": "It reached its time limit.",
    "NonZeroExitCode": "It ended with an error.",
    "RaisedSignal": "A signal ended it.",
    "OutOfMemory": "It used more than its memory (not of the GPU).",
}

_WHOSE: Final[Mapping[str, str]] = {"Assoc": "your account", "QOS": "its QOS"}
#: What is counted: the word for so much of it, the noun, and the noun before "time".
_COUNTED: Final[Mapping[str, tuple[str, str, str]]] = {
    "Cpu": ("many", "processors", "processor"),
    "CPU": ("many", "processors", "processor"),
    "Mem": ("much", "memory", "memory"),
    "Memory": ("much", "memory", "memory"),
    "Node": ("many", "nodes", "node"),
    "GRES": ("many", "GPUs", "GPU"),
    "License": ("many", "licences", "licence"),
    "BB": ("much", "burst buffer", "burst buffer"),
    "Energy": ("much", "energy", "energy"),
    "Billing": ("much", "of what is charged for", "charged"),
    "Unknown": ("many", "resources", "allotted"),
    "Jobs": ("many", "jobs", "job"),
    "SubmitJobs": ("many", "jobs", "job"),
    "SubmitJob": ("many", "jobs", "job"),
    "Wall": ("much", "time", "running"),
}
_RESOURCE: Final = "(?P<what>" + "|".join(sorted(_COUNTED, key=len, reverse=True)) + ")"
#: How the words of limits are built, and what each says. The first that fits is meant.
_LIMITS: Final = tuple(
    (re.compile(pattern.replace("RESOURCE", _RESOURCE)), text)
    for pattern, text in (
        ("(?P<whose>Assoc|QOS)MaxWallDurationPerJobLimit",
         "Its time limit is longer than {whose} allows a job, {never}"),
        ("(?P<whose>Assoc|QOS)(Grp|Max)Submit(Job|Jobs)(PerUser)?Limit",
         "As many jobs are submitted as {whose} allows."),
        ("MaxSubmitJobsPerAccount", "Your account has submitted as many jobs as its QOS allows an account."),
        ("MaxJobsPerAccount", "Your account runs as many jobs as its QOS allows an account."),
        ("(?P<whose>Assoc|QOS)MaxJobs(PerUser)?Limit", "You run as many jobs as {whose} allows."),
        ("(?P<whose>Assoc|QOS)GrpJobsLimit", "As many jobs of {whose} run as may together."),
        ("(?P<whose>Assoc|QOS)GrpWall(Limit)?", "Jobs of {whose} have run for as long as they may together."),
        ("(?P<whose>Assoc|QOS)GrpRESOURCEMinutes(Limit)?", "Jobs of {whose} have used up their {time} time."),
        ("(?P<whose>Assoc|QOS)GrpRESOURCERunMinutes(Limit)?",
         "Jobs of {whose} that run may use up its {time} time: some have to end first."),
        ("(?P<whose>Assoc|QOS)GrpRESOURCE(Limit)?",
         "Jobs of {whose} use as {much} {what} as they may together."),
        ("(?P<whose>Assoc|QOS)MaxRESOURCEMinutesPerJob(Limit)?",
         "It asks for more {time} time than {whose} allows a job, {never}"),
        ("(?P<whose>Assoc|QOS)MaxRESOURCEPerJob(Limit)?",
         "It asks for more {what} than {whose} allows a job, {never}"),
        ("(?P<whose>Assoc|QOS)MaxRESOURCEPerNode(Limit)?",
         "It asks for more {what} of a node than {whose} allows, {never}"),
        ("(?P<whose>QOS)MaxRESOURCEPerUser(Limit)?", "You use as {much} {what} as its QOS allows a user."),
        ("(?P<whose>QOS)MinRESOURCE(NotSatisfied)?", "It asks for less {what} than its QOS demands, {never}"),
        ("MaxRESOURCEPerAccount", "Your account uses as {much} {what} as its QOS allows an account."),
        ("MaxRESOURCERunMinsPerAccount",
         "Jobs of your account that run have as much {time} time as its QOS allows an account."),
        ("MaxRESOURCERunMinsPerUser",
         "Jobs of yours that run have as much {time} time as its QOS allows a user."),
    )
)  # fmt: skip


def why_it_waits(word: str) -> str:
    """Return the sentence for Slurm's word; one that is not known is told as Slurm has it. Empty for none."""
    if word in _SINGLE or not word:
        return _SINGLE.get(word, "")
    if word.startswith(_NODES_DOWN[0]):
        return _NODES_DOWN[1]
    for pattern, text in _LIMITS:
        found = pattern.fullmatch(word)
        if found is None:
            continue
        parts = found.groupdict()
        much, what, time = _COUNTED.get(parts.get("what") or "", ("", "", ""))
        whose = _WHOSE.get(parts.get("whose") or "", "")
        return text.format(whose=whose, much=much, what=what, time=time, never=_NEVER)
    return f"Slurm says: {word}."
