"""A store that cannot be used is left as it is, and says in words what to do."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu_pool.store import files
from gpu_pool.store.database import Database
from gpu_pool.store.errors import StoreUnusable, as_unusable
from gpu_pool_client import PoolUnreachable
from support.pools import embedded, take


def refusal(path: Path) -> str:
    with pytest.raises(StoreUnusable) as caught:
        Database(path).close()
    return str(caught.value)


def test_another_kind_of_file(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_text("my thesis, chapter one " * 500)
    before = path.read_bytes()
    assert "is not a store" in refusal(path)
    assert path.read_bytes() == before


def test_an_empty_file_is_not_taken_for_a_new_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.touch()
    assert "is not a store" in refusal(path)
    assert path.stat().st_size == 0


def test_another_sqlite_database(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE mine (x)")
    other.close()
    assert "is not a store" in refusal(path)


async def test_a_damaged_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with embedded(path) as pool:
        for number in range(40):
            await pool.release(await take(pool, "2%", f"key{number}"))
    content = bytearray(path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    path.write_bytes(content)
    async with embedded(path) as pool:
        with pytest.raises(StoreUnusable, match="is damaged"):
            await pool.status()
    assert path.read_bytes() == bytes(content)


def test_a_newer_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    Database(path).close()
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 99")
    other.close()
    assert "written by a newer jupyter-gpu-pool (schema 99" in refusal(path)


async def test_a_store_upgraded_while_it_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with embedded(path) as pool:
        lease = await take(pool, "2%", "key")
        with sqlite3.connect(path) as other:
            other.execute("PRAGMA user_version = 99")
        other.close()
        with pytest.raises(StoreUnusable, match="newer jupyter-gpu-pool"):
            await pool.release(lease)


async def test_a_store_that_was_lost_is_not_made_anew_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "a folder" / "store.db"
    async with embedded(path) as pool:
        await take(pool, "2%", "key")
    path.unlink()
    beside = sorted(each.name for each in path.parent.iterdir())
    assert beside == ["store.db.lock", "store.db.owner"]
    async with embedded(path) as pool:
        with pytest.raises(StoreUnusable, match=r"is missing, .*still there: store\.db\.lock, ") as caught:
            await pool.status()
    assert "would grant them to others too" in caught.value.message
    assert not path.exists(), "nothing was made"
    # What it says to do is enough to start anew.
    command = caught.value.remedy.partition("start again: ")[2]
    await asyncio.to_thread(subprocess.run, ["sh", "-c", command], check=True)
    assert list(path.parent.iterdir()) == []
    async with embedded(path) as pool:
        assert (await pool.status()).leases == ()


def test_processes_that_make_a_store_at_once_do_not_refuse_each_other(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from gpu_pool.store.database import Database;"
    code += "sys.stdin.read(); Database(Path(sys.argv[1])).close()"
    command = [sys.executable, "-c", code, f"{tmp_path / 'store.db'}"]
    pipe = subprocess.PIPE
    many = [subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True) for _ in range(8)]
    for each in many:
        assert each.stdin is not None
        each.stdin.close()
        each.stdin = None  # for communicate, which would flush it
    for each in many:
        assert (each.communicate()[1], each.returncode) == ("", 0)


async def test_a_store_removed_while_it_is_in_use_is_not_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with embedded(path) as pool:
        await pool.status()
        path.unlink()
        with pytest.raises(StoreUnusable, match="removed or replaced"):
            await take(pool, "2%", "key")
        assert not path.exists()


@pytest.mark.parametrize(
    ("kind", "words"), [("nfs4", "network file system (nfs4)"), ("fuse.sshfs", "(fuse.sshfs)")]
)
def test_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str
) -> None:
    # Nothing here can mount one: the system's table of mounts is replaced instead.
    mount = SimpleNamespace(mountpoint=str(tmp_path), fstype=kind)
    monkeypatch.setattr(files.psutil, "disk_partitions", lambda all: [mount])  # noqa: A006
    message = refusal(tmp_path / "store.db")
    assert words in message
    assert "GPU_POOL_URL=embedded:/var/tmp/" in message
    assert list(tmp_path.iterdir()) == []


def test_the_innermost_mount_decides() -> None:
    mounts = [("/", "ext4"), ("/home", "nfs4"), ("/home/ada/scratch", "xfs"), ("/home/ada/scratch", "btrfs")]
    assert files.file_system(Path("/home/ada/x"), mounts) == "nfs4"
    assert files.file_system(Path("/home/ada/scratch/x"), mounts) == "btrfs"
    assert files.file_system(Path("/homely"), mounts) == "ext4"


def test_a_folder_that_cannot_be_made() -> None:
    assert "The folder of the pool's store, /proc/gpu-pool, cannot be made" in refusal(
        Path("/proc/gpu-pool/store.db")
    )


def _open_as(user: int, path: Path, said: multiprocessing.SimpleQueue[str]) -> None:
    if os.geteuid() == 0:
        os.setgid(user)
        os.setuid(user)
    try:
        database = Database(path)
        with database.transaction():
            database.run("set_looked_at", {"now": 1.0})
    except StoreUnusable as error:
        said.put(str(error))
    else:
        said.put("it worked")


@pytest.mark.parametrize("mode", ["folder", "file", "hidden"])
def test_a_store_without_permission(mode: str) -> None:
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "store.db"
        if mode != "folder":
            Database(path).close()
        for item in (folder, *folder.iterdir()):
            os.chown(item, user, -1)
        {"folder": folder, "file": path, "hidden": path}[mode].chmod(
            {"folder": 0o500, "file": 0o400, "hidden": 0}[mode]
        )
        context = multiprocessing.get_context("fork")
        said = context.SimpleQueue()
        child = context.Process(target=_open_as, args=(user, path, said))
        child.start()
        message = said.get()
        child.join()
        folder.chmod(0o700)
    closed = folder if mode == "folder" else path
    assert "store.db, cannot be" in message
    assert f"{closed} is closed to you (user {user})" in message
    assert "writable" in message or "GPU_POOL_URL" in message, message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_the_store_of_another_user(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    Database(path).close()
    os.chown(path, 12345, 12345)
    assert "belongs to the user with id 12345; you are 0" in refusal(path)


FILL = """
import asyncio, resource, signal, sys
from pathlib import Path
from support.pools import embedded, take
from gpu_pool_client import GpuPoolError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

