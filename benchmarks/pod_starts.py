"""A kernel pod started, restarted and ended on a real kubelet, beside a bare pod of the same image.

From a kernel's start to its first cell's reply, a restart, and the way of its slice back;
and, in turn with them, a bare pod that does nothing (from creation to ready, and from deletion
to gone) and two that run the same kernel (from creation to a cell's reply, asked for directly),
one of them with the same home: what the cluster and Python take whoever asks. A kubelet looks
only after 0.3 s whether the volumes of a pod are mounted (podAttachAndMountRetryInterval), and
not at all where there are none. Each cell is sent at once, to whoever listens first: jupyter_client's
wait_for_ready would listen for 0.2 s after the kernel is ready. Kubernetes' own programs, containerd
and runc share this machine's cores with everything that is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import psutil
import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.connect import port_names
from jupyter_client.manager import AsyncKernelManager

from benchmarks.report import Line, Skipped, compared
from benchmarks.sizes import sized
from gpu_pool_client import connect
from support.api_server import ApiServer
from support.clusters import hami
from support.images import build_notebook, name_of
from support.jupyter_env import JupyterEnv
from support.kernel_pods import server_with_home
from support.kubelet import RealCluster, missing, real_cluster
from support.service import ForkServer, serving

ROUNDS = sized(12, 2)
#: Starts that are not counted: the first ones find nothing in memory.
WARMING = 1
#: Seconds between two looks at a pod.
_LOOK_EVERY = 0.02
_WITHIN = 120.0
#: Promised of the first cell of a kernel pod, to that of a bare pod with the same kernel and home; and of a
#: restart, in seconds.
_PROMISE, _RESTART = 1.05, 0.2
_KERNEL = "app.kubernetes.io/component=gpu-kernel"
#: As whom the service knows those who ask over its socket.
_USER = psutil.Process().username()


@dataclass
class Times:
    """Seconds, by what took them."""

    found: dict[str, list[float]] = field(default_factory=dict)

    def add(self, what: str, seconds: float) -> None:
        """Note one."""
        self.found.setdefault(what, []).append(seconds)

    def middle(self, what: str) -> float:
        """Return the median, without the first ones."""
        return statistics.median(self.found[what][WARMING:])

    def ends(self, what: str) -> str:
        """Return the smallest and the largest."""
        counted = self.found[what][WARMING:]
        return f"{min(counted):.2f} to {max(counted):.2f} s"


class Watched:
    """One namespace of the cluster, looked at again and again."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self._server = server
        self._pods = f"/api/v1/namespaces/{namespace}/pods"

    def pod(self, name: str) -> Any:
        """Return a pod; None where there is none."""
        status, found = self._server.call("GET", f"{self._pods}/{name}")
        return found if status == 200 else None

    def kernels(self) -> list[Any]:
        """Return the pods of kernels."""
        _, found = self._server.call("GET", f"{self._pods}?labelSelector={_KERNEL.replace('=', '%3D')}")
        return list(found["items"])

    def create(self, pod: Any) -> None:
        """Create a pod."""
        self._server.create(self._pods, pod)

    def delete(self, name: str) -> None:
        """Delete a pod, as gently as it says itself."""
        self._server.call("DELETE", f"{self._pods}/{name}")


async def _until(is_so: Callable[[], Awaitable[Any]]) -> Any:
    """Return what is so, once it is."""
    give_up_at = time.monotonic() + _WITHIN
    while not (found := await is_so()):
        assert time.monotonic() < give_up_at, "waited in vain"
        await asyncio.sleep(_LOOK_EVERY)
    return found


def _is_ready(pod: Any) -> bool:
    conditions = (pod or {}).get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _bare(image: str, *command: str) -> Any:
    """Return a pod that has nothing but an image and a command."""
    container = {"name": "bare", "image": image, "command": list(command)}
    spec = {
        "containers": [container],
        "terminationGracePeriodSeconds": 5,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "tolerations": [{"operator": "Exists"}],
    }
    name = f"bare-{secrets.token_hex(4)}"
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


