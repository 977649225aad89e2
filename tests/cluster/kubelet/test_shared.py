"""Whole GPUs that the pool claims and divides, on a real kubelet that prepares them by a DRA driver."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from gpu_pool.cluster.device_claims import COMPONENT
from gpu_pool.cluster.dialects.shared import claim_name
from support.fixtures import jupyter_env, manager
from support.frontend import Frontend, frontend, page_of
from support.jupyter_env import JupyterEnv, Managers, eventually
from support.kernel_pods import server_with_home
from support.kubelet import PAUSE, RealCluster
from support.service import ForkServer, serving

if TYPE_CHECKING:
    from support.dra_driver import DraDriver

__all__ = ["jupyter_env", "manager"]

DEVICE = "gpu-0"
CLAIM = claim_name("gpu-pool", f"GPU-{DEVICE}")
#: As whom the service knows those who ask over its socket.
USER = psutil.Process().username()
KERNELS = "app.kubernetes.io/component=gpu-kernel"
HOLDERS = f"app.kubernetes.io/component={COMPONENT}"
LONG = 120


@pytest.fixture
def home(own_cluster: RealCluster, namespace: str) -> Iterator[None]:
    """Start the pod of a notebook server, whose home everybody may write."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-pool-test-"))
    folder.chmod(0o777)
    own_cluster.apply(*server_with_home(USER, namespace, folder, own_cluster.image), namespace=namespace)
    yield
    shutil.rmtree(folder)


class Gpu:
    """The node's GPU as the cluster sees it, and somebody else who asks for it."""

    def __init__(self, cluster: RealCluster, namespace: str, driver: DraDriver) -> None:
        self._cluster, self._namespace, self._driver = cluster, namespace, driver

    def pods(self, selector: str) -> list[Any]:
        found: list[Any] = self._cluster.get("pods", "-n", self._namespace, "-l", selector)["items"]
        return found

    def uids(self, selector: str) -> set[str]:
        return {each["metadata"]["uid"] for each in self.pods(selector)}

    def claims(self) -> dict[str, Any]:
        found = self._cluster.get("resourceclaims", "-n", self._namespace)["items"]
        return {each["metadata"]["name"]: each for each in found}

    def uid(self, claim: str = CLAIM) -> str:
        return str(self.claims()[claim]["metadata"]["uid"])

    def rival(self) -> None:
        """Let somebody else ask for any GPU, with a claim and a pod of their own."""
        requests = [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]
        about = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "rival"}}
        container = {"name": "c", "image": PAUSE, "resources": {"claims": [{"name": "gpu"}]}}
        spec = {
            "containers": [container],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "rival"}],
            "tolerations": [{"operator": "Exists"}],
            "terminationGracePeriodSeconds": 0,
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "rival"}, "spec": spec}
        self._cluster.apply(
            {**about, "spec": {"devices": {"requests": requests}}}, pod, namespace=self._namespace
        )

    def _rival(self) -> Any:
        return self._cluster.get("pod", "-n", self._namespace, "rival")["status"]

    def rival_is_refused(self) -> bool:
        return any(each.get("reason") == "Unschedulable" for each in self._rival().get("conditions", []))

    def rival_runs(self) -> bool:
        return bool(self._rival()["phase"] == "Running")

    def is_held_alone(self) -> bool:
        """Whether nothing but the pool's holder keeps the claim."""
        users = self.claims()[CLAIM].get("status", {}).get("reservedFor", [])
        return [each["name"] for each in users] == [each["metadata"]["name"] for each in self.pods(HOLDERS)]


async def until(is_so: Callable[[], Any]) -> None:
    """Return once something is so in the cluster."""
    await eventually(lambda: asyncio.to_thread(is_so), within=LONG)


async def said(page: Frontend, code: str) -> str:
    """Return what a cell prints."""
    return "".join((await page.run(code).done(within=LONG)).outputs)


async def test_kernels_share_a_claimed_gpu_which_is_kept_between_them_and_given_back(
    jupyter_env: JupyterEnv,
    manager: Managers,
    own_cluster: RealCluster,
    namespace: str,
    home: None,
    driver: DraDriver,
    children: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(own_cluster, namespace, driver)

    def settings(empty_for: int) -> str:
        return f"""
c.ServeApp.kubernetes = True
c.KubernetesSettings.kubeconfig = {str(own_cluster.kubeconfig)!r}
c.KubernetesSettings.namespace = {namespace!r}
c.KubernetesSettings.dialect = "shared"
c.KubernetesSettings.placeholder_image = {PAUSE!r}
c.KubernetesSettings.shared_empty_for = {empty_for}
"""

    async with serving(children, tmp_path / "service", settings(600)) as service:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        small, large = (jupyter_env.install(size, size=size) for size in ("2%", "30%"))
        first, second = manager(small), manager(large)
        for each in (first, second):
            await each.start_kernel()
        async with frontend(first) as one, frontend(second) as other:
            for page in (one, other):
                assert await said(page, "print(6 * 7)") == "42\n"
            # One claim, prepared once, whoever came first.
            ours = gpu.uid()
            assert driver.calls_of(ours) == [("prepare", ours)]
            # A kernel starts anew in its pod.
            before = gpu.uids(KERNELS)
            await first.restart_kernel()
            assert await said(one, "print(6 * 7)") == "42\n"
            assert gpu.uids(KERNELS) == before
        for each in (first, second):
            await each.shutdown_kernel()
        await until(lambda: not gpu.pods(KERNELS))
        await until(gpu.is_held_alone)
        # Between two kernels nobody else has it.
        await asyncio.to_thread(gpu.rival)
        await until(gpu.rival_is_refused)
        async with page_of(manager(small)) as (third, page):
            assert await said(page, "print(6 * 7)") == "42\n"
        assert gpu.uid() == ours
        assert driver.calls_of(ours) == [("prepare", ours)]
        await third.shutdown_kernel()
        await until(lambda: not gpu.pods(KERNELS))
    # A service that gives back at once what is empty.
    async with serving(children, tmp_path / "service", settings(0)):
        await until(gpu.rival_runs)
        await until(lambda: CLAIM not in gpu.claims() and not gpu.pods(HOLDERS))
        theirs = gpu.uid("rival")
        calls = driver.calls_of(ours, theirs)
        assert calls == [("prepare", ours), ("unprepare", ours), ("prepare", theirs)]
    # The node lets go of a pod only as long as its driver is there.
    await asyncio.to_thread(own_cluster.kubectl, "delete", "pod", "rival", "-n", namespace)
    await until(lambda: driver.prepared == set())
