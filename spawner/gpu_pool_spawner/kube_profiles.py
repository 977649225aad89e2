"""What a server on Kubernetes gets: from settings, a course and a slice to a pod. Pure.

A course sets what its file says and nothing else. A slice is merged into the
pod's manifest, which is made anew for every start, so nothing of one choice is
left in another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from traitlets import Bool, Dict, TraitError, Unicode, validate

from gpu_pool.cluster.dialects import (
    AUTO,
    Dialect,
    DialectOptions,
    Manifest,
    PodBans,
    Translation,
    check,
    counted_as,
    dialect_names,
    identity_labels,
    installed_dialects,
    merged,
)
from gpu_pool.courses import CourseFile, Courses
from gpu_pool_client import BadRequest, GpuPoolError, SliceRequest
from gpu_pool_client._traits import Seconds
from gpu_pool_spawner.mixin import GPUPoolSpawnerMixin

#: A namespace's name has 63 characters at most, and a course's 50.
_NAMESPACE: Final = re.compile(r"(?:[a-z0-9][a-z0-9-]{0,12})?\{course\}", re.ASCII)


class KubeSettings(GPUPoolSpawnerMixin):
    """A spawner for courses that has the settings of a cluster, and asks none."""

    dialect = Unicode(
        AUTO,
        help=f"How the cluster shares GPUs: {AUTO} (detected), or the name of a dialect: aliyun, "
        "bitfusion, device-plugin, dra, gke, hami, kai, koordinator, volcano, or another package's.",
    ).tag(config=True)
    dialect_options = Dict(
        help="What the nodes do not show, such as {'queue': 'students'} for KAI and Volcano."
    ).tag(config=True)
    refuse_when_full = Bool(
        True,
        help="""Whether a server with a slice is refused at once if no GPU has enough free. Set it to False
        if the cluster adds nodes when pods wait.""",
    ).tag(config=True)
    place_within = Seconds(
        60,
        help="""Seconds within which a pod must have a node; otherwise its start is given up. 0 means as
        long as start_timeout, for clusters that add nodes when pods wait.""",
    ).tag(config=True)

    courses_as_profiles = Bool(
        False,
        help="""Whether the courses of a user are profiles in KubeSpawner's own form, after those of
        profile_list. That form is shown, too, where profile_list alone is set.""",
    ).tag(config=True)
    course_namespace = Unicode(
        help="""The namespace of a course's servers and home directories, such as course-{course}; by
        default all are in c.KubeSpawner.namespace. They must exist, and the Hub needs its rights in each."""
    ).tag(config=True)
    kueue = Bool(
        False,
        help="Whether servers wait in Kueue's queues of their courses, which gpu-pool courses export writes.",
    ).tag(config=True)

    @validate("dialect")
    def _check_dialect(self, proposal: Any) -> str:
        by_pool = {each.table.name for each in installed_dialects()[0] if each.table.by_pool}
        accepted = (AUTO, *(each for each in dialect_names() if each not in by_pool))
        if proposal.value not in accepted:
            why = "; by it only the pool's service divides GPUs, for kernels in pods of their own"
            raise TraitError(
                f"dialect is {proposal.value!r}{why if proposal.value in by_pool else ''}. "
                f"Accepted: {', '.join(accepted)}."
            )
        return str(proposal.value)

    @validate("course_namespace")
    def _check_namespace(self, proposal: Any) -> str:
        if proposal.value and not _NAMESPACE.fullmatch(proposal.value):
            raise TraitError(f"course_namespace is {proposal.value!r}. Accepted: course-{{course}}, say.")
        return str(proposal.value)

    @validate("dialect_options")
    def _check_options(self, proposal: Any) -> dict[str, Any]:
        try:
            DialectOptions(**proposal.value)
        except (TypeError, BadRequest) as error:
            raise TraitError(f"dialect_options: {error}") from None
        return dict(proposal.value)


#: The container that KubeSpawner makes.
CONTAINER: Final = "notebook"
#: What the container runtime of GPU nodes gives a container that asked for no GPU.
_NO_GPU: Final = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
#: What the model of a GPU contains that is joined to others by NVLink, as NVIDIA names them.
_NVLINK: Final = re.compile(r"SXM|NVL|NVLINK|HBM3|HGX|GB[23]00|B[23]00", re.ASCII)
#: The label by which Kueue is asked to admit a pod, and the names of queues as they are exported.
_QUEUE: Final = "kueue.x-k8s.io/queue-name"
QUEUES: Final = "gpu-pool-{course}"
_HOSTNAME: Final = "kubernetes.io/hostname"
#: The kinds of volumes in which nothing outlives a pod: others hold what was written before.
_PASSING: Final = frozenset(
    ("emptyDir", "ephemeral", "configMap", "secret", "downwardAPI", "projected", "image")
)


@dataclass(frozen=True, slots=True)
class Profile:
    """A server that can be started."""

    name: str
    course: CourseFile
    #: Its own slice, and how the cluster is asked for it; None where its kernels have theirs.
    request: SliceRequest | None = None
    translation: Translation | None = None


def profile_of(name: str, course: CourseFile, request: SliceRequest | None, dialect: Dialect) -> Profile:
    """Return the profile of a course and a slice. Raises as ``Dialect.translate``."""
    translation = None if request is None else dialect.translate(counted_as(request, dialect))
    return Profile(name, course, request, translation)


def configured_pod(spawner: Any) -> dict[str, Any]:
    """Return of every server's pod what ``c.KubeSpawner`` sets and could lift a limit."""
    container = {
        **spawner.extra_container_config,
        "name": CONTAINER,
        "env": [{"name": name} for name in spawner.environment],
        "securityContext": {"privileged": spawner.privileged},
        "resources": {"limits": spawner.extra_resource_limits, "requests": spawner.extra_resource_guarantees},
    }
    metadata = {"labels": spawner.extra_labels, "annotations": spawner.extra_annotations}
    first = {"initContainers": spawner.init_containers} if spawner.init_containers else {}
    return {"metadata": metadata, "spec": {**first, **spawner.extra_pod_config, "containers": [container]}}


