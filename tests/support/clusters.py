"""Clusters as their API describes them, one for each way to share a GPU.

Compared with nodes of NVIDIA's device plugin 0.20 with GPU feature discovery (time-slicing), and with
resource slices of NVIDIA's DRA driver that shares memory, both on Kubernetes 1.36.2 in November 2026
with stand-ins for NVIDIA's libraries. Not compared: HAMi, KAI, Volcano, Koordinator, GKE, Aliyun,
Bitfusion and the plugin's MPS and MIG, which are written after their sources and documents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_pool.cluster.dialects import Cluster, DialectOptions, Pod

V100 = "Tesla-V100-SXM2-32GB"
A100 = "NVIDIA-A100-SXM4-40GB"


def node(
    name: str = "n1",
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    allocatable: Mapping[str, str | int] | None = None,
    conditions: Sequence[str] = (),
    **spec: Any,
) -> dict[str, Any]:
    """Return a Node object; what it shows of its GPUs' memory is what programs can have of it."""
    own = {"kubernetes.io/hostname": name, "jupyter-gpu-pool/reserved-mib": "0"}
    return {
        "metadata": {
            "name": name,
            "labels": {**own, **(labels or {})},
            "annotations": dict(annotations or {}),
        },
        "spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}], **spec},
        "status": {
            "allocatable": {"cpu": "8", **{key: str(value) for key, value in (allocatable or {}).items()}},
            "conditions": [{"type": kind, "status": "True"} for kind in ("Ready", *conditions)],
        },
    }


def discovered(
    product: str = V100, memory: int = 32768, *, replicas: int = 1, strategy: str = "none", **more: str
) -> dict[str, str]:
    """Return the labels of GPU feature discovery, ``more`` being further ones with ``_`` for ``.``."""
    return {
        "nvidia.com/gpu.product": product + ("-SHARED" if replicas > 1 else ""),
        "nvidia.com/gpu.memory": str(memory),
        "nvidia.com/gpu.replicas": str(replicas),
        "nvidia.com/gpu.sharing-strategy": strategy,
        "nvidia.com/cuda.driver-version.full": "550.54.15",
        **{f"nvidia.com/gpu.{key.replace('_', '.')}": value for key, value in more.items()},
    }


def plain(name: str = "n1", gpus: int = 1, *, replicas: int = 1, **labels: Any) -> dict[str, Any]:
    """Return a node of NVIDIA's device plugin."""
    return node(
        name,
        labels=discovered(replicas=replicas, **labels),
        allocatable={"nvidia.com/gpu": gpus * replicas},
    )


def hami(
    name: str = "n1", gpus: int = 1, memory: int = 32768, *, count: int = 50, model: str = V100, **gpu: Any
) -> dict[str, Any]:
    """Return a node of HAMi's device plugin."""
    register = [
        {
            "id": f"GPU-{name}-{index}",
            "index": index,
            "count": count,
            "devmem": memory,
            "devcore": 100,
            "type": f"NVIDIA-{model}",
            "mode": "hami-core",
            "health": True,
            **gpu,
        }
        for index in range(gpus)
    ]
    return node(
        name,
        labels={"gpu": "on"},
        annotations={"hami.io/node-nvidia-register": json.dumps(register)},
        allocatable={"nvidia.com/gpu": gpus * count},
    )


def listed(name: str, memory: int = 32768, *, kind: str = "gpu", **more: Any) -> dict[str, Any]:
    """Return one device of a ResourceSlice; ``shares`` and ``default`` make it one that claims share."""
    capacity: dict[str, Any] = {"memory": {"value": f"{memory}Mi"}}
    if "default" in more:
        capacity["memory"]["requestPolicy"] = {"default": more["default"]}
    if "shares" in more:
        capacity["shares"] = {"value": str(more["shares"])}
    attributes = {
        "type": {"string": kind},
        "uuid": {"string": f"GPU-{name}"},
        "productName": {"string": more.get("model", V100.replace("-", " "))},
        "driverVersion": {"version": "550.54.15"},
    }
    if "profile" in more:
        attributes["profile"] = {"string": more["profile"]}
    if "parent" in more:
        attributes["parentUUID"] = {"string": more["parent"]}
    shared = {"allowMultipleAllocations": True} if "default" in more else {}
    rest = {key: more[key] for key in ("taints", "consumesCounters") if key in more}
    return {"name": name, "attributes": attributes, "capacity": capacity, **shared, **rest}


