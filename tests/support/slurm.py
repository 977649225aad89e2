"""A Slurm cluster of two nodes on this machine, with GPUs in name only.

Debian's munge, slurmctld and slurmd (``apt install slurm-wlm slurm-wlm-basic-plugins munge``), in a folder of
their own and at ports of their own, as the user that runs the tests::

    with slurm_cluster(folder) as slurm:             # some seconds
        slurm.run("srun", "--gres=shard:40", "true")

``n1`` has two GPUs of the type ``v100`` and ``n2``, at an address of its own, one of the type ``t4``, each in
100 shards. A GPU is a
device file that every machine has: Slurm counts it, names it to jobs, and limits nothing.

``n2`` can be a machine of its own, in namespaces::

    with far_node(shared) as far, slurm_cluster(folder, far=far) as slurm:
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.namespaces import Machine, may_make_machines, node
from support.ports import free_ports

#: Of the repository, in which our packages are, and mostly the environment.
_ROOT = Path(__file__).parents[2]

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo", "squeue")
#: The host name of the second machine.
FAR = "far"
#: Debian's own place for daemons, which not everybody has in ``PATH``.
PLACES = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
#: Seconds for a daemon to answer, and to end.
_STARTS_WITHIN, _ENDS_WITHIN = 120.0, 30.0
#: States of a job that has not ended.
_UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED")
#: Seconds between two questions to it meanwhile.
_EVERY = 0.1

_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}({addresses[0]})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_min_interval=100000,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
MpiDefault=none
NodeName=DEFAULT RealMemory=4096
GresTypes=gpu,shard
NodeName=n1 NodeHostname={hosts[0]} NodeAddr={addresses[0]} Port={ports[0]} CPUs=16 Gres=gpu:v100:2,shard:200
NodeName=n2 NodeHostname={hosts[1]} NodeAddr={addresses[1]} Port={ports[1]} CPUs=16 Gres=gpu:t4:1,shard:100
PartitionName=gpu Nodes=n1,n2 Default=YES MaxTime=1:00:00 DefaultTime=30:00
PartitionName=large Nodes=n1 MaxTime=1:00:00 DefaultTime=30:00
"""
_DEVICES = """\
NodeName=n1 Name=gpu Type=v100 File=/dev/null
NodeName=n1 Name=gpu Type=v100 File=/dev/zero
NodeName=n1 Name=shard Count=200
NodeName=n2 Name=gpu Type=t4 File=/dev/null
NodeName=n2 Name=shard Count=100
"""


#: A cluster's cgroup.conf, which limits processors and memory.
CGROUP_CONF = """\
CgroupPlugin=cgroup/v1
ConstrainCores=yes
ConstrainRAMSpace=yes
ConstrainSwapSpace=yes
"""
#: Where Slurm's cgroup/v1 does that; a cgroup2 is a service manager's to divide.
_CGROUPS = Path("/sys/fs/cgroup")


def cannot_limit() -> str:
    """Say why Slurm cannot limit jobs here; empty where it can."""
    if os.geteuid() != 0:
        return "Slurm limits jobs as root alone"
    for name, needed in (("memory", "memory.limit_in_bytes"), ("cpuset", "cpuset.cpus")):
        folder = _CGROUPS / name
        if not os.access(folder / "cgroup.procs", os.W_OK) or not (folder / needed).exists():
            return f"no cgroup of version 1 can be made in {folder}"
    return ""


def missing() -> str:
    """Say which of Slurm's programs this machine lacks; empty for none."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=PLACES) is None]
    if not absent:
        return ""
    return f"Slurm's {', '.join(absent)} are missing: apt install slurm-wlm slurm-wlm-basic-plugins munge"


def has_plugin(name: str) -> bool:
    """Whether the Slurm that is found has a plugin: packages, and builds of one's own, may leave some out."""
    program = shutil.which("slurmctld", path=PLACES)
    if program is None:
        return False
    root = Path(program).resolve().parents[1]
    return any([*root.glob(f"lib*/slurm*/{name}.so"), *root.glob(f"lib*/*/slurm*/{name}.so")])


