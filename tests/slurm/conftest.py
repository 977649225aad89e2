"""A Slurm cluster on this machine, for all tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.jupyter_env import JupyterEnv
from support.slurm import Slurm, missing, slurm_cluster
from support.slurm_accounting import accounted_slurm_cluster, accounting_missing
from support.slurm_login import Login

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


@pytest.fixture
async def login(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Login]:
    url = f"slurm:{tmp_path}/slurm.db"
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])
    monkeypatch.setenv("GPU_POOL_URL", url)
    monkeypatch.setenv("JUPYTER_PATH", f"{tmp_path}/data")
    monkeypatch.setenv("JUPYTER_DATA_DIR", f"{tmp_path}/data")
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", f"{tmp_path}/config")
    (tmp_path / "config").mkdir()
    login = Login(slurm, JupyterEnv(tmp_path, url), [])
    login.configure()
    yield login
    await login.close()


@pytest.fixture(scope="session")
def accounted_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if why := missing() or accounting_missing():
        pytest.skip(why)
    with accounted_slurm_cluster(tmp_path_factory.mktemp("accounted")) as found:
        yield found


@pytest.fixture
def accounted(accounted_cluster: Slurm) -> Iterator[Slurm]:
    """Return a cluster that keeps accounts, with nothing in its queue before the test and after it."""
    accounted_cluster.cancel_all()
    yield accounted_cluster
    accounted_cluster.cancel_all()
