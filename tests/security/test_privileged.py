"""The program that runs as root moves processes of its caller, and no others, whatever they are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_pool.enforcement.privileged.program import PrivilegedRefused, SystemPaths, perform
from support.disguises import ENDS_OF_LINES, OTHER, STUDENT, disguised, needs_root
from support.many_files import many_files

pytestmark = needs_root
LEASE = "12-0123abcd"


@pytest.fixture
def system(tmp_path: Path) -> SystemPaths:
    """Give a machine whose control groups are plain folders, with that of a lease."""
    group = tmp_path / "gpu-pool" / LEASE
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text("")
    return SystemPaths("/bin/false", tmp_path)


def test_a_process_is_moved_also_where_many_files_are_open(system: SystemPaths) -> None:
    with many_files(), disguised(b"a", STUDENT) as process:
        perform(["cgroup-join", LEASE, f"{process.pid}"], system, STUDENT)
    assert (system.folder / LEASE / "cgroup.procs").read_text() == f"{process.pid}"


@pytest.mark.parametrize("end", ENDS_OF_LINES, ids=repr)
def test_a_process_that_calls_itself_the_callers_is_not_moved(system: SystemPaths, end: bytes) -> None:
    # The caller is OTHER, and the process is the student's.
    with disguised(b"a" + end + b"Uid:\t%d" % OTHER, STUDENT) as process:
        with pytest.raises(PrivilegedRefused, match=f"not one of user {OTHER}'s"):
            perform(["cgroup-join", LEASE, f"{process.pid}"], system, OTHER)
        assert (system.folder / LEASE / "cgroup.procs").read_text() == ""
        perform(["cgroup-join", LEASE, f"{process.pid}"], system, STUDENT)
        assert (system.folder / LEASE / "cgroup.procs").read_text() == f"{process.pid}"