def faults(courses: Courses, configured: Manifest, dialect: Dialect) -> Iterator[str]:
    """Yield what would fail at a start, as an administrator reads it in the log.

    That is what is ``configured`` for every pod and would lift a limit, and every
    slice of a server that this cluster cannot give.
    """
    try:
        check(configured, dialect.table.bans)
    except GpuPoolError as error:
        yield f"No server can start with this configuration: {error}"
    for name, course in courses.usable.items():
        for offer in course.slices if course.kubernetes.kernels == "server" else ():
            words = _refusal(offer.request, dialect)
            if words:
                yield f"The slice {offer.name} of the course {name} cannot be given on this cluster: {words}"


def _refusal(request: SliceRequest, dialect: Dialect) -> str:
    """Say why this cluster cannot give a slice; empty if it can."""
    try:
        dialect.translate(request)
    except GpuPoolError as error:
        return str(error)
    return ""


def settings_of(course: CourseFile, configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spawner's settings that a course file decides.

    What is guaranteed is what the administrator has configured, and never more
    than the limit; where nothing is configured, it is the limit.
    """
    said = course.kubernetes
    memory = None if said.memory is None else said.memory * 2**20
    found = {
        "image": said.image,
        "cpu_limit": said.cpu,
        "cpu_guarantee": _guarantee(said.cpu, configured.get("cpu_guarantee")),
        "mem_limit": memory,
        "mem_guarantee": _guarantee(memory, configured.get("mem_guarantee")),
        "storage_capacity": f"{said.home}Mi" if said.home else None,
        # No claim is made for a home that nobody gets.
        "storage_pvc_ensure": False if said.home == 0 else None,
        "start_timeout": None if said.start_within is None else max(1, round(said.start_within)),
    }
    return {name: value for name, value in found.items() if value is not None}


def _guarantee(limit: float | None, configured: float | None) -> float | None:
    return None if limit is None else min(limit, configured or limit)


def pod_of(
    pod: Manifest, profile: Profile | None, user: str, dialect: Dialect | None, *, kueue: bool = False
) -> dict[str, Any]:
    """Return a server's pod with its slice, or without any GPU; with ``kueue`` in its course's queue.

    Raises ``NotAllowed`` where something that an administrator configured would
    lift the slice's limit.
    """
    made = _ours(pod, user, profile.name if profile else None)
    if profile is not None and profile.course.kubernetes.home == 0:
        # Put an empty folder in the place of every volume that would outlive the pod. What is mounted stays
        # mounted, so that containers that prepare a folder, and working directories, find one.
        spec = made.get("spec", {})
        volumes = [
            each if _PASSING & each.keys() else {"name": each["name"], "emptyDir": {}}
            for each in spec.get("volumes") or ()
        ]
        made = {**made, "spec": {**spec, "volumes": volumes}} if volumes else made
    if kueue and profile is not None:
        made["metadata"]["labels"][_QUEUE] = QUEUES.format(course=profile.name)
    if profile is None or profile.translation is None or dialect is None:
        check(made, dialect.table.bans if dialect else PodBans())
        return _without_gpu(made)
    made = merged(made, CONTAINER, profile.translation.pod, dialect.table.bans)
    _prefer(made["spec"], profile.course.kubernetes.prefer, dialect)
    longest = profile.course.longest_lease
    if profile.request is not None:
        longest = profile.request.at_most(longest)
    if longest is not None:
        made["spec"]["activeDeadlineSeconds"] = max(1, round(longest))
    return made


def _ours(pod: Manifest, user: str, course: str | None) -> dict[str, Any]:
    """Say whose it is, and leave out service links. What KubeSpawner or its configuration says stays."""
    metadata = pod.get("metadata", {})
    labels = {**identity_labels(user, course), **metadata.get("labels", {})}
    # Of a Service "gpu-pool" Kubernetes would make variables that begin as ours do.
    spec = {"enableServiceLinks": False, **pod.get("spec", {})}
    return {**pod, "metadata": {**metadata, "labels": labels}, "spec": spec}


def _without_gpu(pod: dict[str, Any]) -> dict[str, Any]:
    """Keep GPUs out of every container: an image may ask the runtime for all of them."""
    spec = dict(pod["spec"])
    for kind in ("initContainers", "containers"):
        if spec.get(kind):
            spec[kind] = [_void(container) for container in spec[kind]]
    return {**pod, "spec": spec}


def _void(container: Manifest) -> dict[str, Any]:
    kept = [each for each in container.get("env") or () if each["name"] != _NO_GPU["name"]]
    return {**container, "env": [*kept, _NO_GPU]}


def _prefer(spec: dict[str, Any], wanted: str | None, dialect: Dialect) -> None:
    """Prefer the nodes whose GPUs are like that, if there are others."""
    nodes = {gpu.node for gpu in dialect.gpus()}
    liked = {gpu.node for gpu in dialect.gpus() if wanted and _is_like(gpu.device.model, wanted)}
    if not liked or liked == nodes:
        return
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    found = affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", [])
    found.append({"weight": 100, "preference": {"matchExpressions": [_on(sorted(liked), dialect)]}})


def _is_like(model: str, wanted: str) -> bool:
    model = model.upper().replace(" ", "-")
    if wanted.lower() == "nvlink":
        return bool(_NVLINK.search(model))
    return wanted.upper().replace(" ", "-") in model


def _on(names: Sequence[str], dialect: Dialect) -> Manifest:
    values = [dialect.cluster.node(name).label(_HOSTNAME) or name for name in names]
    return {"key": _HOSTNAME, "operator": "In", "values": values}
