"""Build the recipe for conda-forge and run its tests, by rattler-build. A cell of ``make matrix``.

Nothing is taken from conda-forge. In its place stands a channel made here: what the recipe requires, as PyPI
has it, and this Python. So it shows that the recipe builds and that its tests pass on its requirements, not
that conda-forge has each of them by that name.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rattler_build import Stage0Recipe, ToolConfiguration, assemble_package

ROOT = Path(__file__).parents[1]
SUBDIR = "linux-64" if platform.machine() == "x86_64" else "linux-aarch64"
SHORT = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE = Path("lib", f"python{SHORT}", "site-packages")


class Channel:
    """A channel of conda packages in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._packages: dict[str, dict[str, Any]] = {}
        for subdir in (SUBDIR, "noarch"):
            (folder / subdir).mkdir(parents=True)
            self._write_index(subdir, {})

    def put(self, name: str, version: str, files: Path, depends: list[str]) -> None:
        """Make a package of the files in a folder."""
        made = assemble_package(
            name, version, SUBDIR, "0", self.folder / SUBDIR, files_dir=files, depends=depends
        )
        content = Path(made.path).read_bytes()
        self._packages[Path(made.path).name] = {
            "name": name,
            "version": version,
            "build": "0",
            "build_number": 0,
            "subdir": SUBDIR,
            "depends": depends,
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        self._write_index(SUBDIR, self._packages)

    def _write_index(self, subdir: str, packages: dict[str, dict[str, Any]]) -> None:
        index = {"info": {"subdir": subdir}, "packages": {}, "packages.conda": packages}
        (self.folder / subdir / "repodata.json").write_text(json.dumps({**index, "repodata_version": 1}))


def put_python(channel: Channel, folder: Path) -> None:
    """Put this Python into a channel: a link to it beside the file that makes an environment of a folder."""
    real = Path(sys.executable).resolve()
    (folder / "bin").mkdir(parents=True)
    for name in ("python", "python3", f"python{SHORT}"):
        (folder / "bin" / name).symlink_to(real)
    (folder / "pyvenv.cfg").write_text(f"home = {real.parent}\ninclude-system-site-packages = false\n")
    channel.put("python", platform.python_version(), folder, [])


def put_distribution(channel: Channel, found: Distribution, folder: Path, names: dict[str, str]) -> None:
    """Put what PyPI has into a channel, by the name that the recipe has for it."""
    for file in found.files or ():
        source = Path(str(found.locate_file(file)))
        if ".." not in file.parts and "__pycache__" not in file.parts and source.is_file():
            (folder / SITE / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / SITE / file)
    name = canonicalize_name(found.metadata["Name"])
    channel.put(names.get(name, name), found.version, folder, ["python", *_depends(found, names)])


def _depends(found: Distribution, names: dict[str, str]) -> Iterator[str]:
    for requirement in map(Requirement, found.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            name = canonicalize_name(requirement.name)
            yield f"{names.get(name, name)} {requirement.specifier or '*'}"


def build(folder: Path) -> None:
    """Build the recipe on what this checkout's sdist holds, and run its tests."""
    recipe = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())
    required = [text for part in ("host", "run") for text in recipe["requirements"][part]]
    required = [text for text in required if not re.match(r"python\b", text)]
    names: dict[str, str] = {canonicalize_name(text.split()[0]): text.split()[0] for text in required}
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    pip = (str(folder / "env/bin/python"), "-m", "pip", "install", "--quiet")
    subprocess.run([*pip, *(text.replace(" ", "") for text in required)], check=True)
    channel = Channel(folder / "channel")
    put_python(channel, folder / "python")
    for found in distributions(path=[str(folder / "env" / SITE)]):
        put_distribution(channel, found, folder / "files" / found.metadata["Name"], names)
    subprocess.run([sys.executable, "-m", "build", "--sdist", "--outdir", folder, ROOT], check=True)
    (sdist,) = folder.glob("*.tar.gz")
    # What is on PyPI is not this version yet.
    recipe["source"] = {"path": str(sdist)}
    recipe["context"]["python_min"] = SHORT
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    for result in Stage0Recipe.from_file(folder / "recipe.yaml").run_build(
        tool_config=ToolConfiguration(test_strategy="native", use_sharded=False),
        output_dir=folder / "out",
        channels=[channel.folder.as_uri()],
    ):
        print(f"Built and tested: {', '.join(str(package) for package in result.packages)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        build(Path(name).resolve())
