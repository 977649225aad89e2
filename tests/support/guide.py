"""A page of the documentation as somebody follows it: what it says to type, and the files that it shows.

What cannot be as on the page is named: ``replaced`` has the texts of commands and files in whose place
others stand, such as the name of a registry.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from support.control_plane import ASSETS

DOCS = Path(__file__).parents[2] / "docs"


class Guide:
    """A page, and somebody who has this page and a kubeconfig."""

    def __init__(self, page: str, kubeconfig: Path, replaced: Mapping[str, str], docs: Path = DOCS) -> None:
        self._text = (docs / page).read_text()
        self._replaced = dict(replaced)
        self._variables = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), str(ASSETS), os.environ["PATH"]]),
            "HOME": os.environ["HOME"],
            "KUBECONFIG": str(kubeconfig),
        }

    def commands(self, heading: str) -> list[str]:
        """Return what is to be typed below a heading, command by command."""
        blocks = re.findall(r"^```console[^\n]*\n(.*?)^```", self._section(heading), re.MULTILINE | re.DOTALL)
        return [self._here(each) for block in blocks for each in re.split(r"^\$ ", block, flags=re.M)[1:]]

    def file(self, heading: str, name: str) -> str:
        """Return the file of this name that is shown below a heading."""
        pattern = rf"^```\w+\n(# {re.escape(name)}\n.*?)^```"
        found = re.search(pattern, self._section(heading), re.MULTILINE | re.DOTALL)
        assert found is not None, f"{heading}: there is no {name}"
        return self._here(found[1])

    def says(self, command: str) -> str:
        """Return a command that stands in the page's text; fail if it does not."""
        assert f"`{command}`" in self._text, f"the page does not say {command!r}"
        return command

    def follow(self, heading: str, folder: Path) -> list[str]:
        """Type everything that stands below a heading, in a folder; return what each command printed."""
        typed = self.commands(heading)
        assert typed, f"{heading}: there is no command"
        return [self.type(each, folder) for each in typed]

    def type(self, command: str, folder: Path) -> str:
        """Type a command; fail with what it says if it fails."""
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=self._variables, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2_000:]}{done.stderr[-4_000:]}"
        return done.stdout

    def _section(self, heading: str) -> str:
        """Return what stands between a heading and the next one of its level."""
        found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", self._text, re.M | re.S)
        assert found is not None, f"there is no heading {heading!r}"
        return found[1]

    def _here(self, text: str) -> str:
        for there, here in self._replaced.items():
            text = text.replace(there, here)
        return text
