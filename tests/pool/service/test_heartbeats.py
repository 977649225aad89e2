"""Over TCP a lease lives for as long as its process is heard of."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.service.heartbeats import Heartbeats, is_remote_process, remote_process
from gpu_pool_client import EndReason, Holder, LeaseState, Pool, Process, connect, parse_request
from gpu_pool_client._processes import boot_id
from gpu_pool_client._remote.client import RemotePool, lease_heartbeat
from support.hub import Hub, HubService, serving_hub
from support.pools import ME, embedded, running, take
from support.ports import free_port
from support.service import ForkServer, asking
from support.stand_in_hub import behind_stand_in
from support.streams import closing

LOG = logging.getLogger("test")
#: Seconds. Whoever lives is heard of three times as often, also on a machine that is busy with other tests.
TTL = 6


@pytest.fixture
async def behind_hub(children: ForkServer, hub: Hub, folder: Path) -> AsyncIterator[HubService]:
    """Take back what was not heard of for ``TTL``."""
    async with serving_hub(children, hub, folder / "pool", f"c.ServeApp.ttl = {TTL}") as service:
        yield service


@pytest.fixture
async def pool(behind_hub: HubService, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    monkeypatch.setenv("GPU_POOL_TOKEN", await hub.token("ada"))
    async with connect(behind_hub.url) as pool:
        yield pool


async def end_of(pool: Pool, lease_id: str) -> EndReason | None:
    async for lease in pool.watch(lease_id):
        if lease.state is LeaseState.ENDED:
            return lease.end_reason
    return None


async def test_the_death_of_a_client_ends_its_lease_and_its_place_in_line(
    behind_hub: HubService, pool: Pool
) -> None:
    with asking(behind_hub.url, "50%", "1") as (client, [held, waiting]):
        client.kill()
        assert await end_of(pool, held) is EndReason.EXPIRED
        assert await end_of(pool, waiting) is EndReason.EXPIRED
    assert f"release {held}: not renewed for {TTL} s" in behind_hub.service.log


@pytest.mark.long
async def test_a_command_over_tcp_outlives_a_restart_of_the_service_and_ends_with_its_lease(
    behind_hub: HubService, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_URL", behind_hub.url)
    words = ["-m", "gpu_pool.cli", "run", "2%", "--", "sh", "-c", "echo $GPU_POOL_LEASE; exec sleep 600"]
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=pipe, stderr=pipe)
    assert program.stdout
    lease_id = (await program.stdout.readline()).decode().strip()
    await behind_hub.service.end()
    await behind_hub.service.start()
    assert (await pool.get_lease(lease_id)).state is LeaseState.HELD
    await pool.release(lease_id)
    _, errors = await asyncio.wait_for(program.communicate(), 120)
    assert program.returncode == 124
    assert b"the slice has ended: it was given back." in errors


async def test_a_client_that_lives_keeps_what_it_has_also_when_its_pool_is_closed(
    behind_hub: HubService, pool: Pool
) -> None:
    async with connect(behind_hub.url) as other:
        mine = [await take(other, "1", "held"), await take(other, "1", "waiting")]
    # Somebody who says nothing loses theirs meanwhile, so time has passed.
    with asking(behind_hub.url, "1") as (client, [lost]):
        client.send_signal(signal.SIGSTOP)
        assert await end_of(pool, lost) is EndReason.EXPIRED
    assert [(await pool.get_lease(each)).state.value for each in mine] == ["held", "waiting"]


@pytest.mark.long
async def test_a_client_with_thousands_of_leases_keeps_each(behind_hub: HubService, pool: Pool) -> None:
    assert isinstance(pool, RemotePool)
    mine = await take(pool, "50%", "held")
    for number in range(8_000):
        lease_heartbeat().keep(pool._endpoint, f"{number}-00000000", 1.0)
    with asking(behind_hub.url, "1") as (client, [lost]):
        client.send_signal(signal.SIGSTOP)
        assert await end_of(pool, lost) is EndReason.EXPIRED
    assert (await pool.get_lease(mine)).state is LeaseState.HELD


@pytest.mark.parametrize(
    ("ttl", "is_stopped"), [(600, False), (TTL, True)], ids=["gives more time", "does not answer"]
)
@pytest.mark.long
async def test_what_another_service_of_the_process_does_ends_no_lease_of_this_one(
    children: ForkServer,
    pool: Pool,
    behind_hub: HubService,
    hub: Hub,
    folder: Path,
    ttl: int,
    is_stopped: bool,
) -> None:
    elsewhere = replace(hub, service_port=free_port())
    async with (
        serving_hub(children, elsewhere, folder / "other", f"c.ServeApp.ttl = {ttl}") as other,
        connect(other.url) as there,
    ):
        mine = await take(pool, "50%", "mine")
        await take(there, "50%", "theirs")
        if is_stopped:
            assert other.service.process
            os.kill(other.service.process.pid, signal.SIGSTOP)
        # Whoever says nothing loses theirs meanwhile, twice, so that time has passed.
        for _ in range(2):
            with asking(behind_hub.url, "50%") as (client, [lost]):
                client.send_signal(signal.SIGSTOP)
                assert await end_of(pool, lost) is EndReason.EXPIRED
        assert (await pool.get_lease(mine)).state is LeaseState.HELD


@pytest.mark.long
async def test_heartbeats_do_not_lift_a_deadline(pool: Pool) -> None:
    lease = await take(pool, "1", "key")
    await pool.attach(lease, Process.current(), ready_within=2.5)
    assert await end_of(pool, lease) is EndReason.NOT_READY


@pytest.mark.long
async def test_a_restart_of_the_service_takes_nothing_from_those_who_live(
    behind_hub: HubService, pool: Pool
) -> None:
    with asking(behind_hub.url, "50%") as (client, [lost]):
        mine, waiting = await take(pool, "50%", "held"), await take(pool, "1", "waiting")
        await behind_hub.service.end(signal.SIGKILL)
        client.kill()
        await behind_hub.service.start()
        # Who is gone is given the whole time anew, and then found out.
        assert await end_of(pool, lost) is EndReason.EXPIRED
    assert (await pool.get_lease(mine)).state is LeaseState.HELD
    assert (await pool.get_lease(waiting)).position == 1


@pytest.mark.long
async def test_a_hub_that_is_away_is_held_against_nobody(
    children: ForkServer, hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_TOKEN", await hub.token("ada"))
    between, port = await way_to(hub)
    settings, api = f"c.ServeApp.ttl = {TTL}", f"http://127.0.0.1:{port}/hub/api"
    async with (
        serving_hub(children, hub, folder / "pool", settings, api=api) as behind,
        connect(behind.url) as pool,
        connect(behind.service.url) as there,
    ):
        lease = await take(pool, "1", "key")
        between.close()
        watching = asyncio.create_task(end_of(there, lease))
        # What was known lately is believed for 5 s; after that the Hub is asked, and fails.
        assert await asyncio.wait([watching], timeout=5 + 3 * TTL) == (set(), {watching})
        watching.cancel()
        await asyncio.wait([watching])


#: What the Hub can be made to say of one's own token, by the options with which one starts a server.
_OWNER = '{"name": "eve", "kind": "user", "scopes": [], "servers": {"": {"user_options": %s}}}'
UNREADABLE = {
    "a lone surrogate": (_OWNER % '{"note": "\\ud800"}').encode(),
    "too deep": (_OWNER % ("[" * 500 + "]" * 500)).encode(),
    "too large": (_OWNER % ('{"note": "' + "x" * 2**21 + '"}')).encode(),
    "a failure": None,
}


@pytest.mark.parametrize("answer", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("is_known", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_a_token_that_cannot_be_asked_about_excuses_nobody_else(
    children: ForkServer, folder: Path, answer: bytes | None, is_known: bool
) -> None:
    async with behind_stand_in(children, folder / "pool", "c.ServeApp.ttl = 3") as (hub, service):
        hub.users = {"bobs": "bob", "eves": "eve"}
        lease = await service.take("bobs")
        if is_known:
            assert (await service.ask("eves", "GET", "/status"))[0] == 200
            # From now on it is asked about anew.
            await asyncio.sleep(5)
            lease = await service.take("bobs", key="anew")
        hub.answers["eves"] = answer
        expected = 503 if answer is None else 401
        is_held = True
        end = time.monotonic() + 120
        while is_held:
            assert (await service.ask("eves", "POST", "/heartbeat", {"leases": []}))[0] == expected
            is_held = (await service.ask("bobs", "GET", f"/leases/{lease['id']}"))[1]["state"] == "held"
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        assert service.service.log.count("What the JupyterHub says of a token") == (answer is not None)
        assert "eves" not in service.service.log


@pytest.mark.long
async def test_whoever_is_known_is_excused_while_the_hub_fails(children: ForkServer, folder: Path) -> None:
    async with behind_stand_in(children, folder / "pool", f"c.ServeApp.ttl = {TTL}") as (hub, service):
        hub.users = {"adas": "ada", "bobs": "bob"}
        adas = (await service.take("adas", key="ada"))["id"]
        bobs = (await service.take("bobs", key="bob"))["id"]
        async with connect(service.service.url) as there:
            watching = asyncio.create_task(end_of(there, bobs))
            hub.answers["adas"] = None
            while not watching.done():
                await service.ask("adas", "POST", "/heartbeat", {"leases": [adas]})
                await asyncio.sleep(0.1)
            # What was known lately is believed for 5 s; after that the Hub is asked, and fails.
            end = time.monotonic() + 8
            while time.monotonic() < end:
                await service.ask("adas", "POST", "/heartbeat", {"leases": [adas]})
                await asyncio.sleep(0.1)
            assert (await there.get_lease(adas)).state is LeaseState.HELD


@pytest.mark.long
async def test_a_hub_that_answers_nobody_is_held_against_nobody(children: ForkServer, folder: Path) -> None:
    async with behind_stand_in(children, folder / "pool", f"c.ServeApp.ttl = {TTL}") as (hub, service):
        hub.users = {"bobs": "bob"}
        lease = (await service.take("bobs"))["id"]
        hub.is_well = False
        end = time.monotonic() + 5 * TTL
        while time.monotonic() < end:
            assert (await service.ask("any", "POST", "/heartbeat", {"leases": []}))[0] == 503
            await asyncio.sleep(0.1)
        async with connect(service.service.url) as there:
            assert (await there.get_lease(lease)).state is LeaseState.HELD


async def way_to(hub: Hub) -> tuple[asyncio.Server, int]:
    """Return a way to the Hub that can be closed, and its port."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while part := await source.read(65536):
                target.write(part)
        finally:
            target.close()

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with closing(writer):
            there, away = await asyncio.open_connection("127.0.0.1", hub.port)
            async with closing(away):
                await asyncio.gather(copy(reader, away), copy(there, writer))

    between = await asyncio.start_server(lead, "127.0.0.1", 0)
    return between, between.sockets[0].getsockname()[1]


