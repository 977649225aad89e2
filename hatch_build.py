"""Builds JupyterLab's extension into the wheel, where that can be done; everything else works without it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hatch_jupyter_builder.utils import npm_builder, run
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: What the extension is made of.
SOURCES = ("core", "schema", "src", "style", ".npmrc", "package-lock.json", "package.json", "tsconfig.json")
#: The oldest major version of Node.js that the tools of the lock file run on.
NODE = 18
#: If "required", a wheel without the extension is a failure. If "skip", it is not built.
CHOICE = "GPU_POOL_LABEXTENSION"
#: npm's own are meant for people who watch: it goes on trying for minutes where there is no network.
NPM = {
    "npm_config_fetch_retries": "1",
    "npm_config_fetch_retry_mintimeout": "1000",
    "npm_config_fetch_timeout": "15000",
    # What is installed is what the lock file says, which stays as it is.
    "npm_config_save": "false",
}


class LabExtension(BuildHookInterface[Any]):
    """Called by hatchling for sdists, wheels and editable wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Build it if something was changed, and say what of it belongs into the distribution."""
        folder = Path(self.root, "labextension")
        built = folder / "dist"
        if os.environ.get(CHOICE) != "skip" and is_stale(folder, built):
            with open(folder / ".npmrc", "a") as lock:
                with suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
                # Who had the lock may have built it.
                if is_stale(folder, built):
                    self.build(folder, built)
        if self.target_name == "sdist":
            build_data["artifacts"].append("/labextension/dist")
        elif (built / "package.json").exists():
            target = "share/jupyter/labextensions/jupyter-gpu-pool"
            build_data["shared_data"][str(built)] = target
            build_data["shared_data"][str(folder / "install.json")] = f"{target}/install.json"

    def build(self, folder: Path, built: Path) -> None:
        """Build it anew; only what npm cannot fetch is forgiven, and said."""
        os.environ.update(NPM)
        try:
            check_node()
            npm_builder(self.target_name, "standard", path=str(folder), build_cmd=None, npm="npm")
        except (ValueError, subprocess.CalledProcessError) as error:
            if os.environ.get(CHOICE) == "required":
                raise
            print(
                "JupyterLab's extension is left out, and everything else works without it: its build needs "
                f"Node.js with npm, and npm's registry. {error}",
                file=sys.stderr,
            )
            return
        try:
            run(["npm", "run", "build"], cwd=str(folder))
        except subprocess.CalledProcessError:
            shutil.rmtree(built, ignore_errors=True)
            raise


def check_node() -> None:
    """Raise ``ValueError`` where Node.js is missing, or too old for the compiler."""
    node = shutil.which("node")
    said = subprocess.run([node, "--version"], capture_output=True, text=True).stdout if node else ""
    major = said.strip().lstrip("v").partition(".")[0]
    if not major.isdigit() or int(major) < NODE:
        raise ValueError(f"Node.js {NODE} or newer is needed, and here is {said.strip() or 'none'}.")


def is_stale(folder: Path, built: Path) -> bool:
    """Tell whether something was changed since the extension was built (never in an sdist)."""
    made = built / "package.json"
    if not made.exists():
        return True
    roots = [folder / name for name in SOURCES]
    files = [file for root in roots for file in (root.rglob("*") if root.is_dir() else [root])]
    return max(file.stat().st_mtime for file in files) > made.stat().st_mtime
