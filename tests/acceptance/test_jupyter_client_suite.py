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


@pytest.fixture(scope="module")
def stock_runs() -> list[dict[str, str]]:
    """What came out with the stock provisioner, run by run: all tests here share them."""
    return []


@pytest.mark.parametrize("size", ["", "1%"])
def test_whatever_passes_with_the_stock_provisioner_passes_with_ours(
    suite: Path, stock_runs: list[dict[str, str]], tmp_path: Path, size: str
) -> None:
    runs = iter(range(10))

    def stock() -> dict[str, str]:
        run = next(runs)
        if run == len(stock_runs):
            stock_runs.append(
                outcomes(
                    suite, FILES, tmp_path, OPTIONS, JUPYTER_DEFAULT_PROVISIONER_NAME="local-provisioner"
                )
            )
        return stock_runs[run]

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
