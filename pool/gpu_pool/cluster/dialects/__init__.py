"""How each GPU-sharing system of Kubernetes is asked for a slice. Pure: values in, values out; no I/O here.

One slice request and what the cluster shows give what a pod needs, and the
truth about it: what is enforced, what is only counted, what was rounded; or
a refusal with the reason. The same dialects read how much of the cluster's
GPUs is held.

::

    cluster = Cluster.read(nodes, crds=…, device_classes=…)
    choice = choose(cluster, options)            which dialect, and why
    translation = choice.dialect.translate(request)
    pod = merged(pod, "notebook", translation.pod, choice.dialect.table.bans)
    usage(choice.dialect, map(Pod.read, pods))   allocated of total, per node and GPU

A new dialect is one file with one class and one table, which a package (this one or any
other) names among its entry points, in the group ``gpu_pool.dialects``.
"""

from gpu_pool.cluster.dialects.base import (
    DEFAULTS,
    NOT_SEEN,
    Dialect,
    DialectOptions,
    DialectTable,
    Gpu,
    PodBans,
    PodHolding,
    PodParts,
    Rounding,
    SliceStatement,
    Translation,
    check,
    merged,
)
from gpu_pool.cluster.dialects.capacity import NodeUse, PodUse, counted_as, usage
from gpu_pool.cluster.dialects.choosing import AUTO, DialectChoice, choose, dialect_names, installed_dialects
from gpu_pool.cluster.dialects.objects import (
    Cluster,
    Manifest,
    Node,
    Pod,
    content_name,
    identity_labels,
    label_value,
)

__all__ = [
    "AUTO",
    "DEFAULTS",
    "NOT_SEEN",
    "Cluster",
    "Dialect",
    "DialectChoice",
    "DialectOptions",
    "DialectTable",
    "Gpu",
    "Manifest",
    "Node",
    "NodeUse",
    "Pod",
    "PodBans",
    "PodHolding",
    "PodParts",
    "PodUse",
    "Rounding",
    "SliceStatement",
    "Translation",
    "check",
    "choose",
    "content_name",
    "counted_as",
    "dialect_names",
    "identity_labels",
    "installed_dialects",
    "label_value",
    "merged",
    "usage",
]
