"""A service that would not see other users' processes does not start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_pool.service.health import hides_processes

PROC = "proc /proc proc rw,nosuid{} 0 0\n"


@pytest.mark.parametrize(
    ("mounts", "hidden"),
    [
        (PROC.format(""), False),
        (PROC.format(",hidepid=0"), False),
        (PROC.format(",hidepid=off"), False),
        (PROC.format(",hidepid=1"), True),
        (PROC.format(",hidepid=invisible"), True),
        (PROC.format(",hidepid=ptraceable"), True),
        (PROC.format(",hidepid=2,gid=7"), False),
        (PROC.format(",hidepid=2,gid=8"), True),
        (PROC.format(",hidepid=2") + PROC.format(""), False),
        ("proc /other proc rw,hidepid=2 0 0\n", False),
        # What others have mounted, whatever they have called it, and what is no mount at all.
        ("fuse /tmp/a\rb fuse rw 0 0\n" + PROC.format(",hidepid=2"), True),
        ("fuse /tmp/a\rproc /proc proc rw,hidepid=2 fuse rw 0 0\n" + PROC.format(""), False),
        ("nonsense\n\n \n" + PROC.format(",hidepid=2,gid=x,=,hidepid=2"), True),
    ],
)
def test_the_mount_says_whether_processes_are_hidden(mounts: str, hidden: bool) -> None:
    assert hides_processes(mounts.encode(), 1000, {7}) is hidden
    assert not hides_processes(mounts.encode(), 0, {0})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system here")
def test_a_mount_with_any_name_does_not_keep_a_service_from_starting(tmp_path: Path) -> None:
    code = "from gpu_pool.service.health import check_processes_are_seen; check_processes_are_seen()"
    folder = tmp_path / "a\rb c\\d\x85"
    folder.mkdir()
    command = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$1" && exec "$2" -c "$3"', "sh"]
    done = subprocess.run([*command, folder, sys.executable, code], capture_output=True, check=False)
    if b"mount:" in done.stderr or b"unshare:" in done.stderr:
        pytest.skip("nothing can be mounted here")
    assert (done.stderr, done.returncode) == (b"", 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount /proc anew")
def test_a_service_that_sees_too_little_refuses_to_start() -> None:
    code = """
import os
from gpu_pool.service.health import check_processes_are_seen
check_processes_are_seen()
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
check_processes_are_seen()
"""
    script = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "NotAllowed: /proc is mounted with hidepid here" in done.stderr
    assert 'File "<string>", line 8' in done.stderr, "root sees all"
