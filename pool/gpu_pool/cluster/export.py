"""Courses as objects of Kubernetes: quotas that the cluster itself keeps, and Kueue's queues. Pure.

A ResourceQuota counts what pods ask for, in the keys of the cluster's dialect,
so a course's quota is written as so many of its default slices. What adds up
over time (GPU hours) and what holds per user, no ResourceQuota can say: the
pool keeps it. Kueue's objects are those of ``kueue.x-k8s.io``, in the newest
version that the cluster serves (``v1beta1`` has the same fields): one ClusterQueue
for all, one LocalQueue for each course with its weight, ordered by what each course
has used (``AdmissionFairSharing``).

The images that courses name are written as values of Zero to JupyterHub, whose
chart fetches images onto nodes beforehand (``prePuller``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpu_pool.cluster.dialects import Dialect, Manifest, Translation, identity_labels
from gpu_pool.cluster.dialects.objects import quantity
from gpu_pool.cluster.kueue import VERSIONS
from gpu_pool.courses import CourseFile
from gpu_pool_client import BadRequest, GpuPoolError

#: What stands for the course's name in the name of a namespace.
COURSE: Final = "{course}"
#: The name of every object that is not a course's own.
NAME: Final = "gpu-pool"
_KUEUE: Final = "kueue.x-k8s.io"
_KUEUES_CRD: Final = "localqueues.kueue.x-k8s.io"
_PER_GPU: Final = (
    "Memory and cores are asked for per GPU: where pods ask for several GPUs, Kueue counts them only with "
    "multiplyBy in its resources.transformations."
)
_BEFORE_WEIGHTS: Final = (
    "Courses are ordered by their weights (admissionScope, fairSharing) by Kueue 0.12 and newer. An older "
    "one does not know these fields: apply the objects with --validate=warn, and it orders by time."
)
_COUNTED_CLAIMS: Final = ".deviceclass.resource.k8s.io/devices"
#: The beginning of keys that a GPU system counts itself; Kubernetes counts those with requests.
_VENDORS: Final = "limits."
_BITFUSION: Final = "bitfusion.io/gpu"
#: The taint of GPU nodes that kernels in pods tolerate in any case.
_GPU_TAINT: Final = "nvidia.com/gpu"
#: Characters of an image's name in the name of the container that fetches it; they all have 63 at most.
_MOST_OF_NAME: Final = 40


def has_kueue(dialect: Dialect) -> bool:
    """Whether the cluster has Kueue."""
    return _KUEUES_CRD in dialect.cluster.crds


def documents(
    courses: Mapping[str, CourseFile],
    dialect: Dialect,
    namespace: str,
    *,
    kueue: bool,
    kueue_version: str = VERSIONS[0],
) -> tuple[list[Manifest], list[str]]:
    """Return the objects to apply, and what could not be said in them, in words.

    ``namespace`` is where a course's servers and kernels are, such as
    ``course-{course}``. Raises ``BadRequest`` where Kueue cannot count what this
    dialect's pods ask for.
    """
    notes: list[str] = []
    quotas: dict[str, Manifest] = {}
    for name, course in sorted(courses.items()):
        quota = _quota(name, course, dialect, namespace, notes)
        if quota is not None:
            quotas[name] = quota
    if quotas and len(courses) > 1 and COURSE not in namespace:
        # A ResourceQuota knows no courses: the least of them would hold for all courses together.
        notes.append(
            f"{', '.join(quotas)}: no ResourceQuota. It would bind all courses in the namespace {namespace}; "
            f"give each course its own, with {COURSE} in --namespace."
        )
        quotas = {}
    made = list(quotas.values())
    if kueue:
        made += _queues(courses, dialect, namespace, f"{_KUEUE}/{kueue_version}")
        if kueue_version != VERSIONS[0]:
            notes.append(_BEFORE_WEIGHTS)
        if any(key.startswith(_VENDORS) for key in dialect.table.quota):
            notes.append(_PER_GPU)
    return made, notes


def _quota(
    name: str, course: CourseFile, dialect: Dialect, namespace: str, notes: list[str]
) -> Manifest | None:
    quota = course.quota.quota
    if quota.limits_hours:
        notes.append(f"{name}: GPU-hours are counted by the pool only.")
    if (quota.slices, quota.milli, quota.memory_mib) == (None, None, None):
        return None
    try:
        spec = {"hard": _hard(course, dialect)}
    except GpuPoolError as error:
        notes.append(f"{name}: no ResourceQuota. {error}")
        return None
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": _metadata(name, namespace), "spec": spec}


def _hard(course: CourseFile, dialect: Dialect) -> dict[str, str]:
    """Return a course's quota in the dialect's keys. Raises ``GpuPoolError`` where they cannot say it."""
    slice_ = dialect.translate(course.default_slice.request)
    number = _number(course, slice_)
    amounts = {key: _amount(key, slice_) for key in dialect.table.quota}
    # HAMi, which reads keys that begin with limits. itself, takes 0 for no limit.
    hard = {
        key: str(max(int(key.startswith(_VENDORS)), number * each))
        for key, each in amounts.items()
        if each is not None
    }
    if not hard:
        raise BadRequest(f"It cannot count slices of {dialect.table.title} of this size; the pool does.")
    return hard


def _number(course: CourseFile, slice_: Translation) -> int:
    """Return how many default slices the course's quota allows. Raises ``BadRequest`` if nobody can know."""
    quota, truth = course.quota.quota, slice_.statement
    bounds = [quota.slices] if quota.slices is not None else []
    if quota.milli is not None and truth.milli:
        bounds.append(quota.milli // (truth.milli * truth.count))
    if quota.memory_mib is not None and truth.memory_mib:
        bounds.append(quota.memory_mib // (truth.memory_mib * truth.count))
    if not bounds:
        raise BadRequest("The nodes do not show how large its default slice is.")
    return min(bounds)


def _amount(key: str, slice_: Translation) -> int | None:
    """Return how much of a quota's key one slice counts; None for a key that it does not use."""
    truth, limits = slice_.statement, slice_.pod.limits
    resource = key.removeprefix("requests.").removeprefix(_VENDORS)
    if key.endswith(_COUNTED_CLAIMS):
        return truth.count
    if resource == _BITFUSION:
        return truth.count * (truth.milli or 0) // 10
    each = quantity(limits[resource]) if resource in limits else None
    if not key.startswith(_VENDORS):
        return each
    # The vendor counts what is held of every GPU; a whole one is asked for without its memory.
    each = truth.memory_mib if each is None and _is_memory(resource) else each
    return None if each is None else truth.count * each


def _is_memory(resource: str) -> bool:
    return "mem" in resource.rpartition("/")[2] and "percentage" not in resource


def _metadata(course: str, namespace: str) -> dict[str, Any]:
    labels = {key: value for key, value in identity_labels("", course).items() if not key.endswith("/user")}
    return {"name": f"{NAME}-{course}", "namespace": namespace.replace(COURSE, course), "labels": labels}


def _queues(
    courses: Mapping[str, CourseFile], dialect: Dialect, namespace: str, version: str
) -> list[Manifest]:
    resources = sorted({key for each in _slices(courses, dialect) for key in each.pod.limits})
    if not resources:
        raise BadRequest(
            f"Kueue cannot count slices of {dialect.table.title}: its pods ask for no resource.",
            "Leave out --kueue.",
        )
    flavor = {"apiVersion": version, "kind": "ResourceFlavor", "metadata": {"name": NAME}, "spec": {}}
    names = sorted({namespace.replace(COURSE, name) for name in courses})
    here = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": names}
    covered = ["cpu", "memory", *resources]
    quotas = [{"name": key, "nominalQuota": str(_total(key, dialect))} for key in covered]
    spec = {
        "namespaceSelector": {"matchExpressions": [here]},
        "queueingStrategy": "BestEffortFIFO",
        "admissionScope": {"admissionMode": "UsageBasedAdmissionFairSharing"},
        "resourceGroups": [{"coveredResources": covered, "flavors": [{"name": NAME, "resources": quotas}]}],
    }
    queue = {"apiVersion": version, "kind": "ClusterQueue", "metadata": {"name": NAME}, "spec": spec}
    own = (_local_queue(name, each, namespace, version) for name, each in sorted(courses.items()))
    return [flavor, queue, *own]


def _slices(courses: Mapping[str, CourseFile], dialect: Dialect) -> Iterator[Translation]:
    """Yield every slice that the courses offer and this cluster can give."""
    for request in {request for course in courses.values() for request in course.requests}:
        try:
            yield dialect.translate(request)
        except GpuPoolError:  # noqa: PERF203 - a course may offer more than one cluster has
            continue


def _total(resource: str, dialect: Dialect) -> int:
    """Return how much the cluster has of a resource; what nodes do not show follows from their GPUs."""
    shown = sum(node.amount(resource) for node in dialect.cluster.nodes)
    gpus = [gpu.device for gpu in dialect.gpus()]
    if shown or not gpus or "/" not in resource:
        return shown
    if _is_memory(resource):
        return sum(device.memory_mib for device in gpus)
    return 100 * len(gpus)


def _local_queue(name: str, course: CourseFile, namespace: str, version: str) -> Manifest:
    spec = {"clusterQueue": NAME, "fairSharing": {"weight": f"{course.weight:g}"}}
    return {"apiVersion": version, "kind": "LocalQueue", "metadata": _metadata(name, namespace), "spec": spec}


def pulled(courses: Mapping[str, CourseFile]) -> dict[str, Any]:
    """Return values by which Zero to JupyterHub fetches the images of courses, onto nodes with GPUs too.

    Raises ``BadRequest`` where no course names one.
    """
    images = sorted({image for course in courses.values() for image in images_of(course)})
    if not images:
        raise BadRequest(
            "No course names an image.",
            "Only a course's kubernetes.image and kernel_image are listed here; singleuser.image is pulled "
            "in any case.",
        )
    return {
        "prePuller": {
            "extraTolerations": [{"key": _GPU_TAINT, "operator": "Exists"}],
            "extraImages": {_image_name(image): _image(image) for image in images},
        }
    }


def images_of(course: CourseFile) -> Iterator[str]:
    """Yield the images that a course names, for servers and for kernels in pods."""
    said = course.kubernetes
    if said.image:
        yield said.image
    if said.kernel_image and said.kernels == "pods":
        yield said.kernel_image


def _image_name(image: str) -> str:
    """Return a name that says which image it is, and that no other has."""
    words = re.split("[@:]", image.rpartition("/")[2])[0]
    plain = re.sub("[^a-z0-9]+", "-", words)[:_MOST_OF_NAME].strip("-")
    return f"{plain}-{hashlib.sha256(image.encode()).hexdigest()[:8]}"


def _image(image: str) -> dict[str, str]:
    """Return an image as the chart puts it together: the name, a colon, the tag or the digest's number."""
    name, colon, tag = image.rpartition(":")
    if not colon or "/" in tag:  # then it is a registry's port
        return {"name": image, "tag": "latest"}
    return {"name": name, "tag": tag}
