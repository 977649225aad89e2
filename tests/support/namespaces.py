"""Linux namespaces in which a test runs whole machines: what is mounted and routed there is gone with them.

One process keeps them; when it ends, so does every process within. A machine
gets a network of its own, which this one reaches by a route.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: The first process within: it takes over every orphan, and is told of nothing else.
_INIT = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n    signal.pause()\n"


@dataclass(frozen=True)
class Machine:
    """Namespaces of mounts, network, processes and names, by the process that keeps them."""

    keeper: int
    #: 10.x; the machine is 10.x.0.2 and this one 10.x.0.1 to it.
    network: str

    @property
    def address(self) -> str:
        """Where it is reached from this machine."""
        return f"{self.network}.0.2"

    @property
    def outside(self) -> str:
        """Where this machine is reached from there."""
        return f"{self.network}.0.1"

    @property
    def pods(self) -> str:
        """The network of its pods."""
        return f"{self.network}.128.0/17"

    @property
    def services(self) -> str:
        """The network of its services."""
        return f"{self.network}.64.0/18"

    def inside(self, *command: object) -> list[str]:
        """Return how a command is run there."""
        enter = ("nsenter", "--target", str(self.keeper), "--mount", "--uts", "--net", "--pid", "--")
        return [*enter, *map(str, command)]

    def run(self, *command: object) -> str:
        """Run a command there; fail with what it says if it fails."""
        done = subprocess.run(self.inside(*command), capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stderr}"
        return done.stdout

    def die(self) -> None:
        """Have it die as by a power failure: its network is gone, and then all processes but its keeper."""
        pull = 'for each in /sys/class/net/gpm-*; do ip link set "${each##*/}" down; done'
        self.run("mount", "-t", "sysfs", "own", "/sys")
        subprocess.run(self.inside("sh", "-c", f"{pull}; kill -KILL -1"), check=True)

    def copy(self, file: Path) -> None:
        """Give it a file of this machine, at the same path and as readable as here."""
        self.run("mkdir", "-p", file.parent)
        write = (
            "sh",
            "-c",
            'umask 077; cat > "$0" && chmod "$1" "$0"',
            file,
            f"{file.stat().st_mode & 0o777:o}",
        )
        subprocess.run(self.inside(*write), input=file.read_bytes(), check=True)


@contextmanager
def machine(mounts: Sequence[tuple[Path, str]]) -> Iterator[Machine]:
    """Make a machine in which each of these folders lies at another path, too."""
    with _kept() as made:
        _mount(made, mounts)
        _connect(made)
        for network in (made.pods, made.services):
            # Its interface goes with the machine, and this route with that.
            subprocess.run(["ip", "route", "add", network, "via", made.address], check=True)
        made.run("ip", "route", "add", "default", "via", made.outside)
        made.run("sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        yield made


@contextmanager
def node(name: str, shared: Sequence[Path], own: Sequence[str]) -> Iterator[Machine]:
    """Make a machine with a host name and folders of its ``own``, which are empty.

    Of what is ``shared``, which may be below one of these, both machines have the same, as of a home on NFS.
    It reaches this machine and no other one; with this process it ends in any case.
    """
    with _kept("setpriv", "--pdeathsig", "KILL") as made:
        made.run("hostname", name)
        made.run("mount", "-t", "tmpfs", "kept", "/mnt")
        for number, folder in enumerate(shared):
            made.run("mkdir", f"/mnt/{number}")
            made.run("mount", "--bind", folder, f"/mnt/{number}")
        for folder in own:
            made.run("mount", "-t", "tmpfs", "-o", "mode=1777", "own", folder)
        for number, folder in enumerate(shared):
            made.run("mkdir", "-p", folder)
            made.run("mount", "--move", f"/mnt/{number}", folder)
        made.run("umount", "/mnt")
        _connect(made)
        yield made


@contextmanager
def _kept(*under: str) -> Iterator[Machine]:
    """Make namespaces, and keep them by a process that is run by the command ``under``."""
    flags = ("--mount", "--uts", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
    command = [*under, "unshare", *flags, sys.executable, "-c", _INIT]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield Machine(_child_of(process.pid), _free_network())
    finally:
        process.kill()
        process.wait()


def _free_network() -> str:
    """Return one that no other machine beside this one has."""
    routes = subprocess.run(["ip", "-4", "route"], check=True, capture_output=True, text=True).stdout
    return secrets.choice([name for number in range(64, 128) if f"{(name := f'10.{number}')}." not in routes])


def _child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + 120
    while not (found := children.read_text().split()):
        assert time.monotonic() < deadline, "unshare has started nothing"
        time.sleep(0.01)
    return int(found[0])


def _mount(made: Machine, mounts: Sequence[tuple[Path, str]]) -> None:
    for folder, path in mounts:
        folder.mkdir(parents=True, exist_ok=True)
        Path(path).mkdir(parents=True, exist_ok=True)
        made.run("mount", "--bind", folder, path)
    # Volumes that are mounted later are seen by containers.
    made.run("mount", "--make-rshared", "/")


def _connect(made: Machine) -> None:
    """Connect it with this machine by a pair of interfaces, which end with it."""
    name = secrets.token_hex(3)
    ours, theirs = f"gp-{name}", f"gpm-{name}"
    pair = ["ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", str(made.keeper)]
    subprocess.run(pair, check=True)
    subprocess.run(["ip", "address", "add", f"{made.outside}/24", "dev", ours], check=True)
    subprocess.run(["ip", "link", "set", ours, "up"], check=True)
    made.run("ip", "link", "set", "lo", "up")
    made.run("ip", "address", "add", f"{made.address}/24", "dev", theirs)
    made.run("ip", "link", "set", theirs, "up")


def may_make_machines() -> bool:
    """Whether this process may make namespaces, mounts and interfaces."""
    if os.geteuid() != 0:
        return False
    done = subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True)
    return done.returncode == 0
