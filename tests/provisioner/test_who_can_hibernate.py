"""Where kernels can sleep on disk, and what their administrator reads where they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_pool_provisioner.hibernation import kept


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(kept, "_may_administer", lambda: True)


def criu(folder: Path, version: str, check: str = "exit 0") -> str:
    """Write a CRIU that says so of itself, and of this machine."""
    program = folder / "criu"
    program.write_text(f"#!/bin/sh\n[ $1 = check ] && {{ {check}; }}\necho Version: {version}\n")
    program.chmod(0o755)
    return str(program)


def test_nobody_but_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "could become root by it" in kept.why_not(criu(tmp_path, "4.2"))


@pytest.mark.usefixtures("as_root")
def test_without_criu_it_is_said_what_to_install() -> None:
    assert "there is no criu-of-nobody: install CRIU 4.1 or newer" in kept.why_not("criu-of-nobody")


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize(("version", "why"), [("3.17.1", "is 3.17, and 4.1 or newer"), ("?", "does not say")])
def test_with_an_old_criu_it_is_said_which_is_needed(tmp_path: Path, version: str, why: str) -> None:
    assert why in kept.why_not(criu(tmp_path, version))


@pytest.mark.usefixtures("as_root")
def test_what_criu_misses_of_this_machine_is_said_in_its_words(tmp_path: Path) -> None:
    check = "echo 'Error (criu/x.c:1): No seccomp.' >&2; exit 1"
    assert kept.why_not(criu(tmp_path, "4.2", check)).endswith("this machine cannot: No seccomp.")


@pytest.mark.usefixtures("as_root")
def test_a_system_without_pid_namespaces_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "limit"
    limit.write_text("0\n")
    monkeypatch.setattr(kept, "_NAMESPACES", limit)
    assert "set user.max_pid_namespaces" in kept.why_not(criu(tmp_path, "4.2"))


@pytest.mark.usefixtures("as_root")
def test_with_all_that_kernels_can(tmp_path: Path) -> None:
    assert kept.why_not(criu(tmp_path, "4.1")) == ""


def test_who_does_not_use_it_loads_nothing_of_it() -> None:
    code = (
        "import sys, gpu_pool_provisioner.provisioner\n"
        "print([each for each in sys.modules if each.startswith('gpu_pool_provisioner.hibernation')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
