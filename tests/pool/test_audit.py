"""The audit log: who asked for what and what became of it, in whole lines, whatever happens to its file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import re
import sqlite3
import stat
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.audit import Actor, AuditLog, acting
from gpu_pool.embedded import EmbeddedPool
from gpu_pool_client import (
    BadRequest,
    EndReason,
    GpuPoolError,
    Holder,
    LeaseState,
    OverQuota,
    PoolUnreachable,
    Process,
    parse_request,
)
from support.pools import device, embedded, take

PAGE = Path(__file__).parents[2] / "docs" / "administrator" / "audit.md"
GRACE = Holder("grace", "ml")


def lines(path: Path) -> list[dict[str, Any]]:
    """Every line of the log, each of which must be whole."""
    text = path.read_bytes()
    assert text.endswith(b"\n")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def content(path: Path) -> bytes:
    return path.read_bytes()


def told(path: Path, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(line.get(name) for name in ("event", *names)) for line in lines(path)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def pool(tmp_path: Path, log: Path) -> EmbeddedPool:
    return embedded(tmp_path / "ledger.db", audit_log=str(log), courses={"ml": {}}, max_waiting=1)


async def test_a_grant_says_who_what_where_and_when(pool: EmbeddedPool, log: Path) -> None:
    async with pool:
        lease = await pool.request(parse_request("2%"), Holder("ada", "ml"), "secret-key")
    (line,) = lines(log)
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert len(line.pop("request_id")) == 16
    assert line == {
        "event": "granted",
        "lease": lease.id,
        "user": "ada",
        "course": "ml",
        "request": "2%",
        "slices": [{"device": "SIM-V100", "milli": 20, "memory_mib": 655}],
        "waited": 0.0,
        "by": pwd.getpwuid(os.geteuid()).pw_name,
        "via": "process",
        "uid": os.geteuid(),
        "pid": os.getpid(),
        "writer": os.getpid(),
    }
    assert "secret-key" not in str(line)


async def test_each_decision_in_a_lease_s_life_is_told(pool: EmbeddedPool, log: Path) -> None:
    async with pool:
        mine = await take(pool, "1", "mine")
        hers = await take(pool, "50%", "hers", GRACE)
        await pool.park(mine)
        await pool.resize(hers, parse_request("20%"))
        await pool.resume(mine)
        await pool.release(hers)
        await pool.revoke(mine, "The card is needed\nelsewhere.")
        await pool.drain("0")
        await pool.drain("0", drained=False)
    assert told(log, "user", "lease", "reason") == [
        ("granted", "ada", mine, None),
        ("queued", "grace", hers, None),
        ("parked", "ada", mine, None),
        ("granted", "grace", hers, None),
        ("resized", "grace", hers, None),
        ("resumed", "ada", mine, None),
        ("ended", "grace", hers, "released"),
        ("granted", "ada", mine, None),
        ("ended", "ada", mine, "revoked"),
        ("drained", None, None, None),
        ("undrained", None, None, None),
    ]
    every = lines(log)
    documented = set(re.findall(r"`([a-z_-]+)`", PAGE.read_text()))
    assert {name for line in every for name in (*line, line["event"])} <= documented
    # What followed from somebody's request is not said to be asked for by them.
    assert [line["event"] for line in every if "by" not in line] == ["granted", "granted"]
    assert every[3]["request_id"] == every[2]["request_id"]
    assert every[3]["waited"] >= 0
    assert (every[4]["before"], every[4]["request"]) == ("50%", "20%")
    assert every[8]["words"] == "The card is needed?elsewhere."
    assert every[9]["device"] == "SIM-V100"


_COURSE = """
title: Machine Learning
who: {users: [ada]}
instructors: [turing]
slices:
  - {name: Small, request: 2%}
