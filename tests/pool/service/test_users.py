"""Everybody asks, sees and changes in their own name only."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_pool_client import (
    EndReason,
    Holder,
    LeaseGone,
    LeaseState,
    NotAllowed,
    Pool,
    Process,
    connect,
    parse_request,
)
from gpu_pool_client._remote.exchange import ask
from support.pools import take
from support.service import ForkServer, Service, serving
from support.users import NOBODY, SOMEBODY, Users

TAKE = 'return (await pool.request(parse_request({size!r}), Holder("root"), {key!r})).id'


async def test_who_asks_is_seen_and_not_told(pool: Pool, users: Users) -> None:
    lease_id, process = await users.start(NOBODY, TAKE.format(size="2%", key="key"))
    holder = (await pool.get_lease(lease_id)).holder
    assert (holder.user, holder.process) == ("nobody", process)


async def test_a_forged_holder_is_passed_over(service: Service, pool: Pool) -> None:
    forged = {"user": "ada", "process": {"pid": 1, "start": 1, "boot": "", "namespace": ""}}
    body = {"request": "2%", "key": "key", "holder": forged, **forged}
    answer = await ask(service.socket, "POST", "/api/v1/leases", json.dumps(body).encode(), 10)
    holder = (await pool.get_lease(json.loads(answer.body)["id"])).holder
    assert holder.process == Process.current()
    assert holder.user != "ada"


async def test_a_user_without_a_name_has_a_number(pool: Pool, users: Users) -> None:
    lease_id, _ = await users.start(SOMEBODY, TAKE.format(size="2%", key="key"))
    assert (await pool.get_lease(lease_id)).holder.user == f"uid-{SOMEBODY}"


async def test_one_key_of_two_users_is_two_requests(users: Users) -> None:
    mine, _ = await users.start(NOBODY, TAKE.format(size="2%", key="key"))
    again = await users.run(NOBODY, TAKE.format(size="2%", key="key"))
    theirs = await users.run(SOMEBODY, TAKE.format(size="2%", key="key"))
    assert mine == again != theirs


@pytest.mark.parametrize("key", ["key", "k" * 128])
async def test_a_lease_has_the_key_that_was_given(pool: Pool, key: str) -> None:
    lease = await pool.request(parse_request("2%"), Holder(""), key)
    assert lease.key == key
    assert (await pool.request(parse_request("2%"), Holder(""), key)).id == lease.id


@pytest.mark.parametrize(
    "call",
    [
        "pool.get_lease({id!r})",
        "pool.wait({id!r}, 0)",
        "pool.watch({id!r}).__anext__()",
        "pool.explain({id!r})",
        "pool.attach({id!r}, Process.current())",
        "pool.renew({id!r}, 0)",
        "pool.activity({id!r})",
        'pool.resize({id!r}, parse_request("2%"))',
        "pool.park({id!r})",
        "pool.resume({id!r})",
    ],
)
async def test_anothers_lease_is_like_one_that_never_was(users: Users, pool: Pool, call: str) -> None:
    lease_id = await take(pool, "50%", "key")
    unknown = "9-00000000"
    with pytest.raises(LeaseGone) as theirs:
        await users.run(NOBODY, f"await {call.format(id=lease_id)}")
    with pytest.raises(LeaseGone) as none:
        await users.run(NOBODY, f"await {call.format(id=unknown)}")
    assert str(theirs.value) == str(none.value).replace(unknown, lease_id)
    assert theirs.value.reason is None
    assert (await pool.get_lease(lease_id)).state is LeaseState.HELD


async def test_nobody_ends_anothers_lease(users: Users, pool: Pool) -> None:
    lease_id = await take(pool, "50%", "key")
    await users.run(NOBODY, f"await pool.release({lease_id!r})")
    assert (await pool.get_lease(lease_id)).state is LeaseState.HELD


async def test_others_are_seen_as_totals_and_places_only(users: Users, pool: Pool) -> None:
    held = await take(pool, "1", "held")
    first, _ = await users.start(SOMEBODY, TAKE.format(size="2%", key="first"))
    body = """
mine = await pool.request(parse_request("2%"), Holder(""), "key")
status = await pool.status()
return [mine.id, [lease.id for lease in (*status.leases, *status.queue)], status.queue[0].position,
        status.devices[0].held_milli, await pool.history()]
