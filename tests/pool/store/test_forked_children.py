"""A process that was killed has no lock any more, though a child that was forked from it lives on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from gpu_pool.store.locks import FairLock, LivenessLocks, Ownership
from support.killed_parents import killed

BEGINS = """
from pathlib import Path
from gpu_pool.store.locks import FairLock, LivenessLocks, Ownership
"""


@pytest.mark.timeout(120)
def test_whoever_is_next_has_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        killed(BEGINS + f"with FairLock(Path({str(path)!r})):\n    stay('')"),
        closing(FairLock(path)) as lock,
        lock,
    ):
        pass


def test_it_gives_no_sign_of_life(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        closing(LivenessLocks(path)) as locks,
        killed(BEGINS + f"stay(LivenessLocks(Path({str(path)!r})).own())") as (_, said),
    ):
        assert not locks.beats(int(said))


def test_another_one_may_own_the_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with killed(BEGINS + f"owner = Ownership(Path({str(path)!r}), owner=True)\nstay('')"):
        Ownership(path, owner=True).close()


#: A process that has used a pool, and a child that is forked from it and uses the same one, and then its own.
USES_ITS_PARENTS = """
import asyncio, json, os, sys
from gpu_pool_client import GpuPoolError, Holder, Process, connect, parse_request
url = sys.argv[1]
def ask(pool, key):
    return pool.request(parse_request("2%"), Holder("ada", process=Process.current()), key)
async def outcome(call):
    try:
        return str(await call)
    except GpuPoolError as error:
        return f"{error.code} {error}"
async def child(pool, lease_id):
    calls = [pool.status(), ask(pool, "its"), pool.get_lease(lease_id)]
    calls += [pool.wait(lease_id), pool.release(lease_id)]
    said = [await outcome(call) for call in calls]
    await pool.close()
    async with connect(url) as own:
        return [*said, (await ask(own, "own")).state.value]
async def main():
    pool = connect(url)
    lease = await ask(pool, "ours")
    return pool, lease.id
pool, lease_id = asyncio.run(main())
if not (pid := os.fork()):
    print(json.dumps([os.getpid(), os.getppid(), asyncio.run(child(pool, lease_id))]), flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(json.dumps(asyncio.run(pool.get_lease(lease_id)).state.value))
"""


@pytest.mark.timeout(300)
def test_a_child_that_uses_its_parents_pool_is_refused_in_words_and_may_have_one_of_its_own(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pool" / "store.db"
    done = subprocess.run(
        [sys.executable, "-c", USES_ITS_PARENTS, f"embedded:{path}"],
        env={**os.environ, "GPU_POOL_DEVICES": "V100-SXM2-32GB:1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    [(child, parent, [*refused, own]), still] = map(json.loads, done.stdout.splitlines())
    assert refused == [
        f"store-unusable Process {child} was forked from process {parent}, and cannot use the pool's store, "
        f"{path}, by what that one has opened. Connect to the pool in the process that uses it."
    ] * len(refused)
    assert (own, still) == ("held", "held")
