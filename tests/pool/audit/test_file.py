"""The file of the audit log: whole lines, whatever becomes of it and whoever writes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpu_pool.audit import AuditLog
from gpu_pool_client import BadRequest
from support.audit_logs import lines, told
from support.pools import embedded, take


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def test_who_is_refused_again_and_again_does_not_fill_the_disk(log: Path) -> None:
    now = [0.0]
    audit = AuditLog(log, lambda: now[0])
    for _ in range(500):
        audit.refused(BadRequest("No."), {})
    assert len(lines(log)) == 60
    now[0] = 61
    audit.refused(BadRequest("No."), {})
    assert lines(log)[-1]["left_out"] == 440


def test_the_file_is_for_its_owner_and_group(log: Path) -> None:
    before = os.umask(0o077)
    try:
        AuditLog(log).reopen()
    finally:
        os.umask(before)
    assert stat.S_IMODE(log.stat().st_mode) == 0o640
    log.chmod(0o600)
    AuditLog(log).reopen()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


@pytest.mark.parametrize("rotate", ["rename", "remove", "create"])
def test_a_rotated_file_is_left_alone(log: Path, rotate: str) -> None:
    audit = AuditLog(log)
    audit.write("one", {}, None)
    old = log.with_suffix(".1")
    log.rename(old)
    if rotate == "remove":
        old.unlink()
    if rotate == "create":  # as logrotate does it
        log.touch()
    audit.write("two", {}, None)
    assert told(log) == [("two",)]
    assert rotate == "remove" or told(old) == [("one",)]


def test_a_file_that_is_no_file_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot be written: No such file"):
        AuditLog(tmp_path / "missing" / "log").reopen()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadRequest, match="cannot be written"):
        AuditLog(tmp_path / "pipe").reopen()
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(BadRequest, match="cannot be written"):
        AuditLog(tmp_path / "link").reopen()


async def test_a_full_disk_stops_no_decision_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with embedded(tmp_path / "store.db", audit_log="/dev/full") as pool:
        assert pool.core.audit is not None
        before = pool.core.audit.lost
        await take(pool, "2%", "one")
        await take(pool, "2%", "two")
        assert pool.core.audit.lost == before + 2
        assert len((await pool.status()).leases) == 2
    assert caplog.text.count("/dev/full cannot be written: No space left on device") == 1


def test_the_missing_lines_are_told_where_they_are_missing(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    audit = AuditLog(folder / "log")
    for _ in range(3):
        audit.write("lost-one", {}, None)
    folder.mkdir()
    audit.write("kept", {}, None)
    assert told(folder / "log", "lines") == [("lost", 3), ("kept", None)]
    assert (audit.written, audit.lost) == (2, 3)


_FILLS_THE_DISK = """
import resource, sys
from pathlib import Path
from gpu_pool.audit import Actor, AuditLog, acting
log = AuditLog(Path(sys.argv[1]))
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
for number in range(20):
    log.write("full", {"number": number}, None)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.write("room", {}, None)
print(log.lost)
"""


def test_a_line_that_only_partly_fits_is_none(log: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _FILLS_THE_DISK, log], capture_output=True, text=True, check=True
    )
    *full, lost, room = lines(log)
    assert (lost["event"], lost["lines"], room["event"]) == ("lost", int(ran.stdout), "room")
    assert [line["number"] for line in full] == list(range(len(full)))
    assert len(full) + int(ran.stdout) == 20
    assert log.read_bytes().index(b" ") < 1000  # what was written of one is blank


_WRITES = """
import sys
from pathlib import Path
from gpu_pool.audit import Actor, AuditLog, acting
log = AuditLog(Path(sys.argv[1]))
for number in range(300):
    log.write("line", {"message": sys.argv[2] * 400, "number": number}, None)
"""


def test_processes_and_threads_that_write_at_once_tear_no_line(log: Path) -> None:
    others = [subprocess.Popen([sys.executable, "-c", _WRITES, log, letter]) for letter in "abc"]
    audit = AuditLog(log)
    threads = [
        threading.Thread(
            target=lambda: [audit.write("line", {"message": "d" * 400}, None) for _ in range(200)]
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {each.wait(60) for each in others} == {0}
    found = lines(log)
    assert len(found) == 3 * 300 + 400
    assert all(set(line["message"]) in ({"a"}, {"b"}, {"c"}, {"d"}) for line in found)
