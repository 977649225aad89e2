"""A cluster with a real kubelet, and the images of our own Containerfile in it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.clean_environment import GIVEN_KUBECONFIG
from support.clusters import hami
from support.control_plane import Cluster
from support.images import build_notebook, name_of
from support.installation import PASSWORD, Installation
from support.kubelet import RealCluster, missing, real_cluster
from support.student import Student, Visit

if TYPE_CHECKING:
    from support.dra_driver import DraDriver

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a kubelet: ``make test-cluster`` runs it."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def notebook_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an archive of the image of notebooks and kernels."""
    if why := missing():
        pytest.skip(why)
    return build_notebook(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return a cluster whose one node shows a GPU of 32 GiB that HAMi shares.

    It is that of ``KUBECONFIG``, where there is one: a node of this machine, so that homes are folders
    here, with the images that ``GPU_POOL_TEST_IMAGE`` names.
    """
    if os.environ.get(GIVEN_KUBECONFIG):
        yield Cluster(Path(os.environ[GIVEN_KUBECONFIG]))
        return
    image: Path = request.getfixturevalue("notebook_image")
    with real_cluster(tmp_path_factory.mktemp("cluster"), [image]) as cluster:
        cluster.image = name_of("notebook")
        node = hami("node-1", count=50)
        node["status"]["allocatable"] |= {"nvidia.com/gpumem": "32768", "nvidia.com/gpucores": "100"}
        cluster.show(node)
        yield cluster


@pytest.fixture(scope="session")
def own_cluster(cluster: Cluster) -> RealCluster:
    """Return the cluster where it is the test's own, with its images and a node that it may change."""
    if not isinstance(cluster, RealCluster):
        pytest.skip("this cluster is not the test's own (KUBECONFIG)")
    return cluster


@pytest.fixture
def driver(own_cluster: RealCluster) -> Iterator[DraDriver]:
    """Run a driver on the node, which lists one GPU as NVIDIA's DRA driver does, and prepares it."""
    pytest.importorskip("grpc", reason="no grpcio, by which a kubelet asks drivers")
    from support.dra_driver import one_gpu

    with one_gpu(own_cluster, "gpu-0") as driver:
        yield driver


@pytest.fixture
def card(own_cluster: RealCluster, driver: DraDriver) -> RealCluster:
    """The cluster with that GPU on its node."""
    return own_cluster


@pytest.fixture
async def visit(installed: Installation) -> AsyncIterator[Visit]:
    """Log people in; their servers are stopped in the end."""
    people = []

    async def log_in(name: str) -> Student:
        people.append(Student(installed.url, name, PASSWORD))
        await people[-1].log_in()
        return people[-1]

    yield log_in
    for each in people:
        await each.stop_server()
