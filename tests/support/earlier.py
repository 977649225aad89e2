"""The project as it was at an earlier commit, where the checkout has its history."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def source_of(commit: str, folder: Path) -> Path:
    """Lay the files of a commit into a new folder, and return it; skip if the checkout does not have it."""
    archive = folder.with_suffix(".tar")
    words = ["git", "archive", "--output", str(archive), commit]
    made = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"the history of this checkout has no {commit}: {made.stderr.strip()}")
    folder.mkdir()
    subprocess.run(["tar", "--extract", "--file", str(archive), "--directory", str(folder)], check=True)
    return folder
