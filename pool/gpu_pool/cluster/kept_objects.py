"""What is kept of the API's objects: each reduced to what is asked of it, since there are thousands. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from gpu_pool.cluster.dialects import Manifest, Pod
from gpu_pool.cluster.dialects.objects import listing, mapping
from gpu_pool.cluster.informer import Key


def is_ending(pod: Manifest) -> bool:
    """Whether an object is being deleted."""
    return bool(mapping(pod.get("metadata")).get("deletionTimestamp"))


def lean(found: Manifest) -> Manifest:
    """Leave out who wrote which field, which is most of many objects."""
    metadata = {key: value for key, value in found["metadata"].items() if key != "managedFields"}
    return {**found, "metadata": metadata}


def lean_node(found: Manifest) -> Manifest:
    """Keep of a node what a dialect reads, and leave out what changes every minute and says nothing."""
    metadata, status = found["metadata"], mapping(found.get("status"))
    annotations = {
        key: value for key, value in mapping(metadata.get("annotations")).items() if "handshake" not in key
    }
    kept = {key: metadata.get(key) for key in ("name", "uid", "labels", "resourceVersion")}
    conditions = [
        {key: each.get(key) for key in ("type", "status")} for each in status.get("conditions") or ()
    ]
    return {
        "metadata": {**kept, "annotations": annotations},
        "spec": {key: value for key, value in mapping(found.get("spec")).items() if key != "podCIDRs"},
        "status": {"allocatable": mapping(status.get("allocatable")), "conditions": conditions},
    }


def is_same(one: Manifest, other: Manifest) -> bool:
    """Whether nothing but the version of an object differs."""
    return {**one, "metadata": {**one["metadata"], "resourceVersion": ""}} == {
        **other,
        "metadata": {**other["metadata"], "resourceVersion": ""},
    }


_KEPT: Final = (
    "nodeName",
    "volumes",
    "imagePullSecrets",
    "resourceClaims",
    "schedulingGates",
    "securityContext",
    "hostUsers",
    "serviceAccountName",
    "resources",
    "overhead",
)
_KEPT_OF_CONTAINERS: Final = (
    "name",
    "image",
    "resources",
    "restartPolicy",
    "volumeMounts",
    "volumeDevices",
    "securityContext",
)


def lean_pod(found: Manifest) -> Manifest:
    """Keep of a pod what is asked of it here."""
    spec = mapping(found.get("spec"))
    kept = {key: spec[key] for key in _KEPT if key in spec}
    for kind in ("initContainers", "containers"):
        kept[kind] = [_lean_container(each) for each in listing(spec.get(kind))]
    return {**lean(found), "spec": kept}


def _lean_container(container: Manifest) -> Manifest:
    kept = {key: container[key] for key in _KEPT_OF_CONTAINERS if key in container}
    # Variables, which are many and partly secret, are asked for by nothing but these expressions.
    if any("subPathExpr" in mount for mount in listing(container.get("volumeMounts"))):
        kept["env"] = container.get("env")
    return kept


class LeasePods:
    """Which pods each lease has. Used in one event loop."""

    def __init__(self) -> None:
        self._pods: dict[str, dict[Key, Manifest]] = {}
        #: The lease of each pod, and the pod, by its uid.
        self._by_uid: dict[str, tuple[str, Manifest]] = {}

    def of(self, lease_id: str) -> list[Manifest]:
        """Return the pods of a lease."""
        return list(self._pods.get(lease_id, {}).values())

    def leases(self) -> set[str]:
        """Return the ids of all leases that have pods."""
        return set(self._pods)

    def lease_of(self, uid: str) -> str | None:
        """Return the id of the lease that has a pod, by the pod's uid."""
        found = self._by_uid.get(uid)
        return found and found[0]

    def pod(self, uid: str) -> Manifest | None:
        """Return a pod of a lease by its uid."""
        found = self._by_uid.get(uid)
        return found and found[1]

    def ending(self, live: Collection[str]) -> Iterator[Pod]:
        """Yield the pods that are about to end, and of none of the ``live`` leases."""
        for lease_id, pods in self._pods.items():
            if lease_id not in live:
                yield from filter(None, (Pod.read(pod) for pod in pods.values() if is_ending(pod)))

    def change(self, lease_id: str, key: Key, now: Manifest | None) -> None:
        """Take note of a pod as it is now; None if it has gone."""
        pods = self._pods.setdefault(lease_id, {})
        before = pods.pop(key, None)
        if before is not None:
            self._by_uid.pop(str(before["metadata"].get("uid")), None)
        if now is not None:
            pods[key] = now
            self._by_uid[str(now["metadata"].get("uid"))] = lease_id, now
        elif not pods:
            del self._pods[lease_id]
