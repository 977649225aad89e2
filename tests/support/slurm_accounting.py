"""Slurm's accounting for the tests' cluster: MariaDB and slurmdbd, in the cluster's folder.

Debian's (``apt install slurmdbd mariadb-server-core mariadb-client-core``), at ports of their own, as whoever
runs the tests::

    with accounted_slurm_cluster(folder) as slurm:    # some seconds more
        slurm.run("sacct")

That user is in the account ``teaching`` alone, and may use the QOS ``one-gpu`` besides the usual one. By that
each user may have one GPU, or 50 shards, and two jobs at once. Limits and accounts are enforced.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.ports import free_ports
from support.slurm import PLACES, Slurm, daemon, has_plugin, slurm_cluster, user_name, wait_for

_PROGRAMS = ("slurmdbd", "sacct", "sacctmgr", "mariadbd", "mariadb-install-db", "mariadb")

_IN_SLURM_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu,gres/shard
AccountingStoreFlags=job_comment
JobAcctGatherType=jobacct_gather/none
"""
_SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={of_database}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
"""
#: Only this machine's processes reach it while the tests run, and nothing is in it but their jobs.
_DATABASE = """\
CREATE DATABASE IF NOT EXISTS slurm;
CREATE USER IF NOT EXISTS
    'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm', 'slurm'@'localhost' IDENTIFIED BY 'slurm';
GRANT ALL ON slurm.* TO 'slurm'@'127.0.0.1', 'slurm'@'localhost';
"""
_ACCOUNTS = (
    ("account", "teaching"),
    ("qos", "one-gpu", "MaxTRESPerUser=gres/gpu=1,gres/shard=50", "MaxSubmitJobsPerUser=2"),
)
_USER = ("user", user_name(), "account=teaching", "defaultaccount=teaching", "qos=normal,one-gpu")


def accounting_missing() -> str:
    """Say which programs for Slurm's accounting this machine lacks; empty for none."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=PLACES) is None]
    if absent:
        return (
            f"{', '.join(absent)} are missing: apt install slurmdbd mariadb-server-core mariadb-client-core"
        )
    if not has_plugin("accounting_storage_mysql"):
        return "this Slurm has no plugin accounting_storage/mysql"
    return ""


@contextmanager
def accounted_slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Run a cluster that keeps accounts in the empty ``folder``; end it, and all that runs in it."""
    with slurm_cluster(folder, accounting=_accounting) as slurm:
        # The controller tells of what it counts.
        wait_for(slurm.environment, ("sacctmgr", "--noheader", "show", "tres", "format=name"), "shard")
        for words in _ACCOUNTS:
            change(slurm, "add", *words)
        # Slurm has put root into an account by itself.
        subprocess.run(
            ("sacctmgr", "--immediate", "delete", "user", user_name()),
            env=dict(slurm.environment),
            capture_output=True,
            check=False,
        )
        change(slurm, "add", *_USER)
        yield slurm


def change(slurm: Slurm, *words: str) -> None:
    """Change what the accounting has: the words of ``sacctmgr``."""
    slurm.run("sacctmgr", "--immediate", *words)


@contextmanager
def limited(slurm: Slurm, **limits: str) -> Iterator[None]:
    """Limit the jobs of whoever runs the tests meanwhile, as ``sacctmgr`` calls the limits."""
    of_user = ("modify", "user", user_name(), "account=teaching", "set")
    change(slurm, *of_user, *(f"{name}={value}" for name, value in limits.items()))
    try:
        yield
    finally:
        # Of gres/gpu=1 the number alone is taken back.
        none = (f"{name}={''.join(value.rpartition('=')[:2])}-1" for name, value in limits.items())
        change(slurm, *of_user, *none)


@contextmanager
def without_account(slurm: Slurm) -> Iterator[None]:
    """Let whoever runs the tests be in no account meanwhile."""
    change(slurm, "delete", "user", user_name())
    try:
        yield
    finally:
        change(slurm, "add", *_USER)


@contextmanager
def _accounting(folder: Path, environ: Mapping[str, str]) -> Iterator[None]:
    of_database, port = free_ports(2)
    host = next(
        line.partition("=")[2].partition("(")[0]
        for line in (folder / "slurm.conf").read_text().splitlines()
        if line.startswith("SlurmctldHost=")
    )
    told = {"folder": folder, "host": host, "port": port, "of_database": of_database, "user": user_name()}
    with (folder / "slurm.conf").open("a") as file:
        file.write(_IN_SLURM_CONF.format(**told))
    of_slurmdbd = folder / "slurmdbd.conf"
    of_slurmdbd.touch(mode=0o600)  # it refuses one that others can read
    of_slurmdbd.write_text(_SLURMDBD_CONF.format(**told))
    with ExitStack() as running:
        running.enter_context(_database(folder, of_database, environ))
        running.enter_context(daemon(folder, "slurmdbd", ("slurmdbd", "-D"), environ))
        wait_for(environ, ("sacctmgr", "--noheader", "show", "cluster"))
        _run(environ, "sacctmgr", "--immediate", "add", "cluster", "tests")
        yield


@contextmanager
def _database(folder: Path, port: int, environ: Mapping[str, str]) -> Iterator[None]:
    data, socket = folder / "database", folder / "database.socket"
    # Whoever starts it as root has to say so.
    user = [f"--user={user_name()}"]
    _run(
        environ,
        *("mariadb-install-db", "--no-defaults", f"--datadir={data}", "--skip-test-db", *user),
        "--auth-root-authentication-method=normal",
    )
    where = (f"--socket={socket}", f"--port={port}", "--bind-address=127.0.0.1")
    command = (
        "mariadbd",
        "--no-defaults",
        f"--datadir={data}",
        *where,
        *user,
        "--innodb-buffer-pool-size=64M",
    )
    with daemon(folder, "mariadbd", (*command, f"--pid-file={folder}/mariadbd.pid"), environ):
        wait_for(environ, ("mariadb", "--no-defaults", f"--socket={socket}", "--user=root", "-e", _DATABASE))
        yield


def _run(environ: Mapping[str, str], *words: str) -> None:
    done = subprocess.run(words, env=dict(environ), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
