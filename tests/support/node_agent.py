"""Nodes for tests: what a kubelet does for a pod, done with processes of this machine.

In a test, over a real API server and scheduler (the fixture ``cluster`` of
``tests/cluster/api_server`` starts all of it, see its ``conftest``)::

    with NodeAgent(kubeconfig, folder) as agent:      # a thread; every method may be called from anywhere
        agent.add(clusters.hami("n1"), clusters.plain("n2", gpus=8))
        agent.images["example.org/big:1"] = "pulling"  # or "missing"; "there" lets its pods go on
        agent.log("default", "my-pod")                 # what its containers wrote
        agent.kill("default", "my-pod", "OOMKilled")   # the processes, as the system does
        agent.evict("default", "my-pod", "The node was low on resource: memory.")
        agent.lose("n1")                               # its pods' processes end, and nobody is told

``hollow=True`` runs nothing: its pods are Running until they are deleted, for
tests of thousands. By itself: ``python -m support.node_agent KUBECONFIG FOLDER
NODES.json [hollow]``.

A pod has an address, a host name and, if it wants to, processes of its own; a
container has mounts, a user, groups, capabilities and process numbers as it
would have them, over this machine's file system (``support.containers``). All
images are one: this machine's programs and this Python, and a user ``jovyan``,
1000 of the group 100, with a home. Known are secret, configMap, emptyDir,
hostPath and persistentVolumeClaim (a folder that everybody can write), init
containers, restartPolicy, deadlines, grace, images that do not come and last
words. What is not known is refused: such a pod fails with the reason
``NotOnThisNode``.

Left out without a word are limits of memory and CPU, seccomp, SELinux and user
namespaces (``hostUsers``), logs by the API and exec; and it tries again after
one second what a kubelet does after ten.

Compared with kubelet 1.36.2 on containerd 1.6.20 and runc 1.1.5 in November
2026, by the pods of ``support.probes``: ``tests/cluster/kubelet/test_hollow_node.py``
compares the two again. Owners, lost nodes, quotas and namespaces are
kube-controller-manager's, as anywhere. A test that needs none of this passes on
a cluster with real kubelets.

It needs root, and what ``containers.missing`` names; without pods, or with
``hollow=True``, it needs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import sys
from collections.abc import Coroutine, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from kubernetes_asyncio import config, watch
from kubernetes_asyncio.client import ApiClient, Configuration, CoordinationV1Api, CoreV1Api
from kubernetes_asyncio.client.exceptions import ApiException

from support.containers import Image, Network
from support.loops import LoopThread
from support.pod_process import Place, own_environment
from support.pod_runner import NodeResources, PodRunner, PodStop
from support.pod_volumes import Manifest

T = TypeVar("T")

_LEASES = "kube-node-lease"
#: Seconds between two signs of life of a node.
_RENEW = 10.0
#: What every node has besides its GPUs, unless it says otherwise.
_CAPACITY = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": "500"}
#: As whom a container runs that does not say it, and its group: that of Jupyter's images.
_USER = (1000, 100)
_READY = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "ready"}


class NodeAgent:
    """Nodes, and the processes of the pods that are bound to them."""

    def __init__(
        self,
        kubeconfig: Path,
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        hollow: bool = False,
    ) -> None:
        """``environment`` is what all images bring along, beside the PATH of this process."""
        self.images: dict[str, str] = {}
        self.hollow = hollow
        self._kubeconfig, self._folder = kubeconfig, folder
        self._resources: NodeResources | None = None
        self._environment = {**own_environment(), **(environment or {})}
        self._nodes: set[str] = set()
        self._runners: dict[str, PodRunner] = {}
        self._uids: dict[tuple[str, str], str] = {}
        self._numbers = itertools.count(2)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> NodeAgent:
        self._loop = LoopThread("node agent")
        self._do(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.end()

    def add(self, *nodes: Manifest) -> None:
        """Register nodes, written as Node objects (see ``support.clusters``), and keep them ready."""
        self._do(self._add(nodes))

    def lose(self, node: str) -> None:
        """Lose a node: its pods' processes die with it, and it is heard of no more.

        That it does not answer is written down at once, which the node
        controller would do after its grace period.
        """
        self._do(self._lose(node))

    def evict(self, namespace: str, name: str, message: str) -> None:
        """End a pod as a kubelet does that is short of something."""
        self._call(lambda: self._runner(namespace, name).stop(PodStop(0, "Evicted", message)))

    def kill(self, namespace: str, name: str, reason: str = "OOMKilled") -> None:
        """Kill a pod's processes, and give this reason in its status."""
        self._call(lambda: self._runner(namespace, name).kill(reason))

    def log(self, namespace: str, name: str, container: str = "") -> str:
        """Return what the newest pod of that name wrote, or one of its containers since it began anew."""
        folder = self._folder / "pods" / self._uids[namespace, name]
        files = sorted(folder.glob(f"log-{container or '*'}-*"), key=lambda file: file.stat().st_mtime_ns)
        return "".join(file.read_text(errors="replace") for file in (files[-1:] if container else files))

    def claims(self, namespace: str, name: str) -> Path:
        """Return the folder that a PersistentVolumeClaim is here."""
        return self._folder / "claims" / namespace / name

    @property
    def outside(self) -> str:
        """Where pods reach this machine."""
        return self._resources_of_node().network.outside

    def _resources_of_node(self) -> NodeResources:
        """Return what pods stand on, which is made for the first one."""
        if self._resources is None:
            self._resources = NodeResources(Image(*_USER), Network(), self.images)
        return self._resources

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)

    def _call(self, work: Any) -> None:
        async def called() -> None:
            work()

        self._do(called())

    def _runner(self, namespace: str, name: str) -> PodRunner:
        return self._runners[self._uids[namespace, name]]

    async def _open(self) -> None:
        configuration = Configuration()
        await config.load_kube_config(str(self._kubeconfig), client_configuration=configuration)
        configuration.disable_strict_ssl_verification = True
        self._client = ApiClient(configuration)
        self._core, self._leases = CoreV1Api(self._client), CoordinationV1Api(self._client)
        self._spawn(self._watch())
        self._spawn(self._renew())

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for runner in self._runners.values():
            runner.stop(PodStop(silent=True))
        running = [runner.task for runner in self._runners.values()]
        await asyncio.gather(*running, *self._tasks, return_exceptions=True)
        await asyncio.gather(*(runner.gone() for runner in self._runners.values()))
        for name in self._nodes:
            await self._core.delete_node(name)
        await self._client.close()
        if self._resources is not None:
            self._resources.network.close()
            self._resources.image.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception():
            asyncio.get_running_loop().call_exception_handler(
                {"message": "node agent", "exception": task.exception()}
            )

    async def _add(self, nodes: tuple[Manifest, ...]) -> None:
        for node in nodes:
            name = node["metadata"]["name"]
            self._nodes.add(name)
            await self._core.create_node({"metadata": node["metadata"], "spec": node.get("spec", {})})
            await self._core.patch_node_status(name, {"status": _ready(node.get("status", {}))})
            await self._create_lease(name)

    async def _create_lease(self, name: str) -> None:
        spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": _now()}
        while True:
            try:
                await self._leases.create_namespaced_lease(
                    _LEASES, {"metadata": {"name": name}, "spec": spec}
                )
            except ApiException as error:
                if error.status == 404:  # a fresh API server has not made the namespace yet
                    await asyncio.sleep(0.1)
                    continue
                if error.status != 409:
                    raise
                # Left by an earlier node of that name, and old: it would count as lost.
                await self._leases.patch_namespaced_lease(name, _LEASES, {"spec": spec})
            return

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW)
            await asyncio.gather(*map(self._sign_of_life, sorted(self._nodes)))

    async def _sign_of_life(self, name: str) -> None:
        # The API server may be away for a moment: that is a test, too.
        with contextlib.suppress(ApiException, aiohttp.ClientError):
            await self._leases.patch_namespaced_lease(name, _LEASES, {"spec": {"renewTime": _now()}})
            if name in self._nodes:  # not lost meanwhile
                # Once a sign of life was late, only the node itself can say that it is ready.
                await self._core.patch_node_status(name, {"status": {"conditions": [_READY]}})

    async def _lose(self, name: str) -> None:
        self._nodes.discard(name)
        lost = [each for each in self._runners.values() if each.node == name]
        for runner in lost:
            runner.stop(PodStop(silent=True))
        await asyncio.gather(*(runner.task for runner in lost))
        words = "Kubelet stopped posting node status."
        condition = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": words}
        await self._core.patch_node_status(name, {"status": {"conditions": [condition]}})

    async def _watch(self) -> None:
        version = ""
        while True:
            try:
                version = version or await self._list()
                version = await self._follow(version)
            except ApiException:  # noqa: PERF203 - that it fails now and then is the point
                version = ""
            except (aiohttp.ClientError, asyncio.TimeoutError):
                await asyncio.sleep(0.5)

    async def _list(self) -> str:
        """Look at all pods; return the version from which to follow their changes."""
        answer = await self._core.list_pod_for_all_namespaces(_preload_content=False)
        found = json.loads(await answer.read())
        there = {each["metadata"]["uid"] for each in found["items"]}
        for each in found["items"]:
            self._see("MODIFIED", each)
        for uid in self._runners.keys() - there:
            self._forget(uid)
        return str(found["metadata"]["resourceVersion"])

    async def _follow(self, version: str) -> str:
        changes = watch.Watch(return_type="object").stream(
            self._core.list_pod_for_all_namespaces,
            field_selector="spec.nodeName!=",
            resource_version=version,
            timeout_seconds=300,
        )
        async for each in changes:
            self._see(each["type"], each["raw_object"])
            version = each["raw_object"]["metadata"]["resourceVersion"]
        return version

    def _see(self, change: str, pod: Mapping[str, Any]) -> None:
        metadata, spec = pod["metadata"], pod["spec"]
        uid, deleted = metadata["uid"], "deletionTimestamp" in metadata
        runner = self._runners.get(uid)
        if change == "DELETED":
            self._forget(uid)
        elif runner is None and spec.get("nodeName") in self._nodes and not _has_ended(pod):
            self._runners[uid] = runner = self._start(pod)
        if runner is None or not deleted or change == "DELETED" or runner.node not in self._nodes:
            return
        if runner.task.done():
            self._spawn(runner.gone())
        else:
            runner.stop(PodStop(metadata.get("deletionGracePeriodSeconds", 0), deleted=True))

    def _start(self, pod: Mapping[str, Any]) -> PodRunner:
        metadata = pod["metadata"]
        number, resources = next(self._numbers), None if self.hollow else self._resources_of_node()
        folder = self._folder / "pods" / metadata["uid"]
        folder.mkdir(parents=True)
        # Nobody talks to pods in which nothing runs.
        address = (
            resources.network.address(number) if resources else f"198.18.{number // 256 % 256}.{number % 256}"
        )
        place = Place(address, folder, self._folder / "claims", self._environment)
        self._uids[metadata["namespace"], metadata["name"]] = metadata["uid"]
        runner = PodRunner(self._core, pod, place, number, resources)
        runner.task.add_done_callback(self._over)
        return runner

    def _forget(self, uid: str) -> None:
        """End a pod that is there no more."""
        runner = self._runners.pop(uid, None)
        if runner is not None:
            runner.stop(PodStop(silent=True))
            self._spawn(_ended(runner))


async def _ended(runner: PodRunner) -> None:
    await runner.task


def _has_ended(pod: Mapping[str, Any]) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _ready(status: Mapping[str, Any]) -> dict[str, Any]:
    amounts = {**_CAPACITY, **status.get("allocatable", {})}
    given = [each for each in status.get("conditions", ()) if each["type"] != "Ready"]
    return {
        "capacity": {**amounts, **status.get("capacity", {})},
        "allocatable": amounts,
        "conditions": [*given, _READY],
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
    }


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def main() -> None:
    """Run until a signal ends it."""
    kubeconfig, folder, nodes, *rest = sys.argv[1:]
    with NodeAgent(Path(kubeconfig), Path(folder), hollow="hollow" in rest) as agent:
        agent.add(*json.loads(Path(nodes).read_text()))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
