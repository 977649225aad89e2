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
    """Namespaces of mounts, network and processes, by the process that keeps them."""

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
        enter = ("nsenter", "--target", str(self.keeper), "--mount", "--net", "--pid", "--")
        return [*enter, *map(str, command)]

    def run(self, *command: object) -> str:
        """Run a command there; fail with what it says if it fails."""
        done = subprocess.run(self.inside(*command), capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stderr}"
        return done.stdout


@contextmanager
def machine(mounts: Sequence[tuple[Path, str]]) -> Iterator[Machine]:
    """Make a machine in which each of these folders lies at another path, too."""
    flags = ("--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
    process = subprocess.Popen(["unshare", *flags, sys.executable, "-c", _INIT], start_new_session=True)
    name = secrets.token_hex(3)
    try:
        made = Machine(_child_of(process.pid), _free_network())
        _mount(made, mounts)
        _connect(made, name)
        yield made
    finally:
        process.kill()
        process.wait()
        subprocess.run(["ip", "link", "delete", f"gp-{name}"], capture_output=True)


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


def _connect(made: Machine, name: str) -> None:
    ours, theirs = f"gp-{name}", f"gpm-{name}"
    pair = ["ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", str(made.keeper)]
    subprocess.run(pair, check=True)
    subprocess.run(["ip", "address", "add", f"{made.outside}/24", "dev", ours], check=True)
    subprocess.run(["ip", "link", "set", ours, "up"], check=True)
    for network in (made.pods, made.services):
        subprocess.run(["ip", "route", "add", network, "via", made.address, "dev", ours], check=True)
    made.run("ip", "link", "set", "lo", "up")
    made.run("ip", "address", "add", f"{made.address}/24", "dev", theirs)
    made.run("ip", "link", "set", theirs, "up")
    made.run("ip", "route", "add", "default", "via", made.outside)
    made.run("sysctl", "-q", "-w", "net.ipv4.ip_forward=1")


def may_make_machines() -> bool:
    """Whether this process may make namespaces, mounts and interfaces."""
    if os.geteuid() != 0:
        return False
    done = subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True)
    return done.returncode == 0
