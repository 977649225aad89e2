"""A cluster from the command line: for ``list --nodes``, ``doctor --cluster``, ``courses export``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from gpu_pool.cli.checks import Check
from gpu_pool.cli.formatting import safe
from gpu_pool.cli.session import complete
from gpu_pool.cluster.dialects import Dialect, DialectChoice, NodeUse, choose, usage
from gpu_pool.cluster.dialects.device_plugin import DevicePlugin
from gpu_pool.cluster.dialects.dra import Dra
from gpu_pool.cluster.dialects.shared import API, Shared
from gpu_pool.cluster.kueue import version_of
from gpu_pool.cluster.nodes import closures, notes, tolerations_of
from gpu_pool.plugins import needs_extra
from gpu_pool_client import DeviceStatus, GpuPoolError, NotAllowed, format_memory, format_share, parse_request

if TYPE_CHECKING:
    from gpu_pool.cluster.snapshot import ClusterSnapshot

NODE_COLUMNS: Final = ("Node", "GPUs", "Share", "Memory", "Pods")
GPU_COLUMNS: Final = ("Node", "GPU", "Model", "Share", "Memory", "Pods")
POD_COLUMNS: Final = ("Node", "Pod", "GPUs", "Share", "Memory")
#: Characters of what nodes and devices say of themselves.
_MOST_WORDS: Final = 400
#: What the doctor asks for, to say what would become of it.
_EXAMPLE: Final = parse_request("2%")
#: From which Kubernetes on consumable capacity (KEP-5075) is on by default.
_CONSUMABLE: Final = 1, 36
#: From which on claims are served as this project reads them.
_CLAIMS: Final = 1, 34


def read_snapshot(kubeconfig: str = "") -> ClusterSnapshot:
    """Return what the cluster of a kubeconfig shows; without one that of $KUBECONFIG, or of this pod.

    Raises the pool's errors.
    """
    with needs_extra("kubernetes", "Kubernetes support"):
        from gpu_pool.cluster.snapshot import take_snapshot
    return complete(take_snapshot(kubeconfig))


def nodes_in_use(snapshot: ClusterSnapshot) -> tuple[NodeUse, ...]:
    """Return what is held on each node with GPUs. Raises ``NotAllowed`` where the cluster shows none."""
    choice = choose(snapshot.cluster)
    if choice.dialect is None:
        raise NotAllowed(str(choice), "See: gpu-pool doctor --cluster")
    return usage(choice.dialect, snapshot.pods)


def node_rows(nodes: Sequence[NodeUse]) -> list[list[str]]:
    """One row for each node, held of total."""
    return [
        [
            safe(node.name),
            str(len(node.gpus)),
            f"{format_share(node.milli[0])} of {format_share(node.milli[1])}",
            f"{format_memory(node.memory_mib[0])} of {format_memory(node.memory_mib[1])}",
            str(len(node.pods)),
        ]
        for node in nodes
    ]


def gpu_rows(nodes: Sequence[NodeUse]) -> list[list[str]]:
    """One row for each GPU, held of total; ``~`` where the cluster does not say which GPU a pod has."""
    return [_gpu_row(node, status) for node in nodes for status in node.gpus]


def _gpu_row(node: NodeUse, status: DeviceStatus) -> list[str]:
    about = "" if node.exact else "~"
    share = f"{about}{format_share(status.held_milli)} of {format_share(status.milli)}"
    memory = f"{about}{format_memory(status.held_memory_mib)} of {format_memory(status.device.memory_mib)}"
    model = safe(status.device.label) + (" (drained)" if status.drained else "")
    return [safe(node.name), str(status.device.index), model, share, memory, f"{about}{status.leases}"]


def pod_rows(nodes: Sequence[NodeUse]) -> list[list[str]]:
    """One row for each pod that holds something."""
    return [
        [
            safe(node.name),
            safe(f"{pod.namespace}/{pod.name}"),
            str(len(pod.holds)),
            format_share(pod.milli),
            format_memory(pod.memory_mib),
        ]
        for node in nodes
        for pod in node.pods
    ]


def plain_nodes(nodes: Sequence[NodeUse]) -> list[dict[str, Any]]:
    """Return the same as plain values."""
    return [
        {
            "node": node.name,
            "exact": node.exact,
            "held_milli": node.milli[0],
            "milli": node.milli[1],
            "held_memory_mib": node.memory_mib[0],
            "memory_mib": node.memory_mib[1],
            "gpus": [
                {
                    "index": each.device.index,
                    "uuid": each.device.uuid,
                    "model": each.device.label,
                    "held_milli": each.held_milli,
                    "held_memory_mib": each.held_memory_mib,
                    "memory_mib": each.device.memory_mib,
                    "drained": each.drained,
                }
                for each in node.gpus
            ],
            "pods": [
                {
                    "namespace": pod.namespace,
                    "name": pod.name,
                    "milli": pod.milli,
                    "memory_mib": pod.memory_mib,
                }
                for pod in node.pods
            ],
        }
        for node in nodes
    ]


def check_cluster(namespace: str = "") -> Iterator[Check]:
    """Look at a cluster: how it shares its GPUs, what it could not show, and what 2% would be there.

    With a namespace, also at what is installed there.
    """
    try:
        snapshot = read_snapshot()
    except GpuPoolError as error:
        yield Check("cluster", "broken", error.message, error.remedy)
        return
    yield from checks_of(snapshot)
    from gpu_pool.cli.cluster_checks import check_agents

    dialect = choose(snapshot.cluster).dialect
    nodes = {gpu.node for gpu in dialect.gpus()} if dialect is not None else set[str]()
    yield from complete(check_agents(nodes))
    if namespace:
        from gpu_pool.cli.installation import check_installation

        yield from complete(check_installation(namespace, nodes))


def checks_of(snapshot: ClusterSnapshot) -> Iterator[Check]:
    """Say the same of a cluster that was looked at."""
    yield Check("cluster", "ok", f"{snapshot.url} answers: {len(snapshot.cluster.nodes)} nodes")
    for problem in snapshot.problems:
        yield Check(
            "rights", "note", problem, "examples/kubernetes/service/rbac.yaml has what the service needs"
        )
    yield from _check_kueue(snapshot)
    choice = choose(snapshot.cluster)
    if choice.dialect is None:
        yield Check("dialect", "broken", str(choice), "install one of the systems in docs/kubernetes")
        return
    remedy = f"c.KubernetesSettings.dialect = {choice.seen[0]!r}" if choice.ambiguous else ""
    yield Check("dialect", "note" if choice.ambiguous else "ok", " ".join(choice.reasons), remedy)
    table = choice.dialect.table
    yield Check("seen", "note", f"{table.name}: {table.seen}; see docs/kubernetes")
    yield from _check_claims(snapshot, choice)
    yield from _check_shared(snapshot)
    yield from _check_gpus(nodes_in_use(snapshot))
    yield from _check_closed(choice.dialect)
    try:
        words = str(choice.dialect.translate(_EXAMPLE).statement)
    except GpuPoolError as error:
        yield Check(f"a slice of {_EXAMPLE}", "note", str(error))
    else:
        yield Check(f"a slice of {_EXAMPLE}", "ok", words.replace("\n", "; "))


def _check_kueue(snapshot: ClusterSnapshot) -> Iterator[Check]:
    """Say in which version Kueue's objects would be read, where the cluster has Kueue."""
    if not snapshot.kueue:
        return
    try:
        version = version_of(snapshot.kueue)
    except GpuPoolError as error:
        yield Check("kueue", "note", safe(error.message, _MOST_WORDS), error.remedy)
    else:
        words = f"its objects are served as {', '.join(snapshot.kueue)} and read as {version}"
        yield Check("kueue", "ok", safe(words, _MOST_WORDS))


