"""Versions of this project before this one, from the history of the checkout, for processes of their own."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kernels", "pool", "pool_client", "provisioner", "spawner")


def old_version(commit: str, folder: Path) -> dict[str, str]:
    """Unpack the version of a commit into a folder; return the variables with which Python finds it first.

    It has the dependencies of this environment, and its own entry points. The
    test is skipped where the commit is missing, as in a clone without history.
    """
    tomllib = pytest.importorskip("tomllib", reason="this Python cannot read pyproject.toml")
    packed = subprocess.run(
        ["git", "-c", "safe.directory=*", "archive", commit, "pyproject.toml", *PACKAGES],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if packed.returncode:
        pytest.skip(f"this checkout does not have the history back to commit {commit}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    about = folder / "kernels" / "jupyter_gpu_pool-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: jupyter-gpu-pool\nVersion: 0.1.0\n")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [line for group, points in groups.items() for line in (f"[{group}]", *_lines(points))]
    (about / "entry_points.txt").write_text("\n".join(lines))
    return {"PYTHONPATH": os.pathsep.join(str(folder / package) for package in PACKAGES)}


def _lines(points: dict[str, str]) -> list[str]:
    return [f"{name} = {target}" for name, target in points.items()]
