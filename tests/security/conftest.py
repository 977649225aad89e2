"""Services that everybody on the machine may ask."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gpu_pool_client import Pool, connect
from support.service import Nursery, Service, children, serving

__all__ = ["children"]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Give a folder that other users can come through, unlike those of pytest."""
    made = Path(tempfile.mkdtemp(prefix="gpu-pool-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
async def service(children: Nursery, open_folder: Path) -> AsyncIterator[Service]:
    """Serve every user of the machine."""
    async with serving(children, open_folder / "pool", "", "--mode=0666") as service:
        yield service


@pytest.fixture
async def pool(service: Service) -> AsyncIterator[Pool]:
    """Connect as an administrator: whoever runs the service."""
    async with connect(service.url) as pool:
        yield pool
