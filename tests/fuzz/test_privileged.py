"""What the program that runs as root accepts: its verbs, and never a word that leads elsewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fuzz.corpus import kept
from gpu_pool.enforcement.privileged import program
from gpu_pool.enforcement.privileged.program import SystemPaths
from support.examples import examples

_UUID, _LEASE = "GPU-01234567-89ab-cdef-0123-456789abcdef", "12-0123abcd"
_WORDS = st.one_of(
    st.sampled_from([
        "compute-mode", "cgroup-make", "cgroup-limit", "cgroup-join", "cgroup-remove", _UUID, _LEASE,
        "exclusive",
        "default", "100", "0", "1", "4194305", "2147483647", "2147483648", "9999999999", "9" * 5_000, "-1",
        "", " ", "\n", _LEASE + "\n", _UUID + "\n", "--", "-i",
        "../" + _LEASE, _LEASE + "/..", "/etc", "\0", "\u0661", "$(id)", "'; id", "GPU-" + "0" * 32, "\ud800",
        "x" * 100_000,
    ]),
    st.text(max_size=40),
)  # fmt: skip
_SMI = """#!/bin/sh
echo "$@" >> {told}
echo {uuid}
"""


@pytest.fixture
def system(tmp_path: Path) -> SystemPaths:
    """Return a folder in place of control groups, and in place of nvidia-smi what writes down its words."""
    smi, groups = tmp_path / "nvidia-smi", tmp_path / "cgroup"
    groups.mkdir()
    (groups / "cgroup.controllers").write_text("cpu dmem")
    smi.write_text(_SMI.format(told=shlex.quote(str(tmp_path / "told")), uuid=_UUID))
    smi.chmod(0o755)
    return SystemPaths(str(smi), groups)


@kept("privileged", json.loads)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.lists(_WORDS, max_size=5))
def test_it_does_what_its_verbs_say_and_nothing_else(
    system: SystemPaths, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    before = _files(system.cgroups.parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 0)  # or it would refuse all, without a look
        status = program.main(arguments, system)
    _check_answer(status, capsys.readouterr().out)
    for path in _files(system.cgroups.parent) - before:
        assert re.match(
            r"told|cgroup/(cgroup\.subtree_control|gpu-pool(/[0-9]{1,18}-[0-9a-f]{8})?(/cgroup\..*)?$)", path
        )
    told = system.cgroups.parent / "told"
    for line in told.read_text().splitlines() if told.exists() else ():
        assert re.fullmatch(r"[A-Za-z0-9 ./:,=_-]*", line)


#: Runs the program's file as root runs it, with another place for what it changes.
_AS_ROOT = """
import os, runpy, sys
from pathlib import Path
path, smi, cgroups, *arguments = sys.argv[1:]
os.geteuid = lambda: 0
program = runpy.run_path(path)
sys.exit(program["main"](arguments, program["SystemPaths"](smi, Path(cgroups))))
"""
_RAW = st.binary(max_size=40).filter(lambda word: b"\0" not in word)
_ARGUMENT = st.one_of(
    _WORDS.map(lambda text: text.encode(errors="replace")).filter(lambda word: b"\0" not in word), _RAW
)


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(
    arguments=st.one_of(
        st.lists(_ARGUMENT, max_size=5),
        st.tuples(st.just(b"cgroup-join"), st.just(_LEASE.encode()), st.integers(0).map(b"%d".__mod__)),
    ),
    uid=st.one_of(_RAW, st.integers().map(b"%d".__mod__)),
)
@example(arguments=[b"cgroup-join", _LEASE.encode(), b"2147483648"], uid=b"0")
@example(arguments=[b"cgroup-join", _LEASE.encode(), b"9" * 5_000], uid=b"1000")
@example(arguments=[b"cgroup-make", b"\xff\xfe"], uid=b"\xff")
def test_the_program_answers_every_command_line_with_one_line_and_its_status(
    system: SystemPaths, arguments: Sequence[bytes], uid: bytes
) -> None:
    (system.folder / _LEASE).mkdir(parents=True, exist_ok=True)
    where = [program.__file__, system.nvidia_smi, str(system.cgroups)]
    done = subprocess.run(
        [sys.executable, "-IS", "-c", _AS_ROOT, *where, *arguments],
        capture_output=True,
        env={b"SUDO_UID": uid},
        cwd="/",
        check=False,
    )
    assert done.stderr == b""
    _check_answer(done.returncode, done.stdout.decode("ascii"))


def _check_answer(status: int, said: str) -> None:
    (line,) = said.splitlines()
    answer: dict[str, Any] = json.loads(line)
    assert answer["ok"] is (status == 0)
    assert status in (0, 1)
    assert answer["ok"] or 0 < len(answer["error"]) < 1_000


def _files(folder: Path) -> set[str]:
    return {os.path.relpath(path, folder) for path in folder.rglob("*")}
