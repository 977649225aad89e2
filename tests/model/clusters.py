"""A cluster as the ground of a pool: its API is the served fake, and its nodes come and go."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from gpu_pool.clock import Clock
from gpu_pool.cluster.backend import ClusterBackend
from gpu_pool.cluster.dialects import AUTO, Cluster, DialectOptions, choose, counted_as
from gpu_pool.pool.core import PoolCore
from gpu_pool.settings import PoolSettings
from gpu_pool_client import Device, NeverFits, SliceRequest
from model.grounds import ME, Socket, serving_still
from model.reference import Reference
from model.still import Clocks, stand_still
from support.clusters import hami
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import claim, notebook
from support.loops import LoopThread
from support.service import ForkServer

T = TypeVar("T")
NAMESPACE = "hub"
#: The nodes with those GPUs, by name.
NODES: Final[dict[str, dict[str, Any]]] = {
    "n1": hami("n1", 2, model="V100-SXM2-32GB"),
    "n2": hami("n2", memory=16384, count=7, model="T4"),
    "n3": hami("n3", memory=40960, model="A100-SXM4-40GB"),
}
_V100: Final[dict[str, Any]] = {"model": "NVIDIA-V100-SXM2-32GB", "memory_mib": 32768, "contexts": 50}


class ClusterReference(Reference):
    """A pool over a cluster as it should be."""

    def counted_as(self, request: SliceRequest) -> SliceRequest:
        """Return what the cluster's dialect grants for it. What it cannot say is refused first of all."""
        there = {device.node for device in self._devices()}
        dialect = choose(
            Cluster.read([NODES[name] for name in sorted(there)]), DialectOptions(), AUTO
        ).dialect
        if dialect is None:
            raise NeverFits("")
        return counted_as(request, dialect)


def still_cluster(path: Path, backend: ClusterBackend, settings: PoolSettings, _: Clock) -> PoolCore:
    """Return what there is of a pool over a cluster, with the clocks that the folder of its store names."""
    clock = Clocks(path.with_name("clocks")).clock()
    return stand_still(PoolCore(path, backend, settings, clock), settings, clock)


class ClusterGround(Socket):
    """A service on a Unix socket, over a cluster with GPUs of HAMi on three nodes."""

    devices: Sequence[Device] = (
        Device("GPU-n1-0", 0, node="n1", **_V100),
        Device("GPU-n1-1", 1, node="n1", **_V100),
        Device("GPU-n2-0", 0, node="n2", model="NVIDIA-T4", memory_mib=16384, contexts=7),
        Device("GPU-n3-0", 0, node="n3", model="NVIDIA-A100-SXM4-40GB", memory_mib=40960, contexts=50),
    )

    def __init__(self, children: ForkServer) -> None:
        super().__init__(children)
        self._loop = LoopThread("cluster")
        self.fake = FakeKubernetes()
        self.run(self.fake.start())
        self.service.prelude = serving_still(
            "gpu_pool.cluster.backend", "PoolCore", "model.clusters", "still_cluster"
        )
        self.service.arguments = ("--kubernetes",)
        self.service.environment = {"KUBECONFIG": str(self.fake.kubeconfig(self.folder / "kubeconfig"))}
        self.tell("put", "persistentvolumeclaims", claim(ME, NAMESPACE))
        self.open_notebook()

    def configuration(self) -> str:
        return f"c.KubernetesSettings.namespace = {NAMESPACE!r}\n" + super().configuration()

    # -- The cluster -------------------------------------------------------

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Do something where the API is served."""
        return self._loop.run(job)

    def tell(self, what: str, *arguments: Any, **more: Any) -> Any:
        """Change the cluster: call a method of the fake where it is served."""

        async def call() -> Any:
            change: Callable[..., Any] = getattr(self.fake, what)
            return change(*arguments, **more)

        return self.run(call())

    def show(self, devices: Sequence[Device]) -> Sequence[Device]:
        """Let the nodes of these devices be there, and return all that they have."""
        there = {device.node for device in devices}
        for name in set(self.fake.named("nodes")) - there:
            self.tell("remove", "nodes", name)
        for name in sorted(there.difference(self.fake.named("nodes"))):
            self.tell("put", "nodes", NODES[name])
        return [device for device in self.devices if device.node in there]

    def answers(self, node: str, ready: bool) -> None:
        """Let a node answer, or not."""
        conditions = [{"type": "Ready", "status": str(ready)}]
        self.tell("change", "nodes", node, conditions=conditions)

    def open_notebook(self) -> None:
        """Start the notebook server that asks for kernels."""
        self.tell("put", "pods", notebook(ME, NAMESPACE, node="elsewhere"))

    def close_notebook(self) -> None:
        """Stop it; the cluster would then delete the kernels that it owns."""
        self.tell("remove", "pods", f"jupyter-{ME}")

    def kernels(self) -> set[str]:
        """Return the names of all pods of kernels."""
        return {name for name in self.fake.named("pods") if name.startswith("gpu-pool-")}

    async def close(self) -> None:
        await super().close()
        self.run(self.fake.stop())
        self._loop.end()
