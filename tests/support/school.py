"""A cluster with as many nodes as a school has, and kernels that are asked for all at once.

Its control plane is the real one; its nodes are hollow (see ``support.node_agent``),
so its pods run nothing. The pool's service has an account of its own there, with the
rights that ``examples/kubernetes`` gives it, and the API server writes down what it asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_pool.cluster.backend import open_cluster
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.courses import Courses
from gpu_pool.pool.pool import GpuPool
from gpu_pool.service.heartbeats import Heartbeats
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool.settings import PoolSettings
from gpu_pool_client import Holder, PodPhase, parse_request
from support.api_server import Account, api_serving
from support.clusters import hami
from support.control_plane import Cluster, scheduling_and_controlling, write_kubeconfig
from support.kernel_pods import backend_of, command, launched, notebook, until_pod, volume

NAMESPACE = "jupyterhub"
GPUS = 8
SIZE = parse_request("2%")
_TESTS = Path(__file__).parents[1]
_RIGHTS = _TESTS.parent / "examples" / "kubernetes" / "service" / "rbac.yaml"
_LOG = logging.getLogger("gpu_pool.school")


@dataclass(frozen=True)
class School:
    """A cluster in which so many users have a notebook server."""

    cluster: Cluster
    users: int
    account: Account
    #: How the pool's service reaches it.
    kubeconfig: Path


@dataclass(frozen=True, slots=True)
class Times:
    """When (``time.monotonic()``) a kernel was asked for, had its slice, was written down, and ran."""

    asked: float
    granted: float
    launched: float
    ran: float


@contextmanager
def school(folder: Path, nodes: int, users: int) -> Iterator[School]:
    """Run such a cluster, every node with eight V100s shared by HAMi; all is ready for kernels."""
    account = Account(f"{NAMESPACE}:gpu-pool", folder, secrets.token_hex(16))
    with ExitStack() as stack:
        server = stack.enter_context(api_serving(folder, account))
        own = folder / "control-plane"
        own.mkdir()
        kubeconfig = write_kubeconfig(own / "kubeconfig", server.url, server.token, server.certificate)
        stack.enter_context(scheduling_and_controlling(kubeconfig))
        stack.enter_context(_nodes(kubeconfig, folder, nodes))
        cluster = Cluster(kubeconfig)
        _fill(cluster, users)
        service = write_kubeconfig(folder / "kubeconfig", server.url, account.token, server.certificate)
        yield School(cluster, users, account, service)


@contextmanager
def _nodes(kubeconfig: Path, folder: Path, count: int) -> Iterator[None]:
    """Run the nodes in a process of their own."""
    amounts = {"nvidia.com/gpumem": str(32768 * GPUS), "nvidia.com/gpucores": str(100 * GPUS)}
    nodes = [hami(f"node-{number:03}", GPUS) for number in range(count)]
    for node in nodes:
        node["status"]["allocatable"] |= amounts
    (folder / "nodes.json").write_text(json.dumps(nodes))
    arguments = [kubeconfig, folder / "nodes", folder / "nodes.json", "hollow"]
    with (folder / "nodes.log").open("wb") as log:
        agent = subprocess.Popen(
            [sys.executable, "-m", "support.node_agent", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(_TESTS)},
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"ready\n", (folder / "nodes.log").read_text()
        yield
    finally:
        agent.kill()
        agent.communicate()


def _fill(cluster: Cluster, users: int) -> None:
    """Add the service's rights, and a notebook server with a home for everybody."""
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.kubectl("wait", "--for=create", "clusterrolebinding/system:basic-user", "--timeout=60s")
    cluster.kubectl("apply", "-f", str(_RIGHTS))
    objects: list[Any] = []
    for number in range(users):
        objects += volume(f"claim-user-{number}", NAMESPACE, "ReadWriteMany")
        objects.append(notebook(f"user-{number}", NAMESPACE))
    cluster.apply(*objects, namespace=NAMESPACE)
    running = "--for=jsonpath={.status.phase}=Running"
    cluster.kubectl("wait", "-n", NAMESPACE, "pods", "--all", running, "--timeout=300s")


@asynccontextmanager
async def pool_of(school: School, store: Path) -> AsyncIterator[GpuPool]:
    """Serve the school's cluster within this process, with the service's own loop over its leases."""
    settings = PoolSettings(max_waiting=100_000)
    # A node has as much memory as four hundred such kernels need.
    kubernetes = KubernetesSettings(kubeconfig=str(school.kubeconfig), namespace=NAMESPACE, memory_mib=512)
    courses = Courses()
    async with await open_cluster(store, settings, kubernetes, lambda: courses, _LOG) as pool:
        looking = asyncio.create_task(LeaseChanges(pool, _LOG, Heartbeats(60.0, _LOG)).run())
        try:
            yield pool
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking


async def kernel(pool: GpuPool, user: str, key: str) -> tuple[str, Times]:
    """Ask for a slice, start a kernel on it, and wait until it runs, as a notebook server does."""
    asked = time.monotonic()
    lease = await pool.request(SIZE, Holder(user), key)
    if not lease.slices:
        lease = await pool.wait(lease.id)
    granted = time.monotonic()
    await launched(pool, lease.id, command())
    handed_over = time.monotonic()
    await until_pod(pool, lease.id, lambda pod: pod.phase is PodPhase.RUNNING, within=1_800)
    return lease.id, Times(asked, granted, handed_over, time.monotonic())


async def burst(pool: GpuPool, school: School, count: int, name: str) -> dict[str, Times]:
    """Ask for so many kernels at once; return when each was where, by its lease, once all run."""
    asked = (kernel(pool, f"user-{n % school.users}", f"{name}-{n}") for n in range(count))
    return dict(await asyncio.gather(*asked))


async def end_all(pool: GpuPool, leases: Collection[str]) -> None:
    """End these kernels, and wait until the cluster has none of them."""
    every = list(leases)
    for number in range(0, len(every), 100):
        await asyncio.gather(*(pool.release(lease) for lease in every[number : number + 100]))
    end = time.monotonic() + 1_800
    while backend_of(pool).view.own.leases():
        assert time.monotonic() < end, f"{len(backend_of(pool).view.own.leases())} leases have pods still"
        await asyncio.sleep(0.2)
