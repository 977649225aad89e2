"""jupyter_client's own tests, started through our provisioner, with the outcomes of the stock one."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.suites import differing, outcomes, unpacked

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

FILES = ["tests/test_kernelmanager.py", "tests/test_manager.py"]
OPTIONS = ["-p", "no:asyncio"]


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = request.config.cache
    assert cache is not None
    return unpacked("jupyter_client", cache, tmp_path_factory.mktemp("suite"))


@pytest.mark.parametrize("size", ["", "1%"])
def test_whatever_passes_with_the_stock_provisioner_passes_with_ours(
    suite: Path, tmp_path: Path, size: str
) -> None:
    def stock() -> dict[str, str]:
        return outcomes(suite, FILES, tmp_path, OPTIONS, JUPYTER_DEFAULT_PROVISIONER_NAME="local-provisioner")

    def ours() -> dict[str, str]:
        return outcomes(
            suite,
            FILES,
            tmp_path,
            OPTIONS,
            JUPYTER_DEFAULT_PROVISIONER_NAME="gpu-pool",
            GPU_POOL_DEFAULT_SLICE=size,
            GPU_POOL_DEVICES="A100-SXM4-80GB:1",
            GPU_POOL_URL=f"embedded:{tmp_path}/pool/store.db",
        )

    assert differing(stock, ours, at_least=31) == []
    assert (tmp_path / "pool" / "store.db").exists() == bool(size)