async def test_a_forged_pid_is_passed_over(behind_hub: HubService, hub: Hub) -> None:
    token = await hub.token("ada")
    lease = (await behind_hub.take(token))["id"]
    with running() as victim:
        seen = Process.of(victim.pid)
        assert seen
        claim = {"pid": seen.pid, "start": seen.start, "boot": seen.boot, "namespace": seen.namespace}
        status, answer = await behind_hub.ask(token, "POST", f"/leases/{lease}/attach", {"process": claim})
        assert (status, answer["process"], answer["holder"]["process"]) == (200, None, None)
        async with connect(behind_hub.service.url) as there:
            assert (await there.get_lease(lease)).process is None
    store = (behind_hub.service.folder / "store.db").read_bytes()
    store += (behind_hub.service.folder / "store.db-wal").read_bytes()
    assert f"{seen.pid}/{seen.start}".encode() not in store


async def test_nothing_can_be_done_to_what_stands_for_a_process() -> None:
    stand_in = remote_process("ada", "lab", "client", boot_id())
    assert is_remote_process(stand_in)
    assert stand_in.is_alive() is None
    with pytest.raises(ProcessLookupError):
        os.kill(stand_in.pid, 0)


async def test_a_service_that_could_not_hear_ends_nothing(tmp_path: Path) -> None:
    now = 0.0
    heartbeats = Heartbeats(10, LOG, lambda: now)
    async with embedded(tmp_path / "store.db") as pool:
        holder = Holder("ada", process=remote_process("ada", "", "", boot_id()))
        lease = await pool.request(parse_request("2%"), holder, "key")
        assert heartbeats.begin(lease)
        assert not heartbeats.begin(await pool.request(parse_request("2%"), ME, "seen"))
        assert heartbeats.beat("ada", [lease.id, "1-other"]) == ["1-other"]
        now = 100.0
        await heartbeats.end_unheard(pool, [lease], now)
        assert (await pool.get_lease(lease.id)).state is LeaseState.HELD
        for now in (104.0, 108.0, 111.0):
            await heartbeats.end_unheard(pool, [lease], now)
        assert (await pool.get_lease(lease.id)).end_reason is EndReason.EXPIRED
        assert heartbeats.beat("ada", [lease.id]) == [lease.id]
