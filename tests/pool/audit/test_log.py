"""The audit log: who asked for what and what became of it, in whole lines, whatever happens to its file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import re
import sqlite3
from datetime import datetime
from pathlib import Path

import pytest

from gpu_pool.audit import Actor, acting
from gpu_pool.pool.pool import GpuPool
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
from support.audit_logs import content, lines, told
from support.pools import device, embedded, eventually, take

PAGE = Path(__file__).parents[3] / "docs" / "administrator" / "audit.md"
GRACE = Holder("grace", "ml")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def pool(tmp_path: Path, log: Path) -> GpuPool:
    return embedded(tmp_path / "store.db", audit_log=str(log), courses={"ml": {}}, max_waiting=1)


async def test_a_grant_says_who_what_where_and_when(pool: GpuPool, log: Path) -> None:
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


async def test_each_decision_in_a_lease_s_life_is_told(pool: GpuPool, log: Path) -> None:
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
    assert every[8]["message"] == "The card is needed?elsewhere."
    assert every[9]["device"] == "SIM-V100"


async def test_slices_that_are_taken_back_are_told_with_who_and_why(pool: GpuPool, log: Path) -> None:
    async with pool:
        mine = await take(pool, "1", "mine")
        await pool.attach(mine, Process.current(), grace=5.0)
        await pool.ask_back(mine, "When you can.", EndReason.REVOKED)
        await pool.withdraw(mine, "The exam began.", EndReason.REVOKED)
    assert told(log, "reason", "message")[1:] == [
        ("asked-back", "revoked", "When you can."),
        ("parked", "revoked", "The exam began."),
    ]


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
    async with embedded(tmp_path / "store.db", **settings) as pool:
        await pool.status()
        await take(pool, "2%", "key", Holder("ada", "ml"))
        (files / "ml.yaml").write_text(_COURSE.replace("2%", "5%"))
        with acting(Actor("turing", "token")):
            await pool.core.reread_course("ml.yaml")
        (files / "nlp.yaml").write_text(_COURSE)
        await pool.core.reread_course("nlp.yaml")
    assert told(log, "course", "change", "by")[1:] == [
        ("course", "ml", "changed", "turing"),
        ("course", "nlp", "added", None),
    ]


async def test_refusals_are_told_with_their_reason_and_once(pool: GpuPool, log: Path) -> None:
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
    assert "wait for 1 slices already" in refused["message"]
    assert (other["reason"], other["device"]) == ("bad-request", "7")


async def test_what_the_pool_does_by_itself_is_in_nobody_s_name(tmp_path: Path, log: Path) -> None:
    dead = Process(2**22 + 1, 1, Process.current().boot, Process.current().namespace)
    async with embedded(tmp_path / "store.db", audit_log=str(log)) as pool:
        await take(pool, "1", "gone", Holder("ada", process=dead))
        await eventually(lambda: len(lines(log)) == 2)
    granted, ended = lines(log)
    assert (ended["event"], ended["reason"], ended["lease"]) == ("ended", "process-gone", granted["lease"])
    assert not {"by", "via", "request_id"} & ended.keys()


_NO_GRANT = """
CREATE TRIGGER no_grant BEFORE UPDATE OF state ON lease WHEN NEW.state = 'held'
BEGIN SELECT RAISE(ABORT, 'no more'); END
"""


async def test_what_is_not_kept_is_not_told(pool: GpuPool, log: Path, tmp_path: Path) -> None:
    async with pool:
        held = await take(pool, "1", "held")
        await take(pool, "1", "waits", GRACE)
        with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as store:
            store.execute(_NO_GRANT)
        with pytest.raises(PoolUnreachable):
            await pool.release(held)
        # Together with others, in one transaction of which all but it are kept.
        drains = [pool.drain("0", drained=False) for _ in range(6)]
        answers = await asyncio.gather(*drains[:3], pool.release(held), *drains[3:], return_exceptions=True)
        assert [type(each) for each in answers if isinstance(each, Exception)] == [type(answers[3])]
        assert (await pool.get_lease(held)).state is LeaseState.HELD
    assert told(log) == [("granted",), ("queued",), *[("undrained",)] * 6]


async def test_a_hostile_name_is_one_line(tmp_path: Path, log: Path) -> None:
    name = 'ada\n{"event":"granted","user":"root"}\r\x1b[2J\u2028\ud800"\\' + "x" * 5000
    async with embedded(tmp_path / "store.db", audit_log=str(log)) as pool:
        await pool.request(parse_request("2%"), Holder("ada", kernel=name), "key")
        with pytest.raises(GpuPoolError):
            await pool.request(parse_request("9"), Holder("ada", name), "other")
        with pytest.raises(BadRequest, match="not a valid user name"):
            await pool.request(parse_request("2%"), Holder(name), "another")
    found, text = lines(log), content(log)
    assert text.count(b"\n") == 3
    assert text.isascii()
    assert not any(byte < 32 for byte in text.replace(b"\n", b""))
    assert max(map(len, text.splitlines())) < 8_000
    assert [line["event"] for line in found] == ["granted", "refused", "refused"]


async def test_many_who_ask_at_once_are_told_by_their_own_names(tmp_path: Path, log: Path) -> None:
    async with embedded(tmp_path / "store.db", device(0), device(1), audit_log=str(log)) as pool:

        async def ask(name: str) -> None:
            with acting(Actor(name, "socket")):
                await pool.request(parse_request("2%"), Holder(name), name)

        await asyncio.gather(*(ask(f"user-{number}") for number in range(30)))
    assert all(line["user"] == line["by"] for line in lines(log))
    assert len({line["request_id"] for line in lines(log)}) == 30


async def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        await pool.release(await take(pool, "2%", "key"), EndReason.RELEASED)
        assert pool.core.audit is None
