"""What the program that runs as root accepts: its verbs, and never a word that leads elsewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.corpus import kept
from gpu_pool.enforcement.privileged import program
from gpu_pool.enforcement.privileged.program import System

_UUID, _LEASE = "GPU-01234567-89ab-cdef-0123-456789abcdef", "12-0123abcd"
_WORDS = st.one_of(
    st.sampled_from([
        "compute-mode", "cgroup-make", "cgroup-limit", "cgroup-join", "cgroup-remove", _UUID, _LEASE,
        "exclusive",
        "default", "100", "0", "1", "4194305", "9999999999", "-1", "", " ", "\n", _LEASE + "\n",
        _UUID + "\n", "--", "-i",
        "../" + _LEASE, _LEASE + "/..", "/etc", "\0", "\u0661", "$(id)", "'; id", "GPU-" + "0" * 32, "\ud800",
    ]),
    st.text(max_size=40),
)  # fmt: skip
_SMI = """#!/bin/sh
echo "$@" >> {told}
echo {uuid}
"""


@pytest.fixture
def system(tmp_path: Path) -> System:
    """Return a folder in place of control groups, and in place of nvidia-smi what writes down its words."""
    smi, groups = tmp_path / "nvidia-smi", tmp_path / "cgroup"
    groups.mkdir()
    (groups / "cgroup.controllers").write_text("cpu dmem")
    smi.write_text(_SMI.format(told=shlex.quote(str(tmp_path / "told")), uuid=_UUID))
    smi.chmod(0o755)
    return System(str(smi), groups)


@kept("privileged", json.loads)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.lists(_WORDS, max_size=5))
def test_it_does_what_its_verbs_say_and_nothing_else(
    system: System, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    before = _files(system.cgroups.parent)
    status = program.main(arguments, system)
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer["ok"] is (status == 0)
    assert answer["ok"] or len(answer["error"]) < 1_000
    for path in _files(system.cgroups.parent) - before:
        assert re.match(
            r"told|cgroup/(cgroup\.subtree_control|gpu-pool(/[0-9]{1,18}-[0-9a-f]{8})?(/cgroup\..*)?$)", path
        )
    told = system.cgroups.parent / "told"
    for line in told.read_text().splitlines() if told.exists() else ():
        assert re.fullmatch(r"[A-Za-z0-9 ./:,=_-]*", line)


def _files(folder: Path) -> set[str]:
    return {os.path.relpath(path, folder) for path in folder.rglob("*")}