@dataclass(frozen=True)
class Slurm:
    """A running cluster."""

    folder: Path
    #: The variables by which Slurm's commands find it.
    environment: Mapping[str, str]

    def run(self, *words: str, **environ: str) -> str:
        """Run a command, and return what it printed."""
        done = subprocess.run(
            words,
            env={**self.environment, **environ},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def python(self, code: str, *options: str, **environ: str) -> str:
        """Run Python ``code`` in a job of its own, with these options of ``srun``; return what it printed."""
        return self.run("srun", "--quiet", *options, sys.executable, "-c", code, **environ)

    def submit(self, script: str, *options: str, **environ: str) -> str:
        """Submit a shell script, and return the job's id. Its output goes to ``output(id)``."""
        file = self.folder / f"job-{time.monotonic_ns()}.sh"
        file.write_text(f"#!/bin/bash\n{script}\n")
        where = f"--output={self.folder}/job-%j.out"
        return self.run("sbatch", "--parsable", where, *options, str(file), **environ).strip()

    def output(self, job: str) -> Path:
        return self.folder / f"job-{job}.out"

    def state(self, job: str) -> str:
        """Return ``RUNNING``, ``PENDING`` …, also of a job that has ended lately."""
        return self.job(job)["JobState"]

    def job(self, job: str) -> dict[str, str]:
        """Return what Slurm shows of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words)

    def until(self, job: str, state: str) -> None:
        """Return once a job is in that state; Slurm tells nobody, so that it is asked."""
        give_up_at = time.monotonic() + _STARTS_WITHIN
        while (now := self.state(job)) != state:
            is_over = now not in _UNDER_WAY or time.monotonic() > give_up_at
            assert not is_over, f"{now}\n{self.output(job).read_text()}"
            time.sleep(_EVERY)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Let the controller answer nobody meanwhile: requests time out."""
        controller = int((self.folder / "slurmctld.pid").read_text())
        os.kill(controller, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(controller, signal.SIGCONT)

    def cancel_all(self) -> None:
        """End all jobs, and return once none is left."""
        while jobs := self.run("squeue", "--noheader", "--format=%A").split():
            self.run("scancel", "--quiet", *jobs)
            time.sleep(_EVERY)


#: Runs what keeps accounts, for the cluster in a folder, whose commands have these variables.
Accounting = Callable[[Path, Mapping[str, str]], AbstractContextManager[None]]


@contextmanager
def slurm_cluster(
    folder: Path,
    more: str = "",
    accounting: Accounting | None = None,
    part: str = "shard",
    far: Machine | None = None,
) -> Iterator[Slurm]:
    """Run a cluster in ``folder``; end it, and all that runs in it.

    ``more`` are lines of slurm.conf, in place of those that say the same or besides them, ``accounting`` runs
    what keeps accounts, and GPUs are in 100 ``part`` each: ``shard``, or ``mps``. ``far`` is the machine of
    ``n2``, which has its own ``folder``; None for this one.
    """
    port, *ports = free_ports(3)
    host = socket.gethostname().partition(".")[0]
    told = {
        "folder": folder,
        "host": host,
        "hosts": (host, host if far is None else FAR),
        "addresses": ("127.0.0.1", "127.0.0.2") if far is None else (far.outside, far.address),
        "user": user_name(),
        "port": port,
        "ports": ports,
    }
    names = {line.partition("=")[0] for line in more.splitlines()} - {"NodeName", "PartitionName"}
    lines = _CONFIGURATION.replace("shard", part).format(**told).splitlines(keepends=True)
    kept = "".join(line for line in lines if line.partition("=")[0] not in names)
    (folder / "slurm.conf").write_text(kept + more)
    (folder / "gres.conf").write_text(_DEVICES.replace("shard", part))
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    environment = {**os.environ, "PATH": PLACES, "SLURM_CONF": str(folder / "slurm.conf")}
    slurm = Slurm(folder, environment)
    with ExitStack() as running:
        running.enter_context(daemon(folder, "munged", _munged(folder), environment))
        wait_for(environment, ("munge", "--socket", f"{folder}/munge.socket", "--no-input"))
        if accounting is not None:
            running.enter_context(accounting(folder, environment))
        running.enter_context(daemon(folder, "slurmctld", ("slurmctld", "-D", "-c"), environment))
        running.enter_context(daemon(folder, "n1", ("slurmd", "-D", "-N", "n1"), environment))
        there: Sequence[str] = ("slurmd", "-D", "-N", "n2")
        if far is not None:
            for file in [each for each in folder.iterdir() if each.suffix in (".conf", ".key", ".sh")]:
                far.copy(file)
            munged = daemon(folder, "munged-n2", far.inside(*_munged(folder)), environment)
            running.enter_context(munged)
            wait_for(environment, far.inside("munge", "--socket", f"{folder}/munge.socket", "--no-input"))
            there = far.inside(*there)
        running.enter_context(daemon(folder, "n2", there, environment))
        running.callback(slurm.cancel_all)
        wait_for(environment, ("sinfo", "--noheader", "--states=idle", "--format=%D"), "2\n")
        yield slurm


@contextmanager
def far_node(shared: Path) -> Iterator[Machine]:
    """Make a machine for ``n2`` that has the same folder ``shared``, and else other temporary files.

    Of the first one's it has the Python that runs the tests as well, as clusters have it on all nodes, and
    what that is made of, which may be below /tmp.
    """
    with node(FAR, (shared, Path(sys.prefix), _ROOT), ("/tmp", "/run", "/dev/shm", "/var/spool")) as made:
        yield made


def no_far_node() -> str:
    """Say why no second machine can be made; empty where it can."""
    if shutil.which("ip") is None or shutil.which("nft") is None:
        return "ip and nft are missing, for a second machine: apt install iproute2 nftables"
    return "" if may_make_machines() else "a second machine needs root, and namespaces"


def _munged(folder: Path) -> Sequence[str]:
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder}/munge.{end}" for option, end in files.items()]
    return ("munged", "--foreground", "--force", *options)


def user_name() -> str:
    """Return who runs the tests, and their cluster."""
    return pwd.getpwuid(os.geteuid()).pw_name


@contextmanager
def daemon(folder: Path, name: str, command: Sequence[str], environ: Mapping[str, str]) -> Iterator[None]:
    """Run a program until the end, or this process's, with its output in a file of the ``folder``."""
    with (folder / f"{name}.log").open("wb") as log:
        ends_with_us = ("setpriv", "--pdeathsig", "TERM", *command)
        process = subprocess.Popen(ends_with_us, env=dict(environ), stdout=log, stderr=log, cwd=folder)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(environ: Mapping[str, str], command: Sequence[str], printed: str = "") -> None:
    """Return once a command works, and prints that; they all are asked: nothing tells of it."""
    give_up_at = time.monotonic() + _STARTS_WITHIN
    while True:
        done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, check=False)
        if done.returncode == 0 and printed in done.stdout:
            return
        assert time.monotonic() < give_up_at, f"{command}: {done.stdout}{done.stderr}"
        time.sleep(_EVERY)