def _check_claims(snapshot: ClusterSnapshot, choice: DialectChoice) -> Iterator[Check]:
    """Say whether slices can be claims of parts of GPUs, which is what this project recommends."""
    claims, chosen = Dra(snapshot.cluster), choice.dialect
    if claims.shares:
        words = "the scheduler can share GPUs by claims of any size (consumable capacity)"
        if isinstance(chosen, Dra):
            yield Check("claims", "ok", f"{words}: recommended, and used")
            return
        remedy = f"c.KubernetesSettings.dialect = {Dra.table.name!r}, if memory need not be limited"
        yield Check("claims", "note", words, remedy)
    elif claims.evidence():
        yield Check(
            "claims",
            "note",
            "NVIDIA's DRA driver is installed, but does not let claims share GPUs",
            "set consumableShares and featureGates.ConsumableShares in its chart: see docs/kubernetes/dra",
        )
    elif snapshot.version >= _CONSUMABLE and isinstance(chosen, DevicePlugin):
        yield Check(
            "claims",
            "note",
            f"Kubernetes {'.'.join(map(str, snapshot.version))} can share GPUs by claims of any size "
            "(consumable capacity), without any configuration in advance",
            "NVIDIA's DRA driver does that instead of the device plugin: see docs/kubernetes/dra",
        )