"""


async def test_a_course_file_in_force_anew_is_told_with_who_edited_it(tmp_path: Path, log: Path) -> None:
    files = tmp_path / "courses"
    files.mkdir()
    (files / "ml.yaml").write_text(_COURSE)
    settings = {"audit_log": str(log), "courses_dir": str(files)}
    async with embedded(tmp_path / "ledger.db", **settings) as pool:
        await pool.status()
        await take(pool, "2%", "key", Holder("ada", "ml"))
        (files / "ml.yaml").write_text(_COURSE.replace("2%", "5%"))
        with acting(Actor("turing", "token")):
            await pool.reread_course("ml.yaml")
        (files / "nlp.yaml").write_text(_COURSE)
        await pool.reread_course("nlp.yaml")
    assert told(log, "course", "change", "by")[1:] == [
        ("course", "ml", "changed", "turing"),
        ("course", "nlp", "added", None),
    ]


async def test_refusals_are_told_with_their_reason_and_once(pool: EmbeddedPool, log: Path) -> None:
    async with pool:
        await take(pool, "1", "held")
        await take(pool, "1", "waits")
        with pytest.raises(OverQuota):
            await take(pool, "50%", "more", Holder("ada", "ml"))
        with pytest.raises(BadRequest):
            await pool.drain("7")
    refused, other = lines(log)[2:]
    assert (refused["event"], refused["reason"]) == ("refused", "over-quota")
    assert (refused["user"], refused["course"], refused["request"]) == ("ada", "ml", "50%")
    assert "wait for 1 slices already" in refused["words"]
    assert (other["reason"], other["device"]) == ("bad-request", "7")


async def test_what_the_pool_does_by_itself_is_in_nobody_s_name(tmp_path: Path, log: Path) -> None:
    dead = Process(2**22 + 1, 1, Process.current().boot, Process.current().namespace)
    async with embedded(tmp_path / "ledger.db", audit_log=str(log)) as pool:
        await take(pool, "1", "gone", Holder("ada", process=dead))
        await pool.status()
    granted, ended = lines(log)
    assert (ended["event"], ended["reason"], ended["lease"]) == ("ended", "process-gone", granted["lease"])
    assert not {"by", "via", "request_id"} & ended.keys()


_NO_GRANT = """
CREATE TRIGGER no_grant BEFORE UPDATE OF state ON lease WHEN NEW.state = 'held'
BEGIN SELECT RAISE(ABORT, 'no more'); END
"""


async def test_what_is_not_kept_is_not_told(pool: EmbeddedPool, log: Path, tmp_path: Path) -> None:
    async with pool:
        held = await take(pool, "1", "held")
        await take(pool, "1", "waits", GRACE)
        with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as ledger:
            ledger.execute(_NO_GRANT)
        with pytest.raises(PoolUnreachable):
            await pool.release(held)
        # Together with others, in one transaction of which all but it are kept.
        drains = [pool.drain("0", drained=False) for _ in range(6)]
        answers = await asyncio.gather(*drains[:3], pool.release(held), *drains[3:], return_exceptions=True)
        assert [type(each) for each in answers if isinstance(each, Exception)] == [type(answers[3])]
        assert (await pool.lease(held)).state is LeaseState.HELD
    assert told(log) == [("granted",), ("queued",), *[("undrained",)] * 6]


async def test_a_hostile_name_is_one_line(tmp_path: Path, log: Path) -> None:
    name = 'ada\n{"event":"granted","user":"root"}\r\x1b[2J\u2028\ud800"\\' + "x" * 5000
    async with embedded(tmp_path / "ledger.db", audit_log=str(log)) as pool:
        await pool.request(parse_request("2%"), Holder(name, kernel=name), "key")
        with pytest.raises(GpuPoolError):
            await pool.request(parse_request("9"), Holder(name, name), "other")
    found, text = lines(log), content(log)
    assert text.count(b"\n") == 2
    assert text.isascii()
    assert not any(byte < 32 for byte in text.replace(b"\n", b""))
    assert max(map(len, text.splitlines())) < 8_000
    assert [line["event"] for line in found] == ["granted", "refused"]


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
    async with embedded(tmp_path / "ledger.db", audit_log="/dev/full") as pool:
        assert pool.audit is not None
        before = pool.audit.lost
        await take(pool, "2%", "one")
        await take(pool, "2%", "two")
        assert pool.audit.lost == before + 2
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
    log.write("line", {"words": sys.argv[2] * 400, "number": number}, None)
"""


def test_processes_and_threads_that_write_at_once_tear_no_line(log: Path) -> None:
    others = [subprocess.Popen([sys.executable, "-c", _WRITES, log, letter]) for letter in "abc"]
    audit = AuditLog(log)
    threads = [
        threading.Thread(target=lambda: [audit.write("line", {"words": "d" * 400}, None) for _ in range(200)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {each.wait(60) for each in others} == {0}
    found = lines(log)
    assert len(found) == 3 * 300 + 400
    assert all(set(line["words"]) in ({"a"}, {"b"}, {"c"}, {"d"}) for line in found)


async def test_many_who_ask_at_once_are_told_by_their_own_names(tmp_path: Path, log: Path) -> None:
    async with embedded(tmp_path / "ledger.db", device(0), device(1), audit_log=str(log)) as pool:

        async def ask(name: str) -> None:
            with acting(Actor(name, "socket")):
                await pool.request(parse_request("2%"), Holder(name), name)

        await asyncio.gather(*(ask(f"user-{number}") for number in range(30)))
    assert all(line["user"] == line["by"] for line in lines(log))
    assert len({line["request_id"] for line in lines(log)}) == 30


async def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    async with embedded(tmp_path / "ledger.db") as pool:
        await pool.release(await take(pool, "2%", "key"), EndReason.RELEASED)
        assert pool.audit is None
