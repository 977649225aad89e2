from pathlib import Path

import pytest

from support import nvml_stub


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a complete NVML stub; give its folder."""
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))
