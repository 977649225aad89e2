import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpu_pool_client import Device
from support import mps_stub, nvml_stub
from support.checkpoints import MakeCheckpoint, checkpoints
from support.cuda_stub import Driver
from support.watchdog import WatchedPool, watched_pool


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[mps_stub.Stub]:
    """Install the stand-ins for NVIDIA's tools; whatever still runs in the end is ended."""
    with mps_stub.installed(tmp_path / "bin", monkeypatch) as stub:
        yield stub


@pytest.fixture
def runtime() -> Iterator[Path]:
    """Give a folder with a short name, since sockets are made in it."""
    folder = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a complete NVML stub; give its folder."""
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
async def there(tmp_path: Path, nvml: Path) -> AsyncIterator[WatchedPool]:
    """Watch a pool of one V100."""
    async with watched_pool(tmp_path, nvml, Device("GPU-0", 0, "Tesla V100-SXM2-32GB", 32768)) as made:
        yield made


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[MakeCheckpoint]:
    """Make what suspends processes of one pool."""
    with checkpoints(tmp_path) as make:
        yield make


@pytest.fixture
def pids(driver: Driver) -> Iterator[list[int]]:
    """Run two processes that have device memory."""
    with ExitStack() as running:
        yield [running.enter_context(driver.process()) for _ in range(2)]
