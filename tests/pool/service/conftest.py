from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.fixtures import jupyter_env, manager
from support.hub import Hub, HubService, serving_hub
from support.jupyter_env import JupyterEnv
from support.service import ForkServer, Service, open_folder, pool, service
from support.users import Users

__all__ = ["jupyter_env", "manager", "open_folder", "pool", "service"]


@pytest.fixture
def folder(open_folder: Path) -> Path:
    return open_folder


@pytest.fixture
def served(service: Service, jupyter_env: JupyterEnv, monkeypatch: pytest.MonkeyPatch) -> JupyterEnv:
    """A Jupyter environment whose kernels ask the service."""
    monkeypatch.setenv("GPU_POOL_URL", service.url)
    monkeypatch.delenv("GPU_POOL_DEVICES")
    jupyter_env.url = service.url
    return jupyter_env


@pytest.fixture
def users(service: Service) -> Iterator[Users]:
    if os.geteuid() != 0:
        pytest.skip("only root can be other users")
    users = Users(service)
    yield users
    users.close()


@pytest.fixture
async def behind_hub(children: ForkServer, hub: Hub, folder: Path) -> AsyncIterator[HubService]:
    """Serve the Hub's users, and every user of the machine."""
    async with serving_hub(children, hub, folder / "pool", "", "--mode=0666") as service:
        yield service


@pytest.fixture
def users_behind(behind_hub: HubService) -> Iterator[Users]:
    if os.geteuid() != 0:
        pytest.skip("only root can be other users")
    users = Users(behind_hub.service)
    yield users
    users.close()
