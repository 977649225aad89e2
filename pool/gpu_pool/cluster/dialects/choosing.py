"""Which dialect a cluster speaks: read from its nodes, resource definitions and classes, with the reason.

Several can be there at once. Those that limit memory come first, then claims
if GPUs can be shared by them, since the scheduler itself allocates those and nobody
has to choose sizes beforehand; then those that own the scheduler or the node pool, then
other claims, then plain resources. Else the order is that of :data:`DIALECTS`, so the same
cluster always gives the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpu_pool.cluster.dialects.aliyun import Aliyun
from gpu_pool.cluster.dialects.base import DEFAULTS, Dialect, DialectOptions
from gpu_pool.cluster.dialects.bitfusion import Bitfusion
from gpu_pool.cluster.dialects.device_plugin import DevicePlugin
from gpu_pool.cluster.dialects.dra import Dra
from gpu_pool.cluster.dialects.gke import Gke
from gpu_pool.cluster.dialects.hami import Hami
from gpu_pool.cluster.dialects.kai import Kai
from gpu_pool.cluster.dialects.koordinator import Koordinator
from gpu_pool.cluster.dialects.objects import Cluster
from gpu_pool.cluster.dialects.volcano import Volcano
from gpu_pool_client import BadRequest

#: Every dialect, the preferred one first. A new one is a file with its class, and its name here.
DIALECTS: Final[tuple[type[Dialect], ...]] = (
    Hami,
    Volcano,
    Koordinator,
    Kai,
    Gke,
    Dra,
    Aliyun,
    Bitfusion,
    DevicePlugin,
)
#: What a setting says to have the cluster looked at.
AUTO: Final = "auto"
NAMES: Final = tuple(dialect.table.name for dialect in DIALECTS)


@dataclass(frozen=True, slots=True)
class DialectChoice:
    """The dialect of a cluster, and why."""

    #: None if the cluster shows no way to get a GPU.
    dialect: Dialect | None
    #: Names of all that were seen, the preferred one first.
    seen: tuple[str, ...]
    #: Why this one, in words, one line each; what is ambiguous is said here.
    reasons: tuple[str, ...]

    @property
    def ambiguous(self) -> bool:
        """Whether the cluster shows several."""
        return len(self.seen) > 1

    def __str__(self) -> str:
        return "\n".join(self.reasons)


def choose(cluster: Cluster, options: DialectOptions = DEFAULTS, name: str = AUTO) -> DialectChoice:
    """Return the dialect of that name, or with ``auto`` the preferred one of those that the cluster shows.

    Raises BadRequest for a name that is not a dialect's.
    """
    if name != AUTO:
        return _named(cluster, options, name)
    seen = [(each, words) for kind in DIALECTS if (words := (each := kind(cluster, options)).sighted())]
    seen.sort(key=lambda pair: _place(pair[0]))
    seen = [pair for pair in seen if not seen or pair[0].table.name not in seen[0][0].builds_on]
    if not seen:
        nodes = len(cluster.nodes)
        return DialectChoice(None, (), (f"None of {nodes} nodes offers a GPU in a way that is known here.",))
    chosen, words = seen[0]
    reasons = [f"{chosen.table.name}: {words}."]
    reasons += [f"Also seen, and not used: {each.table.name}, since {words}." for each, words in seen[1:]]
    if len(seen) > 1:
        names = " or ".join(each.table.name for each, _ in seen)
        reasons.append(f"Set the dialect to {names} to decide it yourself.")
    return DialectChoice(chosen, tuple(each.table.name for each, _ in seen), tuple(reasons))


def _place(dialect: Dialect) -> float:
    """Return where a dialect comes in the order of preference."""
    if isinstance(dialect, Dra) and dialect.shares:
        return DIALECTS.index(Kai) - 0.5
    return DIALECTS.index(type(dialect))


def _named(cluster: Cluster, options: DialectOptions, name: str) -> DialectChoice:
    if name not in NAMES:
        raise BadRequest(f"{name[:40]!a} is not a dialect.", f"Accepted: {AUTO}, {', '.join(NAMES)}.")
    chosen = DIALECTS[NAMES.index(name)](cluster, options)
    words = chosen.sighted() or "though nothing of it is seen in this cluster"
    return DialectChoice(chosen, (name,), (f"{name}: it is set; {words}.",))
