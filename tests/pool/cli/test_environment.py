"""The environment of a command: the slice's variables, and caps for the frameworks it would use."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from gpu_pool.cli.running import environment_for, python_of
from gpu_pool_client import Device, Holder, Lease, LeaseState, Slice, parse_request

HELD = Lease(
    "id",
    "key",
    parse_request("2%"),
    Holder("ann"),
    LeaseState.HELD,
    90.0,
    100.0,
    slices=(Slice(Device("GPU-1", 0, "V100", 32_768), 20, 655),),
)


def script(folder: Path, first_line: str) -> str:
    path = folder / "script"
    path.write_text(f"{first_line}\nexit\n")
    path.chmod(0o700)
    return str(path)


def test_a_python_is_its_own_python():
    assert python_of(sys.executable) == sys.executable


def test_a_script_written_for_a_python_runs_with_that(tmp_path):
    assert python_of(script(tmp_path, "#!/opt/env/bin/python3.12 -I")) == "/opt/env/bin/python3.12"


@pytest.mark.parametrize("first_line", ["#!/usr/bin/env python3", "#!/bin/sh", ""])
def test_other_programs_find_their_python_on_the_path(tmp_path, first_line):
    assert shutil.which(python_of(script(tmp_path, first_line)))


def test_caps_suit_the_frameworks_that_are_installed_and_are_told(tmp_path, monkeypatch):
    (tmp_path / "cupy_cuda12x-13.3.0.dist-info").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUPY_GPU_MEMORY_LIMIT", raising=False)
    found = environment_for(HELD, sys.executable)
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert 0 < int(found["CUPY_GPU_MEMORY_LIMIT"]) < 655 * 2**20
    assert "cooperative (framework caps: cupy)" in found["GPU_POOL_ENFORCED"]
