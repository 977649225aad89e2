"""What the tests of a Jupyter server's pages share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.fixtures import jupyter_env, manager
from support.jupyter_env import JupyterEnv
from support.slice_pages import PagesServer, serving_pages

__all__ = ["jupyter_env", "manager"]


@pytest.fixture
async def pages(jupyter_env: JupyterEnv) -> AsyncIterator[PagesServer]:
    async with serving_pages(jupyter_env) as server:
        yield server