async def main():
    async with embedded(Path(sys.argv[1])) as pool:
        await take(pool, "2%", "first")
        # No file may grow beyond this: for SQLite, the same as a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
        try:
            for number in range(10_000):
                await pool.release(await take(pool, "2%", f"key{number}"))
        except GpuPoolError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await take(pool, "2%", "last")
        print(sorted(lease.key for lease in (await pool.status()).leases))
asyncio.run(main())
"""


def test_a_full_disk_loses_nothing_and_the_pool_goes_on_once_there_is_room(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(tmp_path / "store.db")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    error, leases = done.stdout.splitlines()
    assert "store.db, cannot" in error
    assert "disk" in error
    assert "'first'" in leases
    assert "'last'" in leases


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "store.db"
    database = Database(path)
    with database.transaction():
        database.run("set_looked_at", {"now": 1.0})
    modes = {item.name: oct(item.stat().st_mode & 0o777) for item in path.parent.iterdir()}
    database.close()
    assert set(modes.values()) == {"0o600"}, modes
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_every_error_of_the_store_is_one_the_client_knows() -> None:
    assert issubclass(StoreUnusable, PoolUnreachable)


def test_what_is_left_of_a_store_is_not_read_into_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    first = Database(path)
    with first.transaction():
        first.run("set_looked_at", {"now": 42.0})
    path.rename(tmp_path / "aside.db")
    assert "store.db-wal" in refusal(path)
    first.close()
    for left in tmp_path.glob("store.db[-.]*"):
        left.unlink()
    again = Database(path)
    with again.snapshot():
        assert again.one("looked_at")[0] == 0
    again.close()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_in_which_others_write(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    assert "can be written to by other users" in refusal(folder / "store.db")
    assert not list(folder.iterdir())


def test_a_lock_file_that_leads_elsewhere(tmp_path: Path) -> None:
    Database(tmp_path / "store.db").close()
    (tmp_path / "store.db.lock").unlink()
    (tmp_path / "store.db.lock").symlink_to(tmp_path / "target")
    assert "cannot be used" in refusal(tmp_path / "store.db")
    assert not (tmp_path / "target").exists()


def test_a_lock_of_another_kind(tmp_path: Path) -> None:
    Database(tmp_path / "store.db").close()
    (tmp_path / "store.db.lock").unlink()
    os.mkfifo(tmp_path / "store.db.lock", 0o600)
    assert "cannot be used" in refusal(tmp_path / "store.db")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "your disk quota there is used up. Remove 20 MiB of"),
        (OSError(errno.ENOSPC, "No space left on device"), "it is full. Free 20 MiB there (df -h), and try"),
        (sqlite3.OperationalError("database or disk is full"), "it is full. Free 20 MiB there"),
        (OSError(errno.EROFS, "Read-only file system"), "is read-only. Mount it writable, or choose another"),
        (OSError(errno.EMFILE, "Too many open files"), "as many files open as it may"),
        (OSError(errno.ENFILE, "Too many open files in system"), "the machine has as many files open"),
        (sqlite3.IntegrityError("UNIQUE constraint failed"), "This is a bug in jupyter-gpu-pool"),
        (sqlite3.DatabaseError("database disk image is malformed"), "together with those beside it"),
    ],
)
def test_the_words_for_an_error(error: OSError | sqlite3.Error, words: str) -> None:
    assert words in str(as_unusable(error, Path("/x/store.db")))
