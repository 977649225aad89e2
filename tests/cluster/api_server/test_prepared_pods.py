"""A kernel that begins in a prepared pod, from its click to its first reply, beside one in a pod of its own.

Over a real API server and scheduler; pods are processes of this machine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from gpu_pool_client import Holder, connect, parse_request
from support.control_plane import Cluster
from support.fixtures import jupyter_env, manager
from support.jupyter_env import JupyterEnv, Managers
from support.pod_pages import add_server, of_cluster
from support.prepared_pods import COURSE, LONG, compared, told
from support.service import ForkServer, Service, serving

__all__ = ["jupyter_env", "manager"]

#: As whom the service knows those who ask over its socket.
USER = psutil.Process().username()


@pytest.fixture
async def service(
    card: Cluster, namespace: str, children: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    """``gpu-pool serve`` for the cluster, and the pod of a notebook server of the course."""
    add_server(card, namespace, USER)
    card.kubectl("-n", namespace, "label", "pod", f"jupyter-{USER}", "jupyter-gpu-pool/course=ml")
    courses = tmp_path / "courses"
    courses.mkdir()
    (courses / "ml.yaml").write_text(COURSE)
    settings = f"""
c.KubernetesSettings.dialect = "shared"
c.PoolSettings.courses_dir = {str(courses)!r}
"""
    folder = tmp_path / "service"
    async with serving(children, folder, of_cluster(card, namespace) + settings) as service:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        yield service


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_first_kernel_begins_at_once_and_lives_as_any_other(
    jupyter_env: JupyterEnv, manager: Managers, card: Cluster, namespace: str, service: Service
) -> None:
    course = jupyter_env.install("course", course="ml", env={"OWN": "mine"})
    other = jupyter_env.install("other", env={"OWN": "mine"})
    async with connect(service.url) as pool:
        # By which the GPU is the pool's.
        held = await pool.acquire(parse_request("2%"), Holder(USER), uuid4().hex, timeout=LONG)
        took = await compared(manager, card, namespace, prepared=course, other=other, rounds=3)
        await pool.release(held.id)
    print(told(took))