async def _one_bare(watched: Watched, times: Times, image: str) -> None:
    """Create a pod that sleeps, wait until it is ready, delete it, and wait until it is gone."""
    pod = _bare(image, "sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.1; done")
    name = pod["metadata"]["name"]
    began = time.perf_counter()
    await asyncio.to_thread(watched.create, pod)

    async def ready() -> bool:
        return _is_ready(await asyncio.to_thread(watched.pod, name))

    async def gone() -> bool:
        return await asyncio.to_thread(watched.pod, name) is None

    await _until(ready)
    times.add("bare", time.perf_counter() - began)
    began = time.perf_counter()
    await asyncio.to_thread(watched.delete, name)
    await _until(gone)
    times.add("bare gone", time.perf_counter() - began)


async def _replied(client: AsyncKernelClient) -> None:
    """Send a cell at once, and return once its reply is here."""
    client.start_channels(iopub=False, stdin=False, hb=False, control=False)
    await client.execute("1", reply=True, timeout=_WITHIN)


async def _one_bare_kernel(watched: Watched, times: Times, image: str, claim: str = "") -> None:
    """Create a pod that runs the same kernel, and run a cell in it: nothing stands between.

    With the claim of a home, it is mounted.
    """
    key = secrets.token_hex(16)
    ports = dict(zip(port_names, range(9751, 9756), strict=True))
    # Not in the home, where the file of an earlier kernel with the same pid would be read.
    options = ["-f", "/tmp/connection.json", *(f"--IPKernelApp.{n}={port}" for n, port in ports.items())]
    command = ("python3", "-m", "ipykernel_launcher", "--ip=0.0.0.0", f"--Session.key={key}", *options)
    pod = _bare(image, *command)
    if claim:
        pod["spec"]["volumes"] = [{"name": "home", "persistentVolumeClaim": {"claimName": claim}}]
        pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "home", "mountPath": "/home/jovyan"}]
    name = pod["metadata"]["name"]
    began = time.perf_counter()
    await asyncio.to_thread(watched.create, pod)

    async def runs() -> Any:
        status = (await asyncio.to_thread(watched.pod, name) or {}).get("status", {})
        return status.get("phase") == "Running" and status.get("podIP")

    client = AsyncKernelClient()
    about = {"ip": await _until(runs), "transport": "tcp", "signature_scheme": "hmac-sha256", "key": key}
    client.load_connection_info({**ports, **about})
    await _replied(client)
    times.add("bare kernel and home" if claim else "bare kernel", time.perf_counter() - began)
    client.stop_channels()
    await asyncio.to_thread(watched.delete, name)


async def _one_kernel(watched: Watched, times: Times, kernel: str, url: str) -> None:
    """Start, use, restart, use and shut down a kernel, and wait until its slice is back."""
    manager = AsyncKernelManager(kernel_name=kernel)
    began = time.perf_counter()
    stages = asyncio.create_task(_stages(watched, times, began))
    await manager.start_kernel()
    client = manager.client()
    await _replied(client)
    times.add("first cell", time.perf_counter() - began)
    await stages
    began = time.perf_counter()
    await manager.restart_kernel()
    await client.execute("1", reply=True, timeout=_WITHIN)
    times.add("restart", time.perf_counter() - began)
    client.stop_channels()
    began = time.perf_counter()
    await manager.shutdown_kernel()
    times.add("shut down", time.perf_counter() - began)

    async def is_free() -> bool:
        async with connect(url) as pool:
            return not (await pool.status()).leases

    async def is_gone() -> bool:
        return not await asyncio.to_thread(watched.kernels)

    await _until(is_free)
    times.add("slice back", time.perf_counter() - began)
    await _until(is_gone)
    times.add("pod gone", time.perf_counter() - began)


async def _stages(watched: Watched, times: Times, began: float) -> None:
    """Note when the kernel's pod is there, and when it is ready."""

    async def there() -> list[Any]:
        return await asyncio.to_thread(watched.kernels)

    async def ready() -> bool:
        return any(map(_is_ready, await there()))

    await _until(there)
    times.add("pod created", time.perf_counter() - began)
    await _until(ready)
    times.add("pod ready", time.perf_counter() - began)


