"""Test suites of others, from their source distributions: wheels hold no tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

FAILED = {"failure", "error", "skipped"}


def unpacked(project: str, cache: pytest.Cache, folder: Path) -> Path:
    """Return the source distribution of the installed version, or skip the test."""
    wanted = f"{project}=={version(project)}"
    downloads = cache.mkdir(f"{project}-sdist")
    name = wanted.replace("==", "-")
    if not (downloads / f"{name}.tar.gz").exists():
        options = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(downloads)]
        done = pip("download", *options, wanted)
        if done.returncode:
            pytest.skip(f"the source of {wanted} cannot be downloaded: {done.stderr[-200:]}")
    with tarfile.open(downloads / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def required(requirements: Sequence[str], cache: pytest.Cache) -> Path:
    """Return a folder with what a suite imports beside what is installed, or skip the test."""
    folder = cache.mkdir("suites-need") / "-".join(sorted(requirements))
    if not (folder / "installed").exists():
        done = pip("install", "--no-deps", "--upgrade", "--target", str(folder), *requirements)
        if done.returncode:
            pytest.skip(f"{', '.join(requirements)} cannot be installed: {done.stderr[-200:]}")
        (folder / "installed").touch()
    return folder


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def outcomes(
    suite: Path, files: Sequence[str], folder: Path, options: Sequence[str] = (), **variables: str
) -> dict[str, str]:
    """Run a suite; return each test's outcome (passed, failure, error or skipped) by its id."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *options, *files]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("GPU_POOL_")}
    done = subprocess.run(
        command, cwd=suite, env={**environment, **variables}, capture_output=True, text=True, check=False
    )
    (folder / "output").write_text(done.stdout + done.stderr)
    cases = ElementTree.parse(report).iter("testcase")
    return {
        f"{case.get('classname')}::{case.get('name')}": next(
            (part.tag for part in case if part.tag in FAILED), "passed"
        )
        for case in cases
    }


def differing(
    stock: Callable[[], dict[str, str]], ours: Callable[[], dict[str, str]], at_least: int
) -> list[str]:
    """Run a suite both ways; return the tests that come out otherwise with ours.

    Where there are any, or where fewer than ``at_least`` pass as they are, it is done once more, and
    those are returned that differ both times: some tests of others watch the clock, and fail by chance
    on a machine that is busy with more tests.
    """
    passed: set[str] = set()
    names: set[str] | None = None
    for _ in range(2):
        expected, found = stock(), ours()
        passed |= {name for name, outcome in expected.items() if outcome == "passed"}
        differ = {name for name in {*expected, *found} if expected.get(name) != found.get(name)}
        names = differ if names is None else names & differ
        if not names and len(passed) >= at_least:
            break
    never = {name: outcome for name, outcome in expected.items() if name not in passed}
    assert len(passed) >= at_least, f"only {len(passed)} of {at_least} pass as they are, and not {never}"
    return [f"{name}: stock {expected.get(name)}, ours {found.get(name)}" for name in sorted(names or ())]
