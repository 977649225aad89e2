"""Which process keeps a lease: the one that asked, or one that is the caller's and is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from gpu_pool_client import BadRequest, LeaseState, NotAllowed, Pool, Process
from support.pools import eventually, identity, running, take
from support.service import Service
from support.users import NOBODY, SOMEBODY, Users

TAKE = 'lease = await pool.request(parse_request("2%"), Holder(""), "key")\n'


async def test_a_client_that_is_killed_loses_its_leases(users: Users, pool: Pool) -> None:
    lease_id, process = await users.start(NOBODY, f"{TAKE}return lease.id")
    waiting = await take(pool, "1", "next")
    os.kill(process.pid, 9)
    assert (await pool.wait(waiting, 20)).state is LeaseState.HELD
    assert (await pool.get_lease(lease_id)).end_reason == "process-gone"


async def test_a_process_of_the_callers_own_keeps_the_lease(users: Users, pool: Pool) -> None:
    _, child = await users.start(NOBODY, "return None")
    lease_id = await users.run(NOBODY, f"{TAKE}await pool.attach(lease.id, {child!r})\nreturn lease.id")
    assert [lease.id for lease in (await pool.status()).leases] == [lease_id]
    os.kill(child.pid, 9)
    await eventually(lambda: not child.is_alive())
    assert (await pool.status()).leases == ()


async def test_a_process_of_another_user_cannot_be_attached(users: Users) -> None:
    for uid in (SOMEBODY, 0):
        _, theirs = await users.start(uid, "return None")
        with pytest.raises(NotAllowed, match=f"Process {theirs.pid} is not yours"):
            await users.run(NOBODY, f"{TAKE}await pool.attach(lease.id, {theirs!r})")


async def test_a_forged_process_cannot_be_attached(pool: Pool) -> None:
    lease_id = await take(pool, "2%", "key")
    with running() as process:
        real = identity(process)
        for forged in (
            replace(real, start=real.start + 1),
            replace(real, boot="another"),
            replace(real, namespace="pid:[1]"),
            replace(real, pid=0),
            replace(real, pid=-1),
        ):
            with pytest.raises(BadRequest, match="rocess"):
                await pool.attach(lease_id, forged)
    with pytest.raises(BadRequest, match="it has ended"):
        await pool.attach(lease_id, real)


IN_A_CONTAINER = """
import asyncio, json, subprocess, sys
from dataclasses import replace
from gpu_pool_client import GpuPoolError, Holder, Process, connect, parse_request

async def act(url, outside):
    async with connect(url) as pool:
        mine = await pool.request(parse_request("2%"), Holder("root"), "mine")
        kernel = subprocess.Popen(["sleep", "1000"])
        theirs = await pool.request(parse_request("2%"), Holder("root"), "kernel")
        await pool.attach(theirs.id, Process.of(kernel.pid))
        refused = []
        other = replace(Process.of(kernel.pid), start=1)
        for attempt in (
            pool.drain("0"), pool.attach(mine.id, Process(*outside)), pool.attach(mine.id, other)
        ):
            try:
                await attempt
            except GpuPoolError as error:
                refused.append(error.code)
        seen = [lease.id for lease in (await pool.status()).leases]
        print(json.dumps([mine.id, theirs.id, seen, kernel.pid, refused]), flush=True)
        sys.stdin.readline()
        kernel.kill()
        kernel.wait()
        print("killed", flush=True)
        sys.stdin.readline()

asyncio.run(act(*json.loads(sys.argv[1])))
"""


def in_a_container(told: str) -> subprocess.Popen[str]:
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", IN_A_CONTAINER, told]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make pid namespaces everywhere")
async def test_processes_in_a_container_are_found(service: Service, pool: Pool) -> None:
    ours = await take(pool, "2%", "outside")
    me = Process.current()
    told = json.dumps([service.url, [me.pid, me.start, me.boot, me.namespace]])
    with in_a_container(told) as contained:
        assert contained.stdin
        assert contained.stdout
        mine, kernels, seen, pid_inside, refused = json.loads(contained.stdout.readline())
        # Root in there is not root here: it sees its own alone, and is no administrator.
        assert seen == [mine, kernels]
        assert refused == ["not-allowed", "not-allowed", "bad-request"]
        lease = await pool.get_lease(kernels)
        assert lease.holder.user == "uid-0"
        assert lease.process
        assert lease.process.pid != pid_inside
        assert lease.process.is_alive()
        contained.stdin.write("\n")
        contained.stdin.flush()
        assert contained.stdout.readline() == "killed\n"
        assert [each.id for each in (await pool.status()).leases] == [ours, mine]
        contained.communicate("\n")
    assert [each.id for each in (await pool.status()).leases] == [ours]
