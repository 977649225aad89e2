"""What a package index shows: the README, whose links lead somewhere there, too, and addresses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.metadata.spec import construct_metadata_file_2_4
from hatchling.plugin.manager import PluginManager

from support.images import script

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
REPOSITORY = "https://git.example/us/gpu-pool"


def built(root: Path = ROOT) -> ProjectMetadata[Any]:
    """Return the metadata of a distribution that is built from this folder, in this environment."""
    tomllib = pytest.importorskip("tomllib", reason="this Python cannot read pyproject.toml")
    config: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return ProjectMetadata(str(root), PluginManager(), config)


@pytest.fixture
def version() -> str:
    found: str = script("build").project_version()
    return found


@pytest.fixture
def workflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name a repository as GitHub does where a workflow of it runs."""
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://git.example")
    monkeypatch.setenv("GITHUB_REPOSITORY", "us/gpu-pool")


@pytest.fixture
def no_workflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_SERVER_URL", raising=False)
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)


def test_outside_a_workflow_it_is_the_readme_without_addresses(no_workflow: None) -> None:
    core = built().core
    assert (core.readme, core.readme_content_type) == (README, "text/markdown")
    assert core.urls == {}


def test_in_a_workflow_every_picture_and_link_leads_to_a_file_of_the_version(
    workflow: None, version: str
) -> None:
    shown = built().core.readme
    for pattern, way in ((r'src="([^"]+)"', "raw"), (r"\]\(([^)#]+)(?:#[^)]*)?\)", "blob")):
        relative = [target for target in re.findall(pattern, README) if "://" not in target]
        absolute = [f"{REPOSITORY}/{way}/v{version}/{target}" for target in relative]
        assert relative
        assert [target for target in re.findall(pattern, shown) if target.startswith(REPOSITORY)] == absolute
        assert all((ROOT / target).exists() for target in relative)
    assert (
        shown.replace(f"{REPOSITORY}/raw/v{version}/", "").replace(f"{REPOSITORY}/blob/v{version}/", "")
        == README
    )


def test_in_a_workflow_it_has_the_addresses_of_its_repository(workflow: None, version: str) -> None:
    urls = built().core.urls
    assert urls["Repository"] == REPOSITORY
    assert urls["Issues"] == f"{REPOSITORY}/issues"
    files = f"{REPOSITORY}/blob/v{version}/"
    of_files = [url.removeprefix(files) for url in urls.values() if url.startswith(files)]
    assert of_files == ["docs/index.md", "CHANGELOG.md"]
    assert all((ROOT / path).exists() for path in of_files)


def test_a_wheel_that_is_built_elsewhere_has_what_its_sdist_had(
    workflow: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """conda-forge and distributions build from PyPI's sdist, in no workflow of ours."""
    published = built()
    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_metadata.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    # By the version that pyproject.toml names for sdists.
    (tmp_path / "PKG-INFO").write_text(construct_metadata_file_2_4(published))
    monkeypatch.delenv("GITHUB_REPOSITORY")
    rebuilt = built(tmp_path).core
    assert rebuilt.urls == published.core.urls
    assert rebuilt.readme.strip() == published.core.readme.strip()
