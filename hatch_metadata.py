"""Gives the README that package indexes show absolute addresses: there, relative ones lead nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: In pyproject.toml's [project.urls]: the repository, as on GitHub. Without it the README stays as it is.
NAME = "Repository"


class Readme(MetadataHookInterface):
    """Called by hatchling for every distribution."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description to the README as of this version."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        address = metadata.get("urls", {}).get(NAME)
        if address:
            text = absolute(text, address.rstrip("/"), f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, repository: str, tag: str) -> str:
    """Let relative pictures and links lead to the files of a tag of the repository."""
    pictures = re.sub(r'(?<=src=")(?![a-z]+:)', f"{repository}/raw/{tag}/", text)
    return re.sub(r"(?<=\]\()(?![a-z]+:|#)", f"{repository}/blob/{tag}/", pictures)
