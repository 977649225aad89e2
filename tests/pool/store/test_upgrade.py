"""A store is brought to a newer schema whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.store import schema
from gpu_pool.store.database import APPLICATION_ID, Database
from gpu_pool.store.errors import StoreUnusable
from gpu_pool.store.schema import migrations, statements
from gpu_pool_client import Failure, OverQuota
from support.passes import NO_PASSES
from support.pools import embedded, identity, running, take

#: A schema after the newest, as a release to come might have it.
LATER = """
ALTER TABLE lease ADD COLUMN shade TEXT NOT NULL DEFAULT 'grey';
UPDATE history SET note = 'of old' || hex(zeroblob(200));
CREATE TABLE upgrade (said TEXT NOT NULL);
INSERT INTO upgrade VALUES ('once');
CREATE INDEX history_by_course ON history (course);
"""
#: A store of each schema before the newest, as it was left by the last version that wrote it, by ``kept``.
SCHEMAS = Path(__file__).parent / "schemas"
NEWEST = len(migrations())
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


#: Lets this process be of another release: the one that has these migrations besides.
Release = Callable[..., None]


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Release:
    real = migrations()
    return lambda *scripts: monkeypatch.setattr(schema, "migrations", lambda: (*real, *scripts))


def kept(path: Path) -> str:
    """Return a store as SQL."""
    with closing(sqlite3.connect(path)) as store:
        version = schema.version_of(store)
        head = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {version};"
        return "\n".join([head, *store.iterdump()])


def restored(text: str, path: Path) -> Path:
    with closing(sqlite3.connect(path)) as store:
        store.execute("PRAGMA journal_mode = WAL")
        store.executescript(text)
    path.chmod(0o600)
    return path


def rows(path: Path, question: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as store:
        return store.execute(question).fetchall()


def put_history(path: Path, leases: int = 400) -> None:
    Database(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as store:
        store.execute(
            "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
            "INSERT INTO history (number, id, key, request, milli, user, course, requested_at, ended_at, "
            "held_seconds, used, reason, slices) "
            "SELECT i, i || '-x', 'key' || i, '2%', 20, 'ada', '', 1, 2, 1, 20, 'released', '[]' FROM n",
            (leases,),
        )


def is_old(path: Path) -> bool:
    """Whether nothing of the later schema is in a store, and the file is whole."""
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]
    assert rows(path, "SELECT count(*) FROM history") == [(400,)]
    notes = rows(path, "SELECT DISTINCT note FROM history")
    tables = rows(path, "SELECT name FROM sqlite_master WHERE name = 'upgrade'")
    return (rows(path, "PRAGMA user_version"), notes, tables) == ([(NEWEST,)], [("",)], [])


def test_the_migrations_are_numbered_without_gaps() -> None:
    names = sorted(item.name for item in files("gpu_pool.store").joinpath("migrations").iterdir())
    assert [int(name.split("_")[0]) for name in names if name.endswith(".sql")] == [*range(1, NEWEST + 1)]


@pytest.mark.parametrize("schema", range(1, NEWEST + 1))
async def test_a_store_of_every_schema_so_far_is_upgraded(
    path: Path, tmp_path: Path, release: Release, schema: int
) -> None:
    if schema == NEWEST:
        await use(tmp_path / "first.db")
        text = kept(tmp_path / "first.db")
    else:
        text = (SCHEMAS / f"{schema:04}.sql").read_text()
    release(LATER)
    async with embedded(restored(text, path)) as pool:
        first = (await pool.history())[0]
        assert (first.reason, first.job) == ("released", "")
        await take(pool, "2%", "new")
    assert rows(path, "SELECT DISTINCT shade FROM lease") == [("grey",)]
    assert rows(path, "PRAGMA user_version") == [(NEWEST + 1,)]


async def test_what_a_kernel_failed_of_is_still_known(path: Path) -> None:
    async with embedded(restored((SCHEMAS / "0004.sql").read_text(), path)) as pool:
        failures = [each.failure for each in (await pool.history())]
    assert failures[-1] == Failure(
        1795416897.0, 'It said "words": and ended.', pod="kernel-1", node="n1", image="notebook:1"
    )
    known = rows(path, "SELECT failure FROM lease UNION SELECT failure FROM history")
    assert not any('"words": ' in text for (text,) in known)


async def test_what_was_granted_before_kernels_gave_way_never_does(path: Path) -> None:
    async with embedded(path) as pool:
        held = await take(pool, "2%", "held")
        assert (await pool.get_lease(held)).terms.yield_after == 60
        with closing(sqlite3.connect(path)) as store, store:
            store.execute("UPDATE lease SET terms = '[900, \"keep\", 300, 7200]'")
        terms = (await pool.get_lease(held)).terms
    assert (terms.idle_limit, terms.yield_after, terms.hibernate_after) == (900, None, None)


async def test_only_slices_with_a_limit_are_written_with_it(path: Path) -> None:
    async with embedded(path, tuning=NO_PASSES) as pool:  # in which nothing is lent
        plain, limited = await take(pool, "2%", "plain"), await take(pool, "2%..10%", "limited")
        assert rows(path, "SELECT slices FROM lease ORDER BY number") == [
            ("[[1, 20, 655, 0]]",),
            ("[[1, 20, 655, 0, 3276, 0]]",),
        ]
        with closing(sqlite3.connect(path)) as store, store:
            store.execute("UPDATE lease SET slices = '[[1, 20, 655, 0, 3276, 1000]]' WHERE key = 'limited'")
        for lease, amounts in ((plain, (0, 0, 655)), (limited, (3276, 1000, 1655))):
            [part] = (await pool.get_lease(lease)).slices
            assert (part.limit_mib, part.burst_mib, part.allowed_mib) == amounts
        assert (await pool.status()).devices[0].held_memory_mib == 1310


async def test_what_waited_in_the_queue_of_the_cluster_still_does(path: Path) -> None:
    parked = (
        "UPDATE lease SET state = 'parked', slices = '[]', held_at = NULL, ends_by = NULL, terms = NULL, "
        "turn = NULL, waiting_since = NULL, home = '{}' WHERE number = {};"
    )
    store = restored((SCHEMAS / "0009.sql").read_text(), path)
    with closing(sqlite3.connect(store)) as old:
        old.executescript(parked.format("any-V100-32768-0", 2) + parked.format("SIM-V100", 3))
    Database(path).close()
    assert rows(path, "SELECT number, outside FROM lease") == [(2, 1), (3, 0), (4, 0)]


async def test_what_was_used_this_week_still_counts(path: Path) -> None:
    store, now = restored((SCHEMAS / "0015.sql").read_text(), path), time.time()
    # The Unix epoch was a Thursday.
    monday = now - (now - 4 * 86_400) % (7 * 86_400)
    with closing(sqlite3.connect(store)) as old, old:
        old.execute("DELETE FROM lease")  # what is held counts too
        old.execute("UPDATE use SET week_began = ?, in_week = 2 * 3600 * 1000.0, in_term = 9e6", (monday,))
    async with embedded(path, per_user={"gpu_hours_per_week": 1}) as pool:
        with pytest.raises(OverQuota, match="You used 2.0 GPU-hours this week"):
            await take(pool, "2%", "new")
    async with embedded(path, per_user={"gpu_hours_per_term": 2}) as pool:
        with pytest.raises(OverQuota, match="You used 2.5 GPU-hours this term"):
            await take(pool, "2%", "new")


async def use(path: Path) -> None:
    """Let a store have one lease that has ended, one that is held, and two that wait."""
    async with embedded(path) as pool:
        await pool.release(await take(pool, "10%", "past"))
        for size, key in (("1", "held"), ("50%", "next"), ("50%", "last")):
            await take(pool, size, key)


async def test_what_is_held_and_waited_for_outlives_an_upgrade(path: Path, release: Release) -> None:
    await use(path)
    with running() as kernel:
        async with embedded(path) as pool:
            (held,) = (await pool.status()).leases
            await pool.attach(held.id, identity(kernel))
            before, past = await pool.status(), await pool.history()
        release(LATER)
        async with embedded(path) as pool:
            assert await pool.status() == before
            assert [each.id for each in await pool.history()] == [each.id for each in past]
            await pool.release(held.id)
            assert [lease.key for lease in (await pool.status()).leases] == ["next", "last"]


def refusal(path: Path) -> str:
    with pytest.raises(StoreUnusable) as caught:
        Database(path).close()
    return str(caught.value)


def test_a_newer_store_is_refused_in_words_and_left_alone(path: Path, release: Release) -> None:
    release(LATER)
    Database(path).close()
    release()
    before = path.read_bytes()
    said = refusal(path)
    assert f"written by a newer jupyter-gpu-pool (schema {NEWEST + 1}; this one knows schemas 1 to" in said
    assert "Upgrade jupyter-gpu-pool here too" in said
    assert path.read_bytes() == before


def test_who_has_it_open_is_told_when_another_upgrades_it(path: Path, release: Release) -> None:
    with closing(Database(path)) as old:
        release(LATER)
        Database(path).close()
        release()
        for block in (old.snapshot, old.transaction):
            with pytest.raises(StoreUnusable, match="restart what uses the pool"), block():
                pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("ALTER TABLE lease RENAME COLUMN notice TO remark", "lacks the column lease.notice TEXT"),
        ("ALTER TABLE lease ADD COLUMN colour TEXT", "has the column lease.colour TEXT"),
        ("DROP TABLE course_use", "lacks the column course_use."),
    ],
)
def test_a_store_from_between_releases_is_refused_in_words(
    path: Path, release: Release, change: str, words: str
) -> None:
    put_history(path)
    with closing(sqlite3.connect(path)) as store:
        store.execute(change)
    for scripts in ((), (LATER,)):
        release(*scripts)
        said = refusal(path)
        assert f"it says schema {NEWEST}, but {words}" in said
        assert "move the file aside" in said
    assert is_old(path)


def test_what_others_put_beside_our_tables_does_no_harm(path: Path) -> None:
    put_history(path)
    with closing(sqlite3.connect(path)) as store:
        store.execute("CREATE TABLE mine (x)")
        store.execute("CREATE INDEX my_report ON history (course)")
    Database(path).close()


@pytest.mark.parametrize(
    "broken", ["INSERT INTO upgrade VALUES (NULL);", "nonsense;", "SELECT x FROM lease;"]
)
def test_a_migration_that_fails_leaves_the_store_as_it_was(path: Path, release: Release, broken: str) -> None:
    put_history(path)
    release(LATER + broken)
    assert "Nothing was changed" in refusal(path)
    assert is_old(path)
    release()
    Database(path).close()


def upgrade_and_die(path: Path, die_before: int) -> None:
    """Upgrade in this process, which is killed before that statement of the migration."""
    real, is_newest = migrations(), schema.is_newest

    def deadly(script: str) -> Iterator[str]:
        for number, statement in enumerate([*statements(script), ""]):
            if number == die_before:
                os.kill(os.getpid(), signal.SIGKILL)
            yield statement

    def armed(*args: Any) -> bool:
        found = is_newest(*args)
        schema.statements = deadly  # type: ignore[attr-defined]
        return found

    schema.migrations = lambda: (*real, LATER)  # type: ignore[attr-defined]
    schema.is_newest = armed
    Database(path)


@pytest.mark.parametrize("die_before", range(len([*statements(LATER)]) + 1))
def test_a_process_killed_in_an_upgrade_leaves_the_old_store(
    path: Path, release: Release, die_before: int
) -> None:
    put_history(path)
    child = FORK.Process(target=upgrade_and_die, args=(path, die_before))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    Database(path).close()  # the old release goes on
    assert is_old(path)
    release(LATER)
    Database(path).close()
    assert rows(path, "SELECT said FROM upgrade") == [("once",)]


def test_processes_that_upgrade_at_once_do_it_once(path: Path, release: Release) -> None:
    put_history(path)
    release(LATER)
    barrier = FORK.Barrier(6)

    def upgrade() -> None:
        barrier.wait(60)
        with closing(Database(path)) as database, database.transaction():
            database.run("set_looked_at", {"now": 1.0})

    children = [FORK.Process(target=upgrade) for _ in range(6)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert {child.exitcode for child in children} == {0}
    assert rows(path, "SELECT said FROM upgrade") == [("once",)]
    assert rows(path, "PRAGMA user_version") == [(NEWEST + 1,)]


def test_an_upgrade_on_a_full_disk_leaves_the_old_store(path: Path, release: Release) -> None:
    put_history(path)
    release(LATER)
    said = FORK.SimpleQueue()

    def upgrade() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        # No file may grow beyond this: for SQLite, the same as a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
        said.put(refusal(path))

    child = FORK.Process(target=upgrade)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert "cannot be read or written: the disk reports an error" in said.get()
    assert is_old(path)
    Database(path).close()
    assert rows(path, "SELECT said FROM upgrade") == [("once",)]


@contextmanager
def disk() -> Iterator[Path]:
    """Mount a disk of its own, as only root can."""
    with tempfile.TemporaryDirectory() as name:
        mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", name]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("no disk can be mounted here")
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "-l", name], check=True)


def test_an_upgrade_on_a_read_only_disk_leaves_the_old_store(release: Release) -> None:
    with disk() as folder:
        path = folder / "store.db"
        put_history(path)
        release(LATER)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        assert f"store.db, cannot be written: the file system at {folder} is read-only" in refusal(path)
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        assert is_old(path)
        Database(path).close()
        assert rows(path, "SELECT said FROM upgrade") == [("once",)]
