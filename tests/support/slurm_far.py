"""A Slurm cluster whose second node is a machine of its own, in namespaces, with a network to the first.

Both have the folder ``shared``, as of a home on NFS, and else nothing that is written: each has its own /tmp.
"""

from __future__ import annotations

import itertools
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.namespaces import Machine
from support.slurm import Slurm, far_node, missing, no_far_node, slurm_cluster

#: New connections to this node or from it, but for those of Slurm's own daemons.
_CLOSED_IN = "iif != lo tcp flags & (syn|ack) == syn tcp dport != {port} drop"
_CLOSED_OUT = "oif != lo tcp flags & (syn|ack) == syn tcp dport != {port} drop"


@dataclass(frozen=True)
class FarSite:
    """A cluster with such a node, ``n2``."""

    slurm: Slurm
    far: Machine
    shared: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def folder(self) -> Path:
        """Return a new folder that both machines have."""
        made = self.shared / f"test-{next(self._numbers)}"
        made.mkdir()
        return made

    def name_the_first(self) -> None:
        """Let ``n2`` know the first machine by its name, as a site's name service has it."""
        hosts = self.shared / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{self.far.outside} {socket.gethostname()}\n")
        self.far.run("mount", "--bind", hosts, "/etc/hosts")

    @contextmanager
    def closed(self, *, inwards: bool = False, outwards: bool = False) -> Iterator[None]:
        """Let nobody but Slurm's daemons connect to ``n2`` meanwhile, or from there to anywhere else."""
        rules = []
        if inwards:
            rules.append("add chain inet shut in { type filter hook input priority 0; }")
            rules.append(f"add rule inet shut in {_CLOSED_IN.format(port=self._port('node', 'n2', 'Port'))}")
        if outwards:
            rules.append("add chain inet shut out { type filter hook output priority 0; }")
            port = self._port("config", "", "SlurmctldPort")
            rules.append(f"add rule inet shut out {_CLOSED_OUT.format(port=port)}")
        told = "\n".join(["add table inet shut", *rules])
        subprocess.run(self.far.inside("nft", "-f", "-"), input=told, text=True, check=True)
        try:
            yield
        finally:
            self.far.run("nft", "delete", "table", "inet", "shut")

    def _port(self, kind: str, name: str, field: str) -> str:
        shown = self.slurm.run("scontrol", "show", kind, *filter(None, [name]))
        found = re.search(rf"\b{field}\s*=\s*(\d+)", shown)
        assert found is not None, shown
        return found[1]

    def temporary(self) -> list[str]:
        """Return what kernels have in the far node's own temporary folder."""
        return [each for each in self.far.run("ls", "/tmp").split() if re.match("gpu-pool-(?!tests-)", each)]


@contextmanager
def far_site(folder: Path, more: str = "") -> Iterator[FarSite]:
    """Run one in an empty ``folder``, with ``more`` in slurm.conf; skip the test where that cannot be."""
    if why := missing() or no_far_node():
        pytest.skip(why)
    shared, own = folder / "shared", folder / "cluster"
    shared.mkdir()
    own.mkdir()
    with far_node(shared) as far, slurm_cluster(own, more, far=far) as slurm:
        yield FarSite(slurm, far, shared)
