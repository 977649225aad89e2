"""The reference pages name everything that there is to set, to read and to meet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from traitlets.config import Configurable

import gpu_pool_client
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.service.settings import ServeSettings
from gpu_pool.settings import PoolSettings
from gpu_pool.slurm.settings import SlurmSettings
from gpu_pool_client import EndReason, GpuPoolError
from gpu_pool_provisioner.server.settings import GPUPoolServer
from gpu_pool_provisioner.settings import SliceSettings

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
PACKAGES = ("kernels", "pool", "pool_client", "provisioner", "spawner")


@pytest.mark.parametrize(
    "configurable", [PoolSettings, KubernetesSettings, SlurmSettings, SliceSettings, GPUPoolServer]
)
def test_every_setting_is_described(configurable: type[Configurable]) -> None:
    inherited = configurable.__mro__[1].class_traits(config=True)  # type: ignore[attr-defined]
    page = (REFERENCE / "settings.md").read_text()
    for name in configurable.class_traits(config=True).keys() - inherited.keys():
        assert f"| `{name}` |" in page


def test_every_setting_of_the_service_is_described() -> None:
    pages = (ROOT / "docs" / "administrator" / name for name in ("service.md", "hub-service.md"))
    text = "".join(page.read_text() for page in pages)
    assert [name for name in ServeSettings.class_own_traits(config=True) if f"| `{name}` |" not in text] == []


def test_every_variable_is_described() -> None:
    page = (REFERENCE / "environment.md").read_text()
    sources = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    used = {name for path in sources for name in re.findall(r"\bGPU_POOL_[A-Z_]+\b", path.read_text())}
    assert sorted(name for name in used if name not in page) == []


def test_every_error_is_described_with_its_code_and_its_exit_code() -> None:
    page = (REFERENCE / "errors.md").read_text()
    public = [getattr(gpu_pool_client, name) for name in gpu_pool_client.__all__]
    errors = [each for each in public if isinstance(each, type) and GpuPoolError in each.__mro__[1:]]
    assert len(errors) == 7
    for error in errors:
        row = rf"^\| `{error.__name__}` \| `{error.code}` \| .*\| {error.exit_code} \|$"
        assert re.search(row, page, re.MULTILINE), error
    assert f"whose code is `{GpuPoolError.code}`" in page


def test_no_row_of_a_table_is_cut_off_from_it() -> None:
    """A line above a row that is no row ends the table: what follows is shown with its bars."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    assert [f"{page.relative_to(ROOT)}: {row}" for page in pages for row in _cut_off(page)] == []


def _cut_off(page: Path) -> Iterator[str]:
    """Yield the rows that begin a table and are no heading, which has a line of dashes below it."""
    lines = ["", *page.read_text().splitlines(), ""]
    for above, row, below in zip(lines, lines[1:], lines[2:], strict=False):
        if row.startswith("|") and not above.startswith("|") and not re.fullmatch(r"\|[-:| ]+\|", below):
            yield row


@pytest.mark.parametrize("name", ["service.md", "tljh.md"])
def test_the_unit_for_systemd_leaves_what_kernels_use_when_the_service_stops(name: str) -> None:
    page = (ROOT / "docs" / "administrator" / name).read_text()
    unit = page.partition("\n[Service]\n")[2].partition("```")[0].splitlines()
    assert {"RuntimeDirectoryPreserve=yes", "KillMode=process"} <= set(unit)


def test_no_student_can_take_the_port_of_the_service() -> None:
    page = (ROOT / "docs" / "administrator" / "tljh.md").read_text()
    port = page.partition('c.ServeApp.bind = "127.0.0.1:')[2].partition('"')[0]
    assert int(port) < 1024
    assert f'"url": "http://127.0.0.1:{port}"' in page


def test_every_way_to_end_is_described() -> None:
    page = (REFERENCE / "errors.md").read_text()
    assert [reason.value for reason in EndReason if f"| `{reason.value}` |" not in page] == []


def test_links_between_the_pages_at_the_root_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)|src=\"([^\":]+)\"", (ROOT / page).read_text()):
            assert (ROOT / "".join(target)).exists(), f"{page}: {target}"


def test_every_name_on_the_page_of_the_architecture_is_in_the_sources() -> None:
    page = (ROOT / "docs" / "developer" / "architecture.md").read_text()
    sources = "\n".join(path.read_text() for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    named = {name for text in re.findall(r"`([A-Za-z_.]+)`", page) for name in text.split(".")}
    defined = set(re.findall(r"\w+", sources))
    assert len(named) > 50
    assert sorted(named - defined) == []
