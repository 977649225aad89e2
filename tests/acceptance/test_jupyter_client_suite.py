"""jupyter_client's own tests, started through our provisioner, with the outcomes of the stock one."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

FILES = ["tests/test_kernelmanager.py", "tests/test_manager.py"]


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the source distribution of the installed jupyter_client: wheels hold no tests."""
    wanted = f"jupyter_client=={version('jupyter_client')}"
    cache = request.config.cache.mkdir("jupyter_client-sdist")  # type: ignore[union-attr]
    name = wanted.replace("==", "-")
    if not (cache / f"{name}.tar.gz").exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
        command += ["--no-binary", ":all:", "--dest", str(cache), wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"the source of {wanted} cannot be downloaded: {done.stderr[-200:]}")
    folder = tmp_path_factory.mktemp("suite")
    with tarfile.open(cache / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@pytest.fixture(scope="module")
def stock(suite: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return outcomes(
        suite, tmp_path_factory.mktemp("stock"), JUPYTER_DEFAULT_PROVISIONER_NAME="local-provisioner"
    )


def outcomes(suite: Path, folder: Path, **variables: str) -> dict[str, str]:
    """Run the suite; return each test's outcome (passed, failure, error or skipped) by its id."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:asyncio", "-q", f"--junitxml={report}", *FILES]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("GPU_POOL_")}
    subprocess.run(command, cwd=suite, env={**environment, **variables}, capture_output=True, check=False)
    cases = ElementTree.parse(report).iter("testcase")
    return {
        f"{case.get('classname')}::{case.get('name')}": next(
            (part.tag for part in case if part.tag in FAILED), "passed"
        )
        for case in cases
    }


FAILED = {"failure", "error", "skipped"}


@pytest.mark.parametrize("size", ["", "1%"])
def test_whatever_passes_with_the_stock_provisioner_passes_with_ours(
    suite: Path, stock: dict[str, str], tmp_path: Path, size: str
) -> None:
    assert list(stock.values()).count("passed") > 30
    ours = outcomes(
        suite,
        tmp_path,
        JUPYTER_DEFAULT_PROVISIONER_NAME="gpu-pool",
        GPU_POOL_DEFAULT_SLICE=size,
        GPU_POOL_DEVICES="A100-SXM4-80GB:1",
        GPU_POOL_URL=f"embedded:{tmp_path}/pool/store.db",
    )
    assert ours == stock
    assert (tmp_path / "pool" / "store.db").exists() == bool(size)
