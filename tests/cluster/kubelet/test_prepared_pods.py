"""A kernel that begins in a prepared pod on a real kubelet, beside one in a pod of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import psutil
import pytest

from gpu_pool_client import Holder, connect, parse_request
from support.fixtures import jupyter_env, manager
from support.jupyter_env import JupyterEnv, Managers
from support.kernel_pods import server_with_home
from support.kubelet import PAUSE, RealCluster
from support.prepared_pods import COURSE, LONG, compared, told
from support.service import ForkServer, serving

if TYPE_CHECKING:
    from support.dra_driver import DraDriver

__all__ = ["jupyter_env", "manager"]

#: As whom the service knows those who ask over its socket.
USER = psutil.Process().username()


@pytest.fixture
def home(own_cluster: RealCluster, namespace: str) -> Iterator[None]:
    """Start the pod of a notebook server of the course, whose home everybody may write."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-pool-test-"))
    folder.chmod(0o777)
    *its_home, server = server_with_home(USER, namespace, folder, own_cluster.image)
    server["metadata"]["labels"] = {"jupyter-gpu-pool/course": "ml"}
    own_cluster.apply(*its_home, server, namespace=namespace)
    yield
    shutil.rmtree(folder)


async def test_a_kernel_in_a_prepared_pod_has_begun_before_another_pod_is_there(
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
    courses = tmp_path / "courses"
    courses.mkdir()
    (courses / "ml.yaml").write_text(COURSE)
    settings = f"""
c.ServeApp.kubernetes = True
c.KubernetesSettings.kubeconfig = {str(own_cluster.kubeconfig)!r}
c.KubernetesSettings.namespace = {namespace!r}
c.KubernetesSettings.dialect = "shared"
c.KubernetesSettings.placeholder_image = {PAUSE!r}
c.PoolSettings.courses_dir = {str(courses)!r}
"""
    course = jupyter_env.install("course", course="ml", env={"OWN": "mine"})
    other = jupyter_env.install("other", env={"OWN": "mine"})
    async with serving(children, tmp_path / "service", settings) as service:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        async with connect(service.url) as pool:
            # By which the GPU is the pool's.
            held = await pool.acquire(parse_request("2%"), Holder(USER), uuid4().hex, timeout=LONG)
            took = await compared(manager, own_cluster, namespace, prepared=course, other=other, rounds=5)
            await pool.release(held.id)
    print(told(took))
