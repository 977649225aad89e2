"""What a site, or a user, can set about the jobs of kernels."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from traitlets import Bunch, Dict, TraitError, Unicode, validate
from traitlets.config import Configurable

from gpu_pool_client._traits import WholeNumber

if TYPE_CHECKING:
    from gpu_pool.courses.model import CourseJobs

_LAST_PORT: Final = 65_535
#: Nodes for which it is found out from which address of this machine they are reached: mostly it is the same.
_MOST_TRIED: Final = 4


class SlurmSettings(Configurable):
    """Settings of a pool ``slurm:``, under ``c.SlurmSettings`` in ``gpu_pool_config.py``."""

    partition = Unicode("", help="The partition of the jobs; empty for Slurm's default one.").tag(config=True)
    account = Unicode("", help="The account that they are charged to; empty for the user's default.").tag(
        config=True
    )
    qos = Unicode("", help="Their quality of service; empty for the default.").tag(config=True)
    constraint = Unicode("", help="The features that their nodes must have, as for sbatch --constraint.").tag(
        config=True
    )
    reservation = Unicode("", help="The reservation that they are part of; empty for none.").tag(config=True)
    time = Unicode(
        "", help="Their time limit, as for sbatch --time: 4:00:00; empty for that of the partition."
    ).tag(config=True)
    mem = Unicode(
        "", help="Their memory (not of the GPU), as for sbatch --mem: 8G; empty for the default."
    ).tag(config=True)
    cpus_per_task = WholeNumber(0, min=0, max=10_000, help="Their processors; 0 for the default.").tag(
        config=True
    )
    prologue = Unicode(
        "", help="Lines of shell that the jobs run first, such as: module load cuda. Empty for none."
    ).tag(config=True)
    server_address = Unicode(
        "",
        help="Where nodes reach this server, if it cannot connect to them; empty for its name.",
    ).tag(config=True)
    server_ports = Unicode(
        "", help="The ports at which it listens for them, as 20000-20099; empty for any that is free."
    ).tag(config=True)
    gpu_memory = Dict(
        help="""The memory of GPUs in GiB by their type in Slurm, which does not know it: {"v100": 32}. A type
        whose name says it, such as a100_80gb, needs none. Others can be had as a whole only.""",
    ).tag(config=True)

    @validate("server_ports")
    def _check_ports(self, proposal: Bunch) -> str:
        text = str(proposal["value"]).strip()
        first, _, last = text.partition("-")
        if text and not (
            first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= _LAST_PORT
        ):
            raise TraitError(
                f"c.SlurmSettings.server_ports is {text!r}; accepted is a first and a last port: 20000-20099."
            )
        return text

    def ports(self) -> Sequence[int]:
        """Return at which ports to listen for nodes, the first that is free; 0 for any."""
        first, _, last = self.server_ports.partition("-")
        return range(int(first), int(last) + 1) if first else (0,)

    def addresses(self, nodes: Iterable[str] = ()) -> Sequence[str]:
        """Return at which addresses nodes, which are at these, try to reach this server. May block.

        Names that they may not know, or for themselves, are followed by the addresses that packets to some of
        them come from.
        """
        if self.server_address:
            return [self.server_address]
        name = socket.gethostname()
        own = filter(None, map(_own_address, itertools.islice(dict.fromkeys(nodes), _MOST_TRIED)))
        return list(dict.fromkeys([socket.getfqdn(name), name, *own]))

    def options(self, course: CourseJobs | None) -> Iterator[str]:
        """Yield the options of sbatch: what the course says, and what it leaves out as it is set."""
        names = ("partition", "account", "qos", "constraint", "reservation", "time", "mem", "cpus-per-task")
        said = {} if course is None else course.options
        for name in names:
            if value := said.get(name) or getattr(self, name.replace("-", "_")):
                yield f"--{name}={value}"


def _own_address(node: str) -> str:
    """Return from which address this machine would connect to a node; empty for none of use there."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
            unsent.connect((node, 9))  # nothing is sent: it is how the kernel is asked for the way
            own = str(unsent.getsockname()[0])
    except OSError:  # nobody knows its name, or a way to it
        return ""
    return "" if own.startswith("127.") else own
