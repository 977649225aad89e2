"""A Slurm cluster on this machine, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.slurm import Slurm, missing, slurm_cluster

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs Slurm: ``make test-slurm`` runs it."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if why := missing():
        pytest.skip(why)
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def slurm(cluster: Slurm) -> Iterator[Slurm]:
    """Return the cluster, with nothing in its queue before the test and after it."""
    cluster.cancel_all()
    yield cluster
    cluster.cancel_all()