def dividable(
    card: str = "gpu-0", *, model: str = "NVIDIA A100-SXM4-40GB", **more: Any
) -> list[dict[str, Any]]:
    """Return a card with 40 GiB as NVIDIA's driver lists it with DynamicMIG: whole, and at every place.

    ``default`` is one that claims can share, too; ``whole=False`` one that is in MIG mode for good.
    """

    def part(name: str, memory: int, first: int, number: int, **about: Any) -> dict[str, Any]:
        slices = {f"memory-slice-{n}": {"value": "1"} for n in range(first, first + number)}
        used = [
            {"counterSet": f"{card}-counter-set", "counters": {"memory": {"value": f"{memory}Mi"}, **slices}}
        ]
        return listed(name, memory, model=model, consumesCounters=used, **about)

    mig = {"kind": "mig", "parent": f"GPU-{card}"}
    found = [part(f"{card}-1g5gb-{n}", 4864, n, 1, profile="1g.5gb", **mig) for n in range(7)]
    found += [part(f"{card}-2g10gb-{n}", 9856, n, 2, profile="2g.10gb", **mig) for n in (0, 2, 4)]
    found += [part(f"{card}-3g20gb-{n}", 19968, n, 4, profile="3g.20gb", **mig) for n in (0, 4)]
    found += [part(f"{card}-4g20gb-0", 19968, 0, 4, profile="4g.20gb", **mig)]
    for each in found:
        del each["attributes"]["uuid"]
    whole = [part(card, 40960, 0, 8, **{key: more[key] for key in ("default",) if key in more})]
    return (whole if more.get("whole", True) else []) + found


def counters(card: str = "gpu-0") -> dict[str, Any]:
    """Return the counters of such a card."""
    values = {"memory": {"value": "40960Mi"}, **{f"memory-slice-{n}": {"value": "1"} for n in range(8)}}
    return {"name": f"{card}-counter-set", "counters": values}


def resource_slice(
    *devices: Mapping[str, Any],
    name: str = "n1",
    generation: int = 1,
    number: int = 1,
    of: int = 1,
    **spec: Any,
) -> dict[str, Any]:
    """Return a ResourceSlice of NVIDIA's driver, the ``number``-th of so many of its pool."""
    pool = {"name": name, "generation": generation, "resourceSliceCount": of}
    about = {"driver": "gpu.nvidia.com", "nodeName": name, "pool": pool, "devices": list(devices), **spec}
    return {"metadata": {"name": f"{name}-gpus-{generation}-{number}"}, "spec": about}


