"""A cluster for the tests: that of ``KUBECONFIG``, or a fresh one, see ``support.api_server``."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support import api_server as server
from support.agent_reports import add_agent
from support.api_server import ApiServer
from support.clean_environment import GIVEN_KUBECONFIG
from support.clusters import listed, node, resource_slice
from support.control_plane import (
    ASSETS,
    Cluster,
    missing_programs,
    scheduling_and_controlling,
    write_kubeconfig,
)
from support.jupyter_env import JupyterEnv
from support.node_agent import NodeAgent
from support.parked_pods import Students, students_of
from support.pod_pages import add_server
from support.service import ForkServer
from support.whole_devices import DEVICE_CLASS, WHOLE_NODE

__all__ = ["ApiServer"]

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one process have all of these tests: each that had some would start a control plane of its own."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("api_server"))


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Return a fresh, empty API server; skip if there is none to start."""
    if missing := server.missing_programs():
        pytest.skip(f"no {' and no '.join(missing)} in {ASSETS} (KUBEBUILDER_ASSETS names another folder)")
    with server.api_serving(tmp_path_factory.mktemp("kubernetes")) as serving:
        yield serving


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return how to reach a cluster with scheduler and controllers: ``KUBECONFIG``, or a fresh one."""
    if os.environ.get(GIVEN_KUBECONFIG):
        yield Path(os.environ[GIVEN_KUBECONFIG])
        return
    if missing := missing_programs():
        pytest.skip(f"no {' and no '.join(missing)} in {ASSETS} (KUBEBUILDER_ASSETS names another folder)")
    serving: ApiServer = request.getfixturevalue("api_server")
    path = tmp_path_factory.mktemp("control-plane") / "kubeconfig"
    write_kubeconfig(path, serving.url, serving.token, serving.certificate)
    with scheduling_and_controlling(path):
        yield path


@pytest.fixture(scope="module")
def cluster(kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return a cluster without nodes yet. Those that a module adds, and their pods, go with it."""
    if os.environ.get(GIVEN_KUBECONFIG):
        yield Cluster(kubeconfig)
        return
    with NodeAgent(kubeconfig, tmp_path_factory.mktemp("nodes")) as agent:
        yield Cluster(kubeconfig, agent)


@pytest.fixture(scope="module")
def card(cluster: Cluster) -> Iterator[Cluster]:
    """A node with one GPU, listed as NVIDIA's DRA driver does."""
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    cluster.add(node(WHOLE_NODE))
    about = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
    listing = resource_slice(listed("gpu-0"), name=WHOLE_NODE)
    cluster.apply(DEVICE_CLASS, {**about, **listing})
    yield cluster
    cluster.kubectl("delete", f"resourceslice/{listing['metadata']['name']}", "deviceclass/gpu.nvidia.com")


@pytest.fixture
def settings_of_pool() -> str:
    """Further settings of the pool of the ``students``."""
    return ""


@pytest.fixture
async def students(
    jupyter_env: JupyterEnv,
    card: Cluster,
    namespace: str,
    cluster_children: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings_of_pool: str,
) -> AsyncIterator[Students]:
    for user in ("ada", "bob"):
        add_server(card, namespace, user)
    token = add_agent(card, namespace, WHOLE_NODE)
    async with students_of(
        card, namespace, token, cluster_children, tmp_path, monkeypatch, settings_of_pool
    ) as students:
        yield students