"""
    await pool.release(await take(pool, "2%", "ended"))
    mine, seen, place, total, history = await users.run(NOBODY, body)
    assert (seen, place, total, history) == ([mine], 2, 1000, [])
    status = await pool.status()
    assert [lease.id for lease in (*status.leases, *status.queue)][:2] == [held, first]


async def test_administrators_see_and_end_all(users: Users, pool: Pool) -> None:
    lease_id, _ = await users.start(NOBODY, TAKE.format(size="2%", key="key"))
    assert [lease.id for lease in (await pool.status()).leases] == [lease_id]
    await pool.release(lease_id, EndReason.REVOKED)
    assert (await pool.get_lease(lease_id)).end_reason is EndReason.REVOKED
    assert [row.user for row in await pool.history()] == ["nobody"]


@pytest.mark.parametrize("reason", ["", ", EndReason.IDLE", ", EndReason.WITHDRAWN"])
async def test_what_an_administrator_ends_of_somebody_elses_is_revoked(
    users: Users, pool: Pool, reason: str
) -> None:
    take_one = TAKE.format(size="2%", key="key") + "\n"
    theirs, _ = await users.start(NOBODY, take_one)
    mine, _ = await users.start(0, take_one)
    for lease_id in (theirs, mine):
        await users.run(0, f"await pool.release({lease_id!r}{reason})")
    ended = [(await pool.get_lease(lease_id)).end_reason for lease_id in (theirs, mine)]
    assert ended[0] is EndReason.REVOKED
    assert ended[1] is not EndReason.REVOKED
    assert (await pool.history())[0].reason == "revoked"
    with pytest.raises(LeaseGone, match="revoked"):
        await users.run(NOBODY, f"await pool.renew({theirs!r})")


async def test_the_command_of_an_administrator_says_what_it_has_revoked(
    users: Users, pool: Pool, service: Service
) -> None:
    theirs, _ = await users.start(NOBODY, TAKE.format(size="2%", key="key"))
    told = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "gpu_pool.cli", "release", theirs],
        env={**os.environ, "GPU_POOL_URL": service.url},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == f"Revoked 2% (lease {theirs}) of nobody, who is notified.\n"
    assert (await pool.get_lease(theirs)).end_reason is EndReason.REVOKED


#: Shows a pool as root and then as another user, who may be unable to read what is imported later.
_SHOWN = """
import os
from gpu_pool.cli import main
for uid in (0, {uid}):
    os.setgid(uid)
    os.setuid(uid)
    main(["status"])
    main(["list", "-d"])
    print("---", flush=True)
"""


@pytest.mark.long
async def test_the_command_of_a_user_does_not_say_that_others_hold_nothing(
    users: Users, pool: Pool, service: Service
) -> None:
    theirs = await take(pool, "50%", "key")
    command = [sys.executable, "-c", _SHOWN.format(uid=NOBODY)]

    async def shown() -> list[str]:
        told = await asyncio.to_thread(
            subprocess.run,
            command,
            env={**os.environ, "GPU_POOL_URL": service.url},
            capture_output=True,
            text=True,
            check=True,
        )
        return told.stdout.split("---\n")[:2]

    administrator, user = await shown()
    assert administrator.count(theirs) == 2
    assert user.count("You hold nothing; what others hold is shown to them and to administrators.") == 2
    await pool.release(theirs)
    assert [said.count("Nothing is held") for said in await shown()] == [2, 2]


async def test_users_cannot_do_what_administrators_can(users: Users) -> None:
    with pytest.raises(NotAllowed, match="Only an administrator can drain"):
        await users.run(NOBODY, 'await pool.drain("0")')
    revoke = 'lease = await pool.request(parse_request("2%"), Holder(""), "key")\n'
    with pytest.raises(NotAllowed, match="as revoked"):
        await users.run(NOBODY, revoke + "await pool.release(lease.id, EndReason.REVOKED)")
    assert await users.run(NOBODY, revoke + "await pool.release(lease.id, EndReason.IDLE)") is None


async def test_administrators_are_named_in_the_settings(children: ForkServer, folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be other users")
    settings = 'c.ServeApp.admins = ["nobody"]\nc.ServeApp.mode = "0666"'
    async with serving(children, folder / "pool", settings) as service:
        users = Users(service)
        assert await users.run(NOBODY, 'return (await pool.drain("0")).drained')
        with pytest.raises(NotAllowed):
            await users.run(SOMEBODY, 'await pool.drain("0")')


async def test_a_service_need_not_be_roots(children: ForkServer, folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be other users")
    service = Service(children, folder / "pool", ("--mode=0666",), uid=NOBODY)
    service.configure("")
    os.chown(service.folder, NOBODY, NOBODY)
    await service.start()
    users = Users(service)
    attach = 'lease = await pool.request(parse_request("2%"), Holder(""), "key")\n'
    attach += "return (await pool.attach(lease.id, Process.current())).holder.user"
    assert await users.run(SOMEBODY, attach) == f"uid-{SOMEBODY}"
    with pytest.raises(NotAllowed):
        await users.run(SOMEBODY, 'await pool.drain("0")')
    assert await users.run(NOBODY, 'return (await pool.drain("0")).drained')
    await service.end()


async def test_whoever_may_not_connect_is_told(children: ForkServer, folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be other users")
    async with serving(children, folder / "pool") as service, connect(service.url) as pool:
        assert (await pool.status()).queue == ()
        with pytest.raises(Exception, match="You may not use the pool"):
            await Users(service).run(NOBODY, "await pool.status()")
