"""Objects of the API, reduced to what is asked of them here: thousands are kept. Pure."""

from __future__ import annotations

from typing import Final

from gpu_pool.cluster.dialects import Manifest
from gpu_pool.cluster.dialects.objects import listing, mapping


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
)
_KEPT_OF_CONTAINERS: Final = (
    "name",
    "image",
    "resources",
    "volumeMounts",
    "volumeDevices",
    "securityContext",
)


def lean_pod(found: Manifest) -> Manifest:
    """Keep of a pod what is asked of it here."""
    spec = mapping(found.get("spec"))
    kept = {key: spec[key] for key in _KEPT if key in spec}
    kept["containers"] = [_lean_container(each) for each in spec.get("containers", ())]
    return {**lean(found), "spec": kept}


def _lean_container(container: Manifest) -> Manifest:
    kept = {key: container[key] for key in _KEPT_OF_CONTAINERS if key in container}
    # Variables, which are many and partly secret, are asked for by nothing but these expressions.
    if any("subPathExpr" in mount for mount in listing(container.get("volumeMounts"))):
        kept["env"] = container.get("env")
    return kept
