"""What a package index shows: the README, whose pictures and links lead somewhere there, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
REPOSITORY = "https://git.example/us/gpu-pool"


def described(**urls: str) -> str:
    """Return the description that is built with these addresses in pyproject.toml."""
    tomllib = pytest.importorskip("tomllib", reason="this Python cannot read pyproject.toml")
    config: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    config["project"]["urls"] = urls
    core = ProjectMetadata(str(ROOT), PluginManager(), config).core
    assert core.readme_content_type == "text/markdown"
    return core.readme


def test_without_an_address_it_is_the_readme() -> None:
    assert described() == README


def test_with_an_address_every_picture_and_link_leads_to_a_file_of_the_version() -> None:
    shown = described(Repository=f"{REPOSITORY}/")
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    for pattern, way in ((r'src="([^"]+)"', "raw"), (r"\]\(([^)#]+)(?:#[^)]*)?\)", "blob")):
        relative = [target for target in re.findall(pattern, README) if "://" not in target]
        absolute = [f"{REPOSITORY}/{way}/v{version[1]}/{target}" for target in relative]
        assert relative
        assert [target for target in re.findall(pattern, shown) if target.startswith(REPOSITORY)] == absolute
        assert all((ROOT / target).exists() for target in relative)
    assert (
        shown.replace(f"{REPOSITORY}/raw/v{version[1]}/", "").replace(f"{REPOSITORY}/blob/v{version[1]}/", "")
        == README
    )