def claim_of(
    *devices: str, name: str, namespace: str = "default", pods: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a ResourceClaim that was given these devices of a node, and is reserved for pods."""
    results = [
        {"driver": "gpu.nvidia.com", "pool": "n1", "device": device, "request": "gpu"} for device in devices
    ]
    reserved = [{"resource": "pods", "name": each, "uid": f"uid-{each}"} for each in pods]
    status = {"allocation": {"devices": {"results": results}}, "reservedFor": reserved}
    metadata = {"name": name, "namespace": namespace}
    return {"metadata": metadata, "spec": {"devices": {"requests": [{"name": "gpu"}]}}, "status": status}


def named(*names: str) -> list[dict[str, Any]]:
    """Return objects of which only the names matter."""
    return [{"metadata": {"name": name}} for name in names]


def dra(*devices: Mapping[str, Any], slices: Sequence[Mapping[str, Any]] = (), **more: Any) -> Cluster:
    """Return a cluster with NVIDIA's DRA driver, which lists these devices in one slice, or these slices."""
    return Cluster.read(
        [node()],
        device_classes=named("gpu.nvidia.com", "mig.nvidia.com"),
        resource_slices=slices or [resource_slice(*devices)],
        **more,
    )


def kai(*nodes: Mapping[str, Any]) -> Cluster:
    """Return a cluster with KAI."""
    return Cluster.read(nodes or [plain(gpus=2)], crds=named("queues.scheduling.run.ai"))


def gke(strategy: str, clients: int, name: str = "n1", memory: int = 15360) -> dict[str, Any]:
    """Return a GKE node whose GPU is shared."""
    labels = {
        "cloud.google.com/gke-accelerator": "nvidia-tesla-t4",
        "cloud.google.com/gke-gpu-sharing-strategy": strategy,
        "cloud.google.com/gke-max-shared-clients-per-gpu": str(clients),
        "nvidia.com/gpu.memory": str(memory),
    }
    return node(name, labels=labels, allocatable={"nvidia.com/gpu": clients})


def volcano(memory: int = 32768, factor: int = 1) -> dict[str, Any]:
    """Return a node of Volcano's vGPU plugin."""
    register = f"GPU-a,50,{memory // factor},NVIDIA-{V100},true,hami-core:"
    return node(
        annotations={"volcano.sh/node-vgpu-register": register}, allocatable={"volcano.sh/vgpu-number": 50}
    )


def koordinator() -> dict[str, Any]:
    """Return a node of Koordinator, with two GPUs."""
    amounts: dict[str, str | int] = {
        "koordinator.sh/gpu-core": 200,
        "koordinator.sh/gpu-memory": "64Gi",
    }
    return node(labels={"node.koordinator.sh/gpu-model": V100}, allocatable=amounts)


def pod(name: str = "p", on: str = "n1", *, limits: Mapping[str, Any] | None = None, **metadata: Any) -> Pod:
    """Return a running pod, read."""
    found = Pod.read(
        {
            "metadata": {"namespace": "default", "name": name, **metadata},
            "spec": {"nodeName": on, "containers": [{"resources": {"limits": dict(limits or {})}}]},
            "status": {"phase": "Running"},
        }
    )
    assert found is not None
    return found


def changing(name: str, label: str, change: str, **matched: Any) -> list[dict[str, Any]]:
    """Return a policy that makes a change of all new pods with a label, as another system's webhook does.

    ``matched`` says of which pods alone, as ``matchConstraints`` has it.
    """
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    labelled = f"has(object.metadata.labels) && '{label}' in object.metadata.labels"
    spec = {
        "matchConstraints": {"resourceRules": [rule], **matched},
        "matchConditions": [{"name": "labelled", "expression": labelled}],
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "mutations": [{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": change}}],
    }
    about = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    return [
        {**about, "kind": "MutatingAdmissionPolicy", "spec": spec},
        {**about, "kind": "MutatingAdmissionPolicyBinding", "spec": {"policyName": name}},
    ]


def everything() -> dict[str, tuple[Cluster, DialectOptions]]:
    """Return a cluster for each way to share a GPU that is known, with what its administrator says."""
    read = Cluster.read
    mig_labels = {
        f"nvidia.com/mig-1g.5gb.{key}": value for key, value in (("memory", "4864"), ("replicas", "1"))
    }
    queue = DialectOptions(queue="students")
    ready = plain(gpus=2)
    ready["status"]["conditions"].append({"type": "gpu-sharing.nvidia.com/Ready", "status": "True"})
    return {
        "hami": (read([hami(gpus=2)], runtime_classes=named("nvidia")), DialectOptions(policy="binpack")),
        "hami-mixed": (read([hami("a", memory=16384, model="T4"), hami("b")]), DialectOptions()),
        "whole": (read([plain(gpus=4)]), DialectOptions()),
        "time-slicing": (read([plain(replicas=50, strategy="time-slicing")]), DialectOptions()),
        "mps": (
            read([plain(replicas=48, strategy="mps", compute_major="8", compute_minor="0")]),
            DialectOptions(),
        ),
        "mig-mixed": (
            read(
                [
                    node(
                        labels={**discovered(A100, 40960), **mig_labels},
                        allocatable={"nvidia.com/mig-1g.5gb": 7},
                    )
                ]
            ),
            DialectOptions(),
        ),
        "mig-single": (
            read(
                [
                    node(
                        labels={
                            **discovered(f"{A100}-MIG-1g.5gb", 4864),
                            "nvidia.com/mig.strategy": "single",
                        },
                        allocatable={"nvidia.com/gpu": 7},
                    )
                ]
            ),
            DialectOptions(),
        ),
        "kai": (kai(), queue),
        "kai-hami-core": (kai(), DialectOptions(queue="students", memory_limiter=True)),
        "kai-nvfractions": (kai(ready), queue),
        "dra": (dra(listed("gpu-0"), listed("gpu-1")), DialectOptions()),
        "dra-memory": (
            dra(listed("gpu-0", default="32768Mi"), listed("gpu-1", default="32768Mi")),
            DialectOptions(),
        ),
        "dra-shares": (dra(listed("gpu-0", default="0", shares=50)), DialectOptions()),
        "dra-unlimited": (dra(listed("gpu-0", default="0")), DialectOptions()),
        "dra-dividable": (dra(*dividable("gpu-0"), *dividable("gpu-1")), DialectOptions()),
        "dra-mig": (
            dra(listed("gpu-0-mig-0", 4864, kind="mig", profile="1g.5gb", model="A100")),
            DialectOptions(),
        ),
        "volcano": (read([volcano()]), queue),
        "koordinator": (read([koordinator()]), DialectOptions(memory_limiter=True)),
        "gke": (read([gke("time-sharing", 48, memory=32768)]), DialectOptions()),
        "gke-mps": (read([gke("mps", 7)]), DialectOptions()),
        "aliyun": (
            read(
                [node(labels=discovered(), allocatable={"aliyun.com/gpu-mem": 64, "aliyun.com/gpu-count": 2})]
            ),
            DialectOptions(memory_limiter=True),
        ),
        "bitfusion": (read([node(allocatable={"bitfusion.io/gpu": 1000})]), DialectOptions()),
    }