@asynccontextmanager
async def _school(
    cluster: RealCluster, folder: Path, namespace: str
) -> AsyncIterator[tuple[JupyterEnv, str]]:
    """Serve the cluster, with a notebook server's pod and kernelspecs; yield them and the service's URL."""
    home = folder / "home"
    home.mkdir()
    os.chown(home, 1000, 100)
    cluster.kubectl("create", "namespace", namespace)
    cluster.apply(*server_with_home(_USER, namespace, home, cluster.image), namespace=namespace)
    settings = f"""
c.ServeApp.kubernetes = True
c.KubernetesSettings.kubeconfig = {str(cluster.kubeconfig)!r}
c.KubernetesSettings.namespace = {namespace!r}
"""
    with contextlib.closing(ForkServer("import gpu_pool.cluster.backend")) as children:
        async with serving(children, folder / "service", settings) as service:
            os.environ["GPU_POOL_URL"] = service.url
            yield JupyterEnv(folder, service.url), service.url


async def measure(folder: Path) -> Times:
    """Go every journey in turn, again and again."""
    for name in ("data", "runtime", "config"):
        os.environ[f"JUPYTER_{name.upper()}_DIR"] = str(folder / name)
    times, namespace = Times(), "pod-starts"
    image = await asyncio.to_thread(build_notebook, folder)
    with real_cluster(folder / "cluster", [image]) as cluster:
        cluster.image = name_of("notebook")
        node = hami("node-1", count=50)
        node["status"]["allocatable"] |= {"nvidia.com/gpumem": "32768", "nvidia.com/gpucores": "100"}
        cluster.show(node)
        watched = Watched(cluster.server, namespace)
        async with _school(cluster, folder, namespace) as (jupyter_env, url):
            kernel = jupyter_env.install("course")
            for _ in range(WARMING + ROUNDS):
                await _one_bare(watched, times, cluster.image)
                await _one_kernel(watched, times, kernel, url)
                await _one_bare_kernel(watched, times, cluster.image)
                await _one_bare_kernel(watched, times, cluster.image, f"claim-{_USER}")
    return times


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    if why := missing():
        raise Skipped(why)
    with tempfile.TemporaryDirectory(prefix="pod-starts-") as name:
        try:
            times = asyncio.run(measure(Path(name)))
        except pytest.skip.Exception as error:
            raise Skipped(str(error)) from error
    yield from _lines(times)


def _lines(times: Times) -> Iterator[Line]:
    def line(what: str, ours: str, theirs: str, promise: float | None = None) -> Line:
        made_of = f"medians; {times.ends(ours)}, and {times.ends(theirs)}"
        pairs = zip(times.found[ours][WARMING:], times.found[theirs][WARMING:], strict=True)
        return compared(what, list(pairs), made_of, promise, unit="s")

    yield line(
        "start to first cell, to a bare pod with the same kernel and home",
        "first cell",
        "bare kernel and home",
        _PROMISE,
    )
    yield line("the same, to a bare pod with the same kernel and no volume", "first cell", "bare kernel")
    yield line("the same, to a bare pod that does nothing, from created to ready", "first cell", "bare")
    restart = times.middle("restart")
    yield line("restart to first cell, to a bare pod with the same kernel", "restart", "bare kernel")
    yield Line("restart to first cell", restart, f"s, median; {times.ends('restart')}", promise=_RESTART)
    yield line(
        "shut down until the slice is back, to a bare pod from deleted to gone", "slice back", "bare gone"
    )
    yield line("the same until the pod is gone", "pod gone", "bare gone")
    start = times.middle("first cell")
    for what, seconds in (
        ("until the pod is created", times.middle("pod created")),
        ("then until it is ready", times.middle("pod ready") - times.middle("pod created")),
        ("then until the first cell's result", start - times.middle("pod ready")),
    ):
        yield Line(f"of a start: {what}", seconds / start, "medians", ours=seconds, yardstick=start, unit="s")