def _check_shared(snapshot: ClusterSnapshot) -> Iterator[Check]:
    """Say whether the pool could claim whole GPUs and divide them itself, where there are claims at all."""
    shared = Shared(snapshot.cluster)
    for node in shared.unfit:
        words = f"the node {node.name} is set aside for a pool, which cannot have its GPU: it {node.why_not}"
        yield Check("shared", "note", safe(words, _MOST_WORDS), "see docs/kubernetes/shared")
    if shared.replicated:
        words = f"{len(shared.replicated)} nodes are a pool's, with replicas of their only GPU"
        yield Check("shared", "ok", words)
    if not snapshot.cluster.device_classes:
        if (0, 0) < snapshot.version < _CLAIMS:
            words = f"Kubernetes {'.'.join(map(str, snapshot.version))} does not serve {API}"
            yield Check("shared", "note", f"the pool cannot claim whole GPUs: {words}")
        return
    missing = shared.missing()
    if missing:
        yield Check("shared", "note", f"the pool cannot claim whole GPUs. {missing}")
        return
    gpus = [gpu for gpu in shared.gpus() if not shared.is_replicated(gpu.device.uuid)]
    if not gpus:
        return
    taken = sum(gpu.drained for gpu in gpus)
    words = f"the pool could claim {len(gpus)} GPUs whole and divide them itself"
    remedy = f"c.KubernetesSettings.dialect = {Shared.table.name!r}: see docs/kubernetes/shared"
    yield Check("shared", "note", words + (f"; {taken} are in use or closed" if taken else ""), remedy)


def _check_gpus(nodes: Sequence[NodeUse]) -> Iterator[Check]:
    gpus = [each for node in nodes for each in node.gpus]
    drained = sum(each.drained for each in gpus)
    held = sum(node.milli[0] for node in nodes)
    total = sum(node.milli[1] for node in nodes)
    words = f"{len(gpus)} on {len(nodes)} nodes; {format_share(held)} of {format_share(total)} held"
    yield Check("gpus", "ok", words + (f"; {drained} drained" if drained else ""))
    unknown = sorted({node.name for node in nodes if any(not each.device.memory_mib for each in node.gpus)})
    if unknown:
        yield Check(
            "memory",
            "note",
            f"{len(unknown)} nodes do not show how much memory their GPUs have, and are left out: "
            f"{safe(', '.join(unknown))}",
            "install NVIDIA GPU feature discovery",
        )


def _check_closed(dialect: Dialect) -> Iterator[Check]:
    """Say which nodes take no kernels, as a service without settings sees it, and what is known of GPUs."""
    for name, closure in closures(dialect, tolerations_of(())).items():
        words = f"{name} {closure.why}: no kernels"
        yield Check("nodes", "note", safe(words, _MOST_WORDS), safe(closure.remedy, _MOST_WORDS))
    for note in notes(dialect).values():
        yield Check("devices", "note", safe(note, _MOST_WORDS))
