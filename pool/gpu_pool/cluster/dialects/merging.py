"""Putting a slice into a pod, after making sure that the pod does not lift its limit.

What a user may choose of a pod (an image, an environment, labels through
spawn options) reaches the cluster beside what a dialect adds. Nothing of it
may stand in the way: such a pod is refused, never quietly mended.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from gpu_pool.cluster.dialects.base import PodBans, PodParts
from gpu_pool.cluster.dialects.objects import Manifest, listing, mapping
from gpu_pool_client import NotAllowed


def merged(pod: Manifest, container: str, parts: PodParts, bans: PodBans) -> dict[str, Any]:
    """Return the Pod object with the slice in the container of that name.

    Raises NotAllowed if the pod brings along what would lift the slice's
    limit or spoil its request.
    """
    check(pod, bans)
    made: dict[str, Any] = copy.deepcopy(dict(pod))
    metadata, spec = made.setdefault("metadata", {}), made.setdefault("spec", {})
    _add(metadata, "labels", parts.labels)
    _add(metadata, "annotations", parts.annotations)
    _add(spec, "nodeSelector", parts.node_selector)
    _extend(spec, "tolerations", parts.tolerations)
    _extend(spec, "resourceClaims", parts.claims)
    for key, value in (("schedulerName", parts.scheduler_name), ("runtimeClassName", parts.runtime_class)):
        if value is not None:
            spec[key] = value
    _require(spec, parts.node_affinity)
    _fill(_container(spec, container, parts), parts)
    return made


def check(pod: Manifest, bans: PodBans) -> None:
    """Raise NotAllowed if the pod brings along what would lift the limit."""
    for fault in _faults(pod, bans):
        raise NotAllowed(
            f"This pod sets {fault}, which would lift the limits of its GPU slice.",
            "Remove that from the profile and from what users may choose.",
        )


def _faults(pod: Manifest, bans: PodBans) -> Iterator[str]:
    metadata, spec = mapping(pod.get("metadata")), mapping(pod.get("spec"))
    yield from (f"the label {key}" for key in sorted(bans.labels & mapping(metadata.get("labels")).keys()))
    annotations = mapping(metadata.get("annotations")).keys()
    yield from (f"the annotation {key}" for key in sorted(bans.annotations & annotations))
    yield from (
        f"the annotation {key}" for key in sorted(annotations) if key.startswith("nvidia.com/container.")
    )
    if spec.get("nodeName"):
        yield "nodeName"
    for container in _containers(spec):
        yield from _container_faults(container, bans)


def _container_faults(container: Manifest, bans: PodBans) -> Iterator[str]:
    names = {str(each.get("name")) for each in listing(container.get("env"))}
    yield from (f"the variable {name}" for name in sorted(bans.environment & names))
    if bans.environment and container.get("envFrom"):
        yield "variables that cannot be read here (envFrom)"
    if mapping(container.get("securityContext")).get("privileged"):
        yield "a privileged container"
    resources = mapping(container.get("resources"))
    for kind in ("limits", "requests"):
        for name in sorted(mapping(resources.get(kind))):
            if name.startswith(bans.resources):
                yield f"the resource {name}"


def _containers(spec: Manifest) -> Iterator[Manifest]:
    for key in ("initContainers", "containers", "ephemeralContainers"):
        yield from listing(spec.get(key))


def _container(spec: dict[str, Any], name: str, parts: PodParts) -> dict[str, Any]:
    found = [each for each in spec.get("containers", ()) if each.get("name") == name]
    if not found:
        raise NotAllowed(
            f"The pod has no container {name!a} for the GPU slice.", "Name the container that gets it."
        )
    others = [each for each in _containers(spec) if each is not found[0] and each.get("command")]
    if parts.needs_command and (others or not found[0].get("command")):
        raise NotAllowed(
            "Here a GPU is given only to a container whose command is written in the profile, "
            "and no other container may have one.",
            "Ask the administrator to set cmd in the profile.",
        )
    chosen: dict[str, Any] = found[0]
    return chosen


def _fill(container: dict[str, Any], parts: PodParts) -> None:
    resources = container.setdefault("resources", {})
    for kind in ("limits", "requests"):
        _add(resources, kind, parts.limits)
    claims = tuple({"name": claim["name"]} for claim in parts.claims)
    _extend(resources, "claims", claims)
    if parts.environment:
        kept = [each for each in container.get("env", ()) if each.get("name") not in parts.environment]
        added = [{"name": name, "value": value} for name, value in sorted(parts.environment.items())]
        container["env"] = kept + added


def _require(spec: dict[str, Any], requirements: tuple[Manifest, ...]) -> None:
    """Add the requirements to each term of the pod's node affinity, since terms are alternatives."""
    if not requirements:
        return
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchExpressions": [*term.get("matchExpressions", ()), *map(dict, requirements)]}
        for term in terms
    ]


def _add(owner: dict[str, Any], key: str, values: Mapping[str, str]) -> None:
    if values:
        owner[key] = {**mapping(owner.get(key)), **values}


def _extend(owner: dict[str, Any], key: str, values: tuple[Manifest, ...]) -> None:
    if values:
        owner[key] = [*owner.get(key, ()), *map(dict, values)]
