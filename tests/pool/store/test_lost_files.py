"""What happens to the store's files while it is in use is noticed at once, and nothing is granted twice."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from gpu_pool.embedded.pool import store_path
from gpu_pool.pool.pool import GpuPool
from gpu_pool.store.errors import StoreUnusable
from support.pools import embedded, take

#: Opens a store, takes half of its GPU, and says so; takes more on demand, and says what became of it.
HOLDER = """
import asyncio, sys
from pathlib import Path
from support.pools import embedded, take
async def main():
    async with embedded(Path(sys.argv[1])) as pool:
        await take(pool, "50%", "theirs")
        print("held", flush=True)
        for number, _ in enumerate(sys.stdin):
            try:
                await take(pool, "2%", f"more-{number}")
                print("granted", flush=True)
            except Exception as error:
                print(type(error).__name__, error, flush=True)
asyncio.run(main())
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "store.db"


@pytest.fixture
async def pool(path: Path) -> AsyncIterator[GpuPool]:
    async with embedded(path) as pool:
        await take(pool, "50%", "held")
        yield pool


@contextmanager
def other_process(path: Path) -> Iterator[Callable[[], str]]:
    """Let another process hold half of the GPU; asked, it asks for more, and says what it was told."""
    tests = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(tests)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask() -> str:
        print(file=process.stdin, flush=True)
        return process.stdout.readline()

    assert process.stdout.readline() == "held\n"
    try:
        yield ask
    finally:
        process.kill()
        process.communicate()


def did(*command: str | Path) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def replace(path: Path) -> None:
    shutil.copy(path, f"{path}.new")
    os.replace(f"{path}.new", path)  # noqa: PTH105


@pytest.mark.parametrize("change", [Path.unlink, replace], ids=["removed", "replaced"])
@pytest.mark.parametrize("end", ["", "-wal", "-shm", ".lock", ".owner"])
async def test_what_is_removed_or_replaced_is_noticed_by_the_next_decision(
    pool: GpuPool, path: Path, end: str, change: Callable[[Path], None]
) -> None:
    change(path.with_name(path.name + end))
    with pytest.raises(StoreUnusable, match=rf"store\.db{end}, was removed or replaced") as caught:
        await take(pool, "2%", "next")
    assert caught.value.remedy
    with pytest.raises(StoreUnusable, match="removed or replaced"):
        await pool.history()


async def test_a_store_that_is_emptied_is_noticed(pool: GpuPool, path: Path) -> None:
    os.truncate(path, 0)
    with pytest.raises(StoreUnusable, match="was emptied while it was in use"):
        await take(pool, "2%", "next")


async def test_its_folder_is_removed_or_renamed(pool: GpuPool, path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))
    with pytest.raises(StoreUnusable, match="was removed or replaced"):
        await take(pool, "2%", "next")


@pytest.mark.parametrize("lost", [["-wal"], ["-shm"], ["-wal", "-shm"], [".lock"], ["-wal", ".lock"]])
async def test_whoever_comes_next_grants_nothing_twice(path: Path, lost: list[str]) -> None:
    with other_process(path) as ask:
        assert ask() == "granted\n"
        for end in lost:
            path.with_name(path.name + end).unlink()
        async with embedded(path) as pool:
            with pytest.raises(StoreUnusable, match="granted"):
                await take(pool, "50%", "ours")
            assert ask().startswith("StoreUnusable")


async def test_what_was_decided_is_there_after_all_have_started_anew(path: Path) -> None:
    async with embedded(path) as pool:
        lease = await take(pool, "50%", "held")
        path.with_name("store.db-wal").unlink()
    async with embedded(path) as pool:
        assert [each.id for each in (await pool.status()).leases] == [lease]


async def test_a_hard_link_is_no_second_pool(path: Path, tmp_path: Path) -> None:
    async with embedded(path) as pool:
        lease = await take(pool, "50%", "held")
        second = tmp_path / "second.db"
        second.hardlink_to(path)
        async with embedded(second) as other:
            with pytest.raises(StoreUnusable, match="has another name") as caught:
                await take(other, "50%", "key")
        command = caught.value.remedy.partition("finds it: ")[2]
        assert command.startswith("find ")
        second.unlink()
    async with embedded(path) as pool:
        assert [each.id for each in (await pool.status()).leases] == [lease]


async def test_a_symbolic_link_is_the_same_pool(path: Path, tmp_path: Path) -> None:
    async with embedded(path) as pool:
        lease = await take(pool, "50%", "held")
        (tmp_path / "second.db").symlink_to(path)
        other = store_path(f"embedded:{tmp_path / 'second.db'}")
        async with embedded(other) as same:
            assert [each.id for each in (await same.status()).leases] == [lease]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
async def test_a_store_that_is_mounted_by_itself_is_refused(path: Path, tmp_path: Path) -> None:
    async with embedded(path) as pool:
        await take(pool, "50%", "held")
    second = tmp_path / "second.db"
    second.touch(mode=0o600)
    if not did("mount", "--bind", path, second):
        pytest.skip("this container may not mount")
    try:
        async with embedded(second) as other:
            with pytest.raises(StoreUnusable, match="is mounted by itself"):
                await take(other, "2%", "key")
    finally:
        assert did("umount", second)


async def test_who_looks_at_it_with_another_program_is_in_nobody_s_way(path: Path) -> None:
    async with embedded(path) as pool:
        lease = await take(pool, "50%", "held")
    with closing(sqlite3.connect(path)) as shell:
        assert shell.execute("SELECT count(*) FROM lease").fetchone() == (1,)
        for _ in range(2):
            async with embedded(path) as pool:
                assert [each.id for each in (await pool.status()).leases] == [lease]
