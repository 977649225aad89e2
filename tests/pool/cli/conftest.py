from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.service import ForkServer
from support.terminal import Terminal


@pytest.fixture
def terminal(children: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    settings = {
        "GPU_POOL_DEVICES": "V100-SXM2-32GB:1",
        "GPU_POOL_URL": f"embedded:{tmp_path}/pool/store.db",
        "JUPYTER_DATA_DIR": f"{tmp_path}/data",
        "JUPYTER_CONFIG_DIR": f"{tmp_path}/config",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for name in ("GPU_POOL_LEASE", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    made = Terminal(children, tmp_path, dict(os.environ))
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=120)
