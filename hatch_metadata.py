"""Gives a distribution its addresses, and its README absolute links: on a package index, others lead nowhere.

The repository is the one whose workflow builds, which GitHub names in the environment; elsewhere there are no
addresses and the README stays as it is. A wheel that is built from an sdist has those of the sdist.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Addresses(MetadataHookInterface):
    """Called by hatchling for every distribution."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description to the README of this version, and the addresses that are shown beside it."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        if repository := building_repository():
            tag = f"v{metadata['version']}"
            text = absolute(text, repository, tag)
            metadata["urls"] = urls(repository, tag)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def building_repository() -> str:
    """Return the address of the repository whose workflow runs this, or nothing outside a workflow.

    https://docs.github.com/en/actions/reference/workflows-and-actions/variables
    """
    server, name = (os.environ.get(f"GITHUB_{each}", "") for each in ("SERVER_URL", "REPOSITORY"))
    return f"{server}/{name}" if server and name else ""


def urls(repository: str, tag: str) -> dict[str, str]:
    """Return the addresses by the labels that indexes know.

    https://packaging.python.org/en/latest/specifications/well-known-project-urls/
    """
    files = f"{repository}/blob/{tag}"
    return {
        "Repository": repository,
        "Documentation": f"{files}/docs/index.md",
        "Issues": f"{repository}/issues",
        "Changelog": f"{files}/CHANGELOG.md",
    }


def absolute(text: str, repository: str, tag: str) -> str:
    """Let relative pictures and links lead to the files of a tag of the repository."""
    pictures = re.sub(r'(?<=src=")(?![a-z]+:)', f"{repository}/raw/{tag}/", text)
    return re.sub(r"(?<=\]\()(?![a-z]+:|#)", f"{repository}/blob/{tag}/", pictures)
