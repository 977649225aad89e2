"""A pool over a cluster, and what asks it for kernels in pods."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import zmq

from gpu_pool.cluster.backend import ClusterBackend, open_cluster
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.courses import Courses
from gpu_pool.pool.pool import GpuPool
from gpu_pool.settings import PoolSettings
from gpu_pool.tuning import Tuning
from gpu_pool_client import (
    Device,
    Holder,
    KernelCommand,
    KernelPod,
    Lease,
    PodPhase,
    Pool,
    PoolUnreachable,
    parse_request,
)
from support.fake_kubernetes import FakeKubernetes
from support.pools import eventually
from support.service import ForkServer, Service, serving

SLEEP = ("sleep", "600")
#: The GPU of ``one_card``, as a pool shows it.
CARD = Device("GPU-n1-0", 0, "NVIDIA-V100-SXM2-32GB", 32768, contexts=50, node="n1")
PORTS = {name: 9751 + n for n, name in enumerate(("shell_port", "iopub_port", "stdin_port", "control_port"))}


def connection(**more: Any) -> dict[str, Any]:
    """Return what a connection file says, with new keys."""
    public, secret = zmq.curve_keypair()
    keys = {"curve_publickey": public.decode(), "curve_secretkey": secret.decode()}
    signed = {"key": uuid.uuid4().hex, "signature_scheme": "hmac-sha256", "transport": "tcp"}
    return {**PORTS, "hb_port": 9755, **signed, **keys, **more}


def command(*argv: str, **more: Any) -> KernelCommand:
    """Return a kernel, by default one that sleeps."""
    return KernelCommand(argv or SLEEP, connection(), **more)


def notebook(
    user: str, namespace: str, *, image: str = "example.org/notebook:1", **more: Any
) -> dict[str, Any]:
    """Return a notebook server's pod as KubeSpawner makes it; more: its ``claim``, ``server``, ``node``."""
    claim, server = more.get("claim", f"claim-{user}"), more.get("server", "")
    container: dict[str, Any] = {"name": "notebook", "image": image, "command": list(SLEEP)}
    spec: dict[str, Any] = {
        "containers": [container],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "terminationGracePeriodSeconds": 0,
    }
    if claim:
        spec["volumes"] = [{"name": "home", "persistentVolumeClaim": {"claimName": claim}}]
        container["volumeMounts"] = [{"name": "home", "mountPath": "/home/jovyan"}]
    if "node" in more:
        spec["nodeName"] = more["node"]
    annotations = {"hub.jupyter.org/username": user}
    if server:
        annotations["hub.jupyter.org/servername"] = server
    metadata = {"name": f"jupyter-{user}", "namespace": namespace, "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def claim(user: str, namespace: str, mode: str = "ReadWriteMany") -> dict[str, Any]:
    """Return the claim of somebody's home, which is bound to nothing."""
    return {
        "metadata": {"name": f"claim-{user}", "namespace": namespace},
        "spec": {"accessModes": [mode]},
    }


def volume(name: str, namespace: str, *modes: str) -> list[dict[str, Any]]:
    """Return a PersistentVolumeClaim and the volume that it is bound to, as a controller writes it down."""
    spec = {"accessModes": list(modes), "storageClassName": ""}
    about = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "name": name, "namespace": namespace}
    size, bound = {"storage": "1Gi"}, {"pv.kubernetes.io/bind-completed": "yes"}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{namespace}-{name}"},
            "spec": {**spec, "capacity": size, "hostPath": {"path": "/nowhere"}, "claimRef": about},
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "annotations": bound},
            "spec": {**spec, "resources": {"requests": size}, "volumeName": f"{namespace}-{name}"},
        },
    ]


def server_with_home(user: str, namespace: str, home: Path, image: str, **kind: str) -> list[dict[str, Any]]:
    """Return a notebook server's pod after what it has its home by, a folder that a controller binds."""
    disk, wanted = volume(f"claim-{user}", namespace, "ReadWriteMany")
    disk["spec"] |= {"hostPath": {"path": str(home), **kind}, "persistentVolumeReclaimPolicy": "Retain"}
    del wanted["metadata"]["annotations"]
    return [disk, wanted, notebook(user, namespace, image=image)]


