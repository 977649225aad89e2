"""What an administrator sets about a pool that is a cluster, and for how long a cluster is waited for."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from traitlets import Bool, Dict, Instance, List, TraitError, Unicode, validate
from traitlets.config import Configurable

from gpu_pool.cluster.dialects import AUTO, DialectOptions
from gpu_pool.cluster.nodes import NodeGroup, read_groups
from gpu_pool_client import BadRequest
from gpu_pool_client._requests import MAX_MIB
from gpu_pool_client._traits import Number, WholeNumber


@dataclass(frozen=True, slots=True)
class ClusterTimes:
    """What ``KubernetesSettings.times`` carries, all in seconds; no administrator needs to set them."""

    #: Everything has been listed in it when the service starts.
    listed_within: float = 60.0
    #: Within it the API server has answered for the kinds of objects that need not be there.
    settled_within: float = 5.0
    #: For this long a creation is tried again while the API server does not answer.
    retried_for: float = 20.0
    #: A pod that is not placed after it keeps others of its node back no longer.
    placed_within: float = 30.0
    #: To be placed is waited for so long, less than clients wait; whoever asked is told, and asks again.
    slot_within: float = 80.0
    #: Within it the cluster assigns a device to the pool's claim of it; after it the leases on it end.
    assigned_within: float = 60.0
    #: A device that the cluster lists no more is lost after it.
    unlisted_for: float = 30.0
    #: What a node's agent says holds for so long: several times what passes between two reports.
    use_holds: float = 30.0


class KubernetesSettings(Configurable):
    """Settings of ``gpu-pool serve --kubernetes``: ``c.KubernetesSettings`` in ``gpu_pool_config.py``."""

    times = Instance(ClusterTimes, (), help="What no configuration sets.")
    supervisor = Dict(help="The files of what runs kernels in their pods, by their paths; nor this one.")
    kubeconfig = Unicode(
        help="A kubeconfig. By default $KUBECONFIG, or the service account of the pod that this runs in."
    ).tag(config=True)
    lax_certificates = Bool(
        False,
        help="""Whether the API server's certificates may lack extensions that Python 3.13 and newer
        require, as those of some clusters do. Signature, host name and validity are verified all the
        same.""",
    ).tag(config=True)
    namespace = Unicode(
        help="The namespace of the notebook servers, and so of their kernels. By default the one this runs "
        "in."
    ).tag(config=True)
    more_namespaces = List(
        Unicode(),
        help="""Further namespaces of notebook servers and their kernels: course-{course}, as in
        c.GPUPoolKubeSpawner.course_namespace, if each course has a namespace. Anybody who may create
        pods in one of them can impersonate any user there.""",
    ).tag(config=True)
    pool = Unicode(
        "gpu-pool",
        help="The pool's name: it is on all of its pods. Two pools in one cluster need different names.",
    ).tag(config=True)
    dialect = Unicode(
        AUTO, help="How this cluster shares its GPUs; auto detects it. See gpu-pool doctor --cluster."
    ).tag(config=True)
    options = Dict(
        help="""What the nodes do not show: queue, runtime_class, memory_limiter, volcano_memory_factor,
        aliyun_memory_unit, policy, context_mib, reserved_mib, most_milli; and for the dialect shared,
        shared_nodes and shared_most."""
    ).tag(config=True)
    shared_empty_for = WholeNumber(
        60,
        min=0,
        max=86_400,
        help="""Seconds for which the pool keeps a GPU that it has claimed by the dialect shared, after the
        last slice of it has ended. Then the cluster has it back.""",
    ).tag(config=True)
    prepared_for = WholeNumber(
        1800,
        min=60,
        max=86_400,
        help="""Seconds for which a prepared pod of the dialect shared waits for a kernel. After that it ends,
        and none is made for its server before that has had a kernel.""",
    ).tag(config=True)
    prepared_per_node = WholeNumber(
        10,
        min=0,
        max=1_000,
        help="""How many prepared pods a node may have, of all courses together; 0 for none anywhere. How many
        a course may have, its file says.""",
    ).tag(config=True)
    tolerations = List(
        Unicode(),
        help="Keys of taints of GPU nodes that kernels tolerate, beside nvidia.com/gpu and what Zero to "
        "JupyterHub keeps for users.",
    ).tag(config=True)
    lost_after = WholeNumber(
        60,
        min=0,
        max=86_400,
        help="""Seconds after which a kernel whose machine does not answer is given up, and its lease ends.
        Kubernetes itself waits five minutes.""",
    ).tag(config=True)
    gpus_away_for = WholeNumber(
        180,
        min=0,
        max=86_400,
        help="""Seconds for which a node's GPUs are kept although it does not show them, for instance while
        its device plugin or DRA driver is replaced. Nothing is granted on them in that time, and
        requests for them wait; after that they are refused.""",
    ).tag(config=True)
    start_within = WholeNumber(
        600,
        min=1,
        max=86_400,
        help="""Seconds within which a kernel's pod must run, including the time for its node, its volumes,
        its GPU and its image, but not in Kueue's queue. Until then a start that fails is tried again,
        and the user is told why; after that the pod is ended with its lease.""",
    ).tag(config=True)
    kueue = Bool(
        False,
        help="""Whether kernels wait in Kueue's queues, one for each course as gpu-pool courses export
        writes them, instead of the pool's own queue.""",
    ).tag(config=True)
    node_groups = Dict(
        help="""Groups of nodes that an autoscaler starts, by names of your choice, each with example (a
        file with one of its nodes, from kubectl get node NAME -o json), select (the labels of its nodes) and
        most (how many nodes it may have). For usual_minutes and late_minutes, see the guide."""
    ).tag(config=True)
    placeholder_image = Unicode(
        "registry.k8s.io/pause:3.10",
        help="The image of the placeholder pods for these nodes, and of those that keep claimed GPUs: any "
        "that ends on SIGTERM, such as pause.",
    ).tag(config=True)
    node_agent = Unicode(
        help="""The service account of the node agents, as NAMESPACE/NAME: whose pods may say what kernels on
        their node use of its GPUs. Empty: nobody's."""
    ).tag(config=True)
    image = Unicode(
        help="The image of kernels whose course names none. By default that of the notebook server."
    ).tag(config=True)
    cpu = Number(
        0.0, min=0.0, max=10_000.0, help="CPU cores of a kernel whose course says none; 0 for no limit."
    ).tag(config=True)
    memory_mib = WholeNumber(
        4096,
        min=0,
        max=MAX_MIB,
        help="Memory (not of the GPU) in MiB of a kernel whose course says none; 0 for no limit.",
    ).tag(config=True)
    home = Unicode(
        "/home/jovyan", help="The path of the home directory in notebook servers and kernels."
    ).tag(config=True)
    uid = WholeNumber(
        1000,
        min=1,
        max=4_294_967_294,
        help="""The user of kernels whose notebook server's pod sets none, or root; never root.""",
    ).tag(config=True)
    gid = WholeNumber(
        100,
        min=1,
        max=4_294_967_294,
        help="""Their group, likewise; without a home directory also the group of their volumes.""",
    ).tag(config=True)
    require_curve = Bool(
        True,
        help="""Whether the connection to a kernel must be encrypted. Otherwise everything typed and shown
        crosses the cluster's network unencrypted.""",
    ).tag(config=True)

    @validate("more_namespaces")
    def _check_namespaces(self, proposal: Any) -> list[str]:
        for each in proposal.value:
            if not _NAMESPACE.fullmatch(each):
                raise TraitError(
                    f"more_namespaces has {each[:80]!r}. Accepted: the name of a namespace, in which "
                    "{course} or {user} may stand for a part, such as course-{course}."
                )
        return list(proposal.value)

    @validate("node_agent")
    def _check_account(self, proposal: Any) -> str:
        if proposal.value and not _ACCOUNT.fullmatch(proposal.value):
            raise TraitError(f"node_agent is {proposal.value[:80]!r}. Accepted: NAMESPACE/NAME.")
        return str(proposal.value)

    @property
    def groups(self) -> tuple[NodeGroup, ...]:
        """The groups of nodes that can grow. Raises ``BadRequest`` where they are not described."""
        if self.kueue and self.node_groups:
            raise BadRequest(
                "c.KubernetesSettings has both kueue and node_groups.",
                "Leave node_groups out: where Kueue manages the queue, its pods make the cluster grow.",
            )
        return read_groups(self.node_groups)

    @property
    def dialect_options(self) -> DialectOptions:
        """The options of the dialect. Raises ``BadRequest`` for one that there is not."""
        known = {each.name: each for each in fields(DialectOptions) if each.name not in _OURS}
        given: dict[str, Any] = dict(self.options)
        wrong = sorted(given.keys() - known.keys())
        if wrong:
            raise BadRequest(
                f"c.KubernetesSettings.options has {wrong[0]!a}.", f"Accepted: {', '.join(sorted(known))}."
            )
        return DialectOptions(**{**given, "container": CONTAINER, "pool": self.pool})

    def check_dialect(self) -> None:
        """Refuse, with ``BadRequest``, what does not go together with whole devices of the pool's own."""
        if self.dialect != SHARED:
            return
        for name, why in _NOT_SHARED.items():
            if getattr(self, name):
                raise BadRequest(
                    f"c.KubernetesSettings has both dialect = {SHARED!r} and {name}.",
                    f"Leave {name} out, or choose another dialect: {why}.",
                )


#: The dialect by which the pool claims whole devices and divides them.
SHARED = "shared"
#: What does not go together with it, and why.
_NOT_SHARED = {
    "kueue": "Kueue admits no pod that names a claim which is there already (KEP-2941)",
    "more_namespaces": "a claim, and so its GPU, belongs to one namespace, that of all notebook servers",
    "node_groups": "a GPU is claimed by its uuid, which a machine that is yet to be started does not have",
}
#: Options of dialects that no administrator sets.
_OURS = frozenset({"container", "pool", "namespace"})
#: The container of a kernel's pod.
CONTAINER = "kernel"
_ACCOUNT = re.compile(r"[a-z0-9-]{1,63}/[a-z0-9.-]{1,253}", re.ASCII)
#: The name of a namespace; something of it must be said, or all of them would be meant.
_NAMESPACE = re.compile(r"(?=[^{]|\{\w+\}[a-z0-9-])[a-z0-9-]*(?:\{(?:course|user)\}[a-z0-9-]*)?", re.ASCII)
