"""What ``doctor`` says of a pool ``slurm:``: whether kernels can be jobs, and what is lacking."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import psutil
from jupyter_core.paths import jupyter_data_dir
from traitlets import TraitError

from gpu_pool.cli.checks import Check
from gpu_pool.cli.formatting import safe
from gpu_pool.settings import load_config
from gpu_pool.slurm import jobs
from gpu_pool.slurm.commands import ask
from gpu_pool.slurm.settings import SlurmSettings
from gpu_pool.store import files
from gpu_pool_client import GpuPoolError
from gpu_pool_client._processes import account_of

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
