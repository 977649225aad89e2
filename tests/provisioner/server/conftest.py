"""What the tests of a Jupyter server's pages share."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable

import pytest

from support.fixtures import jupyter_env
from support.jupyter_env import JupyterEnv
from support.slice_pages import PagesServer, serving_pages

__all__ = ["jupyter_env"]


@pytest.fixture
async def pages(jupyter_env: JupyterEnv) -> AsyncIterator[PagesServer]:
    async with serving_pages(jupyter_env) as server:
        yield server


@pytest.fixture
def course(jupyter_env: JupyterEnv) -> Callable[..., None]:
    """Set the terms of those who name no course, before a server is started or a pool asked."""

    def set_terms(**terms: object) -> None:
        folder = jupyter_env.folder / "config"
        folder.mkdir()
        content = {"PoolSettings": {"default_course": terms}}
        (folder / "gpu_pool_config.json").write_text(json.dumps(content))

    return set_terms
