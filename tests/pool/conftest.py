"""Stores of a test's own, and a stand-in for the driver that can suspend what uses a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import cuda_stub
from support.cuda_stub import Driver
from support.stores import pools

__all__ = ["pools"]


@pytest.fixture(scope="session")
def cuda_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a stand-in for the driver; give its folder."""
    return cuda_stub.build(tmp_path_factory.mktemp("libraries"))


@pytest.fixture
def driver(cuda_libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Install the stand-in for the driver."""
    folder = tmp_path / "driver"
    folder.mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(cuda_libraries))
    monkeypatch.setenv("DRIVER_STUB", str(folder))
    return Driver(folder)
