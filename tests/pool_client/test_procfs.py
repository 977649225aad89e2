"""``/proc`` is read as the kernel writes it, whatever a process has written into its name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from gpu_pool_client import _procfs as procfs
from gpu_pool_client._processes import family, lineage
from support.pools import eventually, identity, running

STATUS = b"Name:\ta%sUid:\t0\nUmask:\t0022\nPid:\t7\nNSpid:\t7\t1\nUid:\t1000\t1001\t1002\t1003\nGroups:\t\n"


@pytest.mark.parametrize("end", [b"\r", b"\x0b", b"\x0c", b"\x1c", b"\x1e", b"\x85", b"\xc2\x85", b"\\n"])
def test_only_a_newline_ends_a_line(end: bytes) -> None:
    assert procfs.words_of(STATUS % end, b"Uid") == [b"1000", b"1001", b"1002", b"1003"]
    assert procfs.words_of(STATUS % end, b"NSpid") == [b"7", b"1"]
    assert procfs.words_of(STATUS % end, b"Groups") == []
    assert procfs.words_of(STATUS % end, b"Absent") == []


@pytest.mark.parametrize("name", [b"a", b"", b") R 1 1 1 1 1", b"((", b"a\nb) Z 1", b"\r) S 1 (x"])
def test_the_name_in_a_stat_may_hold_anything(name: bytes) -> None:
    rest = " ".join(str(number) for number in range(4, 53))
    found = procfs.parse_stat(b"12 (" + name + b") S " + rest.encode() + b"\n")
    assert (found.state, found.parent, found.threads, found.start) == (b"S", 4, 20, 22)
    assert found.name == procfs.printable(name)
    assert found.name.isprintable()


@pytest.mark.parametrize(
    ("state", "threads", "ended"), [(b"S", 1, False), (b"Z", 2, False), (b"Z", 1, True), (b"X", 2, True)]
)
def test_a_process_has_ended_when_its_last_thread_has(state: bytes, threads: int, ended: bool) -> None:
    assert procfs.Stat(b"a", state, 1, threads, 1).has_ended is ended


def test_mounts_are_read_by_their_names_and_what_makes_no_sense_is_passed_over() -> None:
    table = (
        rb"""proc /proc proc rw,hidepid=2,gid=7 0 0
fuse /tmp/a\040b\134\011c fuse.my\012fs rw 0 0
nonsense

 x
tmpfs /tmp/with"""
        + b"\r proc /proc \x0b\x0c"
        + b"""\ntmpfs /end tmpfs rw 0 0
"""
    )
    found = list(procfs.mounts(table))
    assert (found[0].point, found[0].kind) == (b"/proc", b"proc")
    assert found[0].options == {b"rw": b"", b"hidepid": b"2", b"gid": b"7"}
    assert (found[1].point, found[1].kind) == (b"/tmp/a b\\\tc", b"fuse.my\nfs")
    assert [mount.point for mount in found[2:]] == [b"/tmp/with\r", b"/end"]


def test_what_cannot_be_seen() -> None:
    absent = 2**22 + 1  # no Linux has so many
    assert procfs.stat(absent) is None
    assert procfs.status(absent, b"Uid") == []
    assert os.getpid() in procfs.pids()


def test_too_many_open_files_are_not_the_end_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(procfs, "open", refuse, raising=False)
    with pytest.raises(OSError, match="Too many"):
        procfs.stat(os.getpid())


#: Starts a process that starts another, and says the pids of both.
_TWO_GENERATIONS = """
import subprocess, sys
code = ("import subprocess, sys; print(subprocess.Popen(['sleep', '600'], stdout=2).pid, flush=True);"
        "sys.stdin.read()")
pipe = subprocess.PIPE
child = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
sys.stdin.read()
"""


async def test_a_family_is_a_process_and_all_that_descends_from_it() -> None:
    with running(_TWO_GENERATIONS) as process:
        assert process.stdout is not None
        child, grandchild = map(int, process.stdout.readline().split())
        assert family(process.pid) == {process.pid, child, grandchild}
        above = list(lineage(grandchild))
        assert [each.pid for each in above[:4]] == [grandchild, child, process.pid, os.getpid()]
        assert above[2] == identity(process)
        os.kill(grandchild, signal.SIGKILL)
    await eventually(lambda: family(grandchild) == {grandchild})


def test_the_lineage_of_one_that_has_ended_is_empty() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
    assert list(lineage(process.pid)) == []
