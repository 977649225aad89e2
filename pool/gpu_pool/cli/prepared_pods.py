"""What there is of prepared pods in a namespace, as the cluster shows it: for ``doctor --cluster``. Pure.

Why the service makes no more of them it knows best itself: ``gpu-pool health`` in its container says it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpu_pool.cluster.device_claims import HOLDER_LABEL
from gpu_pool.cluster.dialects import label_value
from gpu_pool.cluster.dialects.objects import PREFIX, listing, mapping
from gpu_pool.cluster.manifests import COMPONENT, LEASE_LABEL
from gpu_pool.cluster.prepared_pods import PreparedPod, is_prepared
from gpu_pool_client import PreparedStatus

#: By which KubeSpawner says of a pod whose notebook server it is.
_USER: Final = "hub.jupyter.org/username"
_NOT_SHARED: Final = (
    "Here a GPU comes with its pod, so none is made: they need c.KubernetesSettings.dialect = 'shared'."
)
_NO_SERVER: Final = "No notebook server of the course runs."
_NO_GPU: Final = (
    "The pool has no GPU now, since no slice is held: the first kernel starts in an ordinary pod, and after "
    "it pods are prepared."
)
_ASK: Final = "The service knows why it makes none: kubectl -n {} exec deploy/{} -- gpu-pool health"


def prepared_of(
    most: Mapping[str, int],
    pods: Sequence[Mapping[str, Any]],
    namespace: str,
    service: str,
    *,
    is_shared: bool,
) -> list[PreparedStatus]:
    """Return what there is of each course that may have ``most``, of all pods of the namespace."""
    return [_status(name, most[name], pods, (namespace, service), is_shared) for name in sorted(most)]


def _status(
    name: str, most: int, pods: Sequence[Mapping[str, Any]], service: tuple[str, str], is_shared: bool
) -> PreparedStatus:
    servers, kernels, ready, starting = set[str](), set[str](), Counter[str](), list[Mapping[str, Any]]()
    has_gpu = False
    for pod in pods:
        metadata = mapping(pod.get("metadata"))
        labels = mapping(metadata.get("labels"))
        has_gpu = has_gpu or HOLDER_LABEL in labels
        if labels.get(f"{PREFIX}/course") != label_value(name):
            continue
        read = PreparedPod.read(pod)
        if labels.get("app.kubernetes.io/component") != COMPONENT:
            if _USER in mapping(metadata.get("annotations")) and not read.is_over:
                servers.add(read.uid)
        elif is_prepared(pod) and LEASE_LABEL not in labels:
            kernels.add(read.server)
            if read.is_running:
                ready[read.node] += 1
            elif not read.is_over:
                starting.append(pod)
        else:
            kernels.update(str(each.get("uid")) for each in listing(metadata.get("ownerReferences")))
    why = ""
    if not is_shared:
        why = _NOT_SHARED
    elif not servers:
        why = _NO_SERVER
    elif servers - kernels:
        why = _ASK.format(*service) if has_gpu else _NO_GPU
    return PreparedStatus(name, most, dict(sorted(ready.items())), len(starting), why)