@asynccontextmanager
async def serving_cluster(
    children: ForkServer, folder: Path, kubeconfig: Path, settings: str = ""
) -> AsyncIterator[Service]:
    """Run ``gpu-pool serve --kubernetes`` for the namespace hub."""
    settings += "\nc.KubernetesSettings.namespace = 'hub'\n"
    environment = {"KUBECONFIG": str(kubeconfig)}
    async with serving(children, folder, settings, "--kubernetes", environment=environment) as service:
        yield service


@asynccontextmanager
async def cluster_pool(
    path: Path,
    kubeconfig: Path,
    namespace: str,
    *,
    courses: Courses | None = None,
    named: Mapping[str, Any] | None = None,
    tuning: Tuning = Tuning(),  # noqa: B008 - frozen
    watchdog: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[GpuPool]:
    """Serve a cluster within this process.

    ``courses`` are those of files, ``named`` those of ``c.PoolSettings.courses``; ``watchdog`` are
    further settings of that.
    """
    told = courses or Courses()
    kubernetes = KubernetesSettings(kubeconfig=str(kubeconfig), namespace=namespace, **settings)
    log = logging.getLogger("gpu_pool.tests")
    chosen = PoolSettings(courses=dict(named or {}), tuning=tuning, **(watchdog or {}))
    pool = await open_cluster(path, chosen, kubernetes, lambda: told, log)
    async with pool:
        yield pool


def backend_of(pool: GpuPool) -> ClusterBackend:
    """Return the cluster behind a pool."""
    assert isinstance(pool.backend, ClusterBackend)
    return pool.backend


async def launched(pool: Pool, lease_id: str, kernel: KernelCommand) -> KernelPod:
    """Launch as the kernel proxy does, again and again while the pool cannot."""
    while True:
        try:
            return await pool.launch(lease_id, kernel)
        except PoolUnreachable:  # noqa: PERF203 - what is waited for takes seconds
            await asyncio.sleep(0.1)


async def held(pool: Pool, text: str = "2%", user: str = "ada") -> Lease:
    """Return a lease that is held."""
    return await pool.acquire(parse_request(text), Holder(user), uuid.uuid4().hex, timeout=120)


async def until_pod(
    pool: Pool, lease_id: str, is_so: Callable[[KernelPod], bool], within: float = 120.0
) -> KernelPod:
    """Follow a pod until it is so."""
    pod: KernelPod | None = None

    async def follow() -> KernelPod:
        nonlocal pod
        while True:
            pod = await pool.pod(lease_id, pod.version if pod else "")
            if is_so(pod):
                return pod

    try:
        return await asyncio.wait_for(follow(), within)
    except asyncio.TimeoutError:
        raise AssertionError(f"waited in vain, and saw last {pod}") from None


async def running(pool: Pool, lease_id: str) -> KernelPod:
    """Return the pod of a lease once it runs."""
    return await until_pod(pool, lease_id, lambda pod: pod.phase is PodPhase.RUNNING)


async def running_no_more(pool: Pool, lease_id: str) -> None:
    """Follow a pod until asking for it fails, with how its lease has ended."""
    await until_pod(pool, lease_id, lambda _: False)


def foreign(name: str, node: str, *, milli: int = 1000, gpu: str = "GPU-n1-0") -> dict[str, Any]:
    """Return a pod that is none of the pool's, such as a research server, as HAMi has placed it."""
    allocated = f"{gpu},NVIDIA,{32768 * milli // 1000},{milli // 10}:;"
    metadata = {"name": name, "namespace": "research"}
    annotations = {"hami.io/vgpu-devices-allocated": allocated}
    spec = {"nodeName": node, "containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}
    return {
        "metadata": {**metadata, "annotations": annotations},
        "spec": spec,
        "status": {"phase": "Running"},
    }


async def free(pool: Pool) -> list[int]:
    """Return what is free of each GPU, in thousandths."""
    return [each.free_milli for each in (await pool.status()).devices]


async def until_free(pool: Pool, *expected: int) -> None:
    """Return once so much is free of each GPU."""
    await eventually(lambda: free(pool), lambda seen: seen == list(expected))


async def start(pool: Pool, fake: FakeKubernetes, text: str = "2%") -> str:
    """Start a kernel of ada's, and return its lease's id."""
    lease = await held(pool, text)
    await pool.launch(lease.id, command())
    fake.run(f"gpu-pool-{lease.id}-1")
    await running(pool, lease.id)
    return lease.id
