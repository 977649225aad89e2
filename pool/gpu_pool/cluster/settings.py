"""What an administrator sets about a pool that is a cluster."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from traitlets import Bool, Dict, Float, Integer, List, TraitError, Unicode, validate
from traitlets.config import Configurable

from gpu_pool.cluster.dialects import AUTO, DialectOptions
from gpu_pool.cluster.node_groups import NodeGroup, read_groups
from gpu_pool_client import BadRequest


class KubernetesSettings(Configurable):
    """Settings of ``gpu-pool serve --kubernetes``: ``c.KubernetesSettings`` in ``gpu_pool_config.py``."""

    kubeconfig = Unicode(
        help="A kubeconfig. By default $KUBECONFIG, or the service account of the pod that this runs in."
    ).tag(config=True)
    lax_certificates = Bool(
        False,
        help="""Whether the API server's certificates may lack extensions that Python 3.13 and newer want, as
        those of some clusters do. Who signed them, for whom and until when is verified all the same.""",
    ).tag(config=True)
    namespace = Unicode(
        help="Where the notebook servers are, and so their kernels. By default the one this runs in."
    ).tag(config=True)
    more_namespaces = List(
        Unicode(),
        help="""Where else notebook servers are, and so their kernels: course-{course}, as in
        c.GPUPoolKubeSpawner.course_namespace, if each course has a namespace. Whoever may make pods in one
        of them can pass for anybody there.""",
    ).tag(config=True)
    pool = Unicode(
        "gpu-pool", help="The pool's name: it is on all of its pods. Two pools in one cluster need two names."
    ).tag(config=True)
    dialect = Unicode(
        AUTO, help="How this cluster shares its GPUs; auto looks at it. See gpu-pool doctor --kubernetes."
    ).tag(config=True)
    options = Dict(
        help="""What the nodes do not show: queue, runtime_class, memory_limiter, volcano_memory_factor,
        aliyun_memory_unit, policy, context_mib, most_milli."""
    ).tag(config=True)
    tolerations = List(
        Unicode(), help="Keys of taints of GPU nodes that kernels tolerate, beside nvidia.com/gpu."
    ).tag(config=True)
    lost_after = Integer(
        60,
        min=0,
        help="""Seconds for which the machine of a kernel may be known not to answer until the kernel is given
        up, and its lease ends. Kubernetes itself waits five minutes.""",
    ).tag(config=True)
    gpus_away_for = Integer(
        180,
        min=0,
        help="""Seconds for which the GPUs of a node count as there though the node does not show them, as
        while its device plugin or DRA driver is replaced. Nothing is granted on them meanwhile, and whoever
        asks for them waits; after that they are refused.""",
    ).tag(config=True)
    start_within = Integer(
        600,
        min=1,
        max=86_400,
        help="""Seconds within which a kernel's pod must run: its node, its volumes, its GPU and its image
        included, time in Kueue's queue left out. What does not start is tried again until then, and told
        what for; after that it is ended, its lease with it.""",
    ).tag(config=True)
    kueue = Bool(
        False,
        help="""Whether kernels wait in Kueue's queues, one for each course as gpu-pool courses export writes
        them, and not in the pool's own line.""",
    ).tag(config=True)
    node_groups = Dict(
        help="""Groups of nodes that an autoscaler makes grow, by names of your choice, each with example (a
        file with one of its nodes, from kubectl get node NAME -o json), select (the labels of its nodes) and
        most (how many nodes it has at most). For usual_minutes and late_minutes, see the guide."""
    ).tag(config=True)
    placeholder_image = Unicode(
        "registry.k8s.io/pause:3.10",
        help="The image of the pods that ask for nodes: any that ends when it is told to, such as pause.",
    ).tag(config=True)
    image = Unicode(
        help="The image of kernels whose course names none. By default that of the notebook server."
    ).tag(config=True)
    cpu = Float(0.0, min=0.0, help="CPU cores of a kernel whose course says none; 0 for no limit.").tag(
        config=True
    )
    memory_mib = Integer(
        4096, min=0, help="Memory (not of the GPU) in MiB of a kernel whose course says none; 0 for no limit."
    ).tag(config=True)
    home = Unicode("/home/jovyan", help="The folder of the home in notebook servers and kernels.").tag(
        config=True
    )
    uid = Integer(
        1000,
        min=1,
        help="""The user as whom kernels run whose notebook server's pod does not say, or says root;
        never root.""",
    ).tag(config=True)
    gid = Integer(
        100,
        min=1,
        help="""Their group, likewise; of kernels without a home also that of what is in their volumes.""",
    ).tag(config=True)
    require_curve = Bool(
        True,
        help="""Whether the connection to a kernel must be encrypted. Without, what is typed and shown
        crosses the cluster's network in the clear.""",
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

    @property
    def groups(self) -> tuple[NodeGroup, ...]:
        """The groups of nodes that can grow. Raises ``BadRequest`` where they are not described."""
        if self.kueue and self.node_groups:
            raise BadRequest(
                "c.KubernetesSettings has kueue and node_groups.",
                "Leave node_groups out: where Kueue has the queue, its pods make the cluster grow.",
            )
        return read_groups(self.node_groups)

    @property
    def dialect_options(self) -> DialectOptions:
        """The options of the dialect. Raises ``BadRequest`` for one that there is not."""
        known = {each.name: each for each in fields(DialectOptions) if each.name != "container"}
        given: dict[str, Any] = dict(self.options)
        wrong = sorted(given.keys() - known.keys())
        if wrong:
            raise BadRequest(
                f"c.KubernetesSettings.options has {wrong[0]!a}.", f"Accepted: {', '.join(sorted(known))}."
            )
        return DialectOptions(**{**given, "container": CONTAINER})


#: The container of a kernel's pod.
CONTAINER = "kernel"
#: The name of a namespace; something of it must be said, or all of them would be meant.
_NAMESPACE = re.compile(r"(?=[^{]|\{\w+\}[a-z0-9-])[a-z0-9-]*(?:\{(?:course|user)\}[a-z0-9-]*)?", re.ASCII)
