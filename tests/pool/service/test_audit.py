"""The audit log of a service: who asked, how that is known, and what they were refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gpu_pool_client import Holder, NotAllowed, connect, parse_request
from gpu_pool_client._remote.exchange import ask
from support.hub import ADMIN, Hub, serving_hub
from support.pools import eventually, take
from support.service import ForkServer, Service, serving
from support.users import NOBODY, Users


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def logging_to(path: Path) -> str:
    return f"c.PoolSettings.audit_log = {str(path)!r}\n"


async def test_over_the_socket_it_is_the_system_that_says_who_asks(
    children: ForkServer, folder: Path
) -> None:
    log = folder / "audit.jsonl"
    async with serving(children, folder / "pool", logging_to(log), "--mode=0666") as service:
        async with connect(service.url) as pool:
            lease_id = await take(pool, "2%", "key", Holder("somebody\nelse"))
            await pool.release(lease_id)
        granted, ended = lines(log)
        assert (granted["event"], granted["by"], granted["user"]) == ("granted", ADMIN, ADMIN)
        assert (granted["via"], granted["uid"], granted["pid"]) == ("socket", os.geteuid(), os.getpid())
        assert (ended["event"], ended["reason"], ended["by"]) == ("ended", "released", ADMIN)
        answer = await ask(service.socket, "POST", "/api/v1/leases", b"{", 20)
        refused = lines(log)[-1]
        assert (refused["event"], refused["reason"]) == ("refused", "bad-request")
        assert refused["action"] == "POST /api/v1/leases"
        assert answer.headers["X-Request-Id"] == refused["request_id"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
async def test_what_somebody_may_not_is_told_with_their_name(children: ForkServer, folder: Path) -> None:
    log = folder / "audit.jsonl"
    async with serving(children, folder / "pool", logging_to(log), "--mode=0666") as service:
        users = Users(service)
        with pytest.raises(NotAllowed):
            await users.run(NOBODY, "await pool.drain('0')")
        (refused,) = lines(log)
        assert (refused["by"], refused["uid"], refused["reason"]) == ("nobody", NOBODY, "not-allowed")
        assert refused["action"] == "POST /api/v1/devices/0/drain"
        users.close()


async def test_behind_a_hub_it_is_the_hub_and_no_token_is_told(
    children: ForkServer, hub: Hub, folder: Path
) -> None:
    log = folder / "audit.jsonl"
    async with serving_hub(children, hub, folder / "pool", logging_to(log)) as behind:
        token, admin, server = (
            await hub.token("ada"),
            await hub.token(ADMIN),
            await hub.start_server("ada", "lab"),
        )
        mine = await behind.take(server, "1", "first")
        await behind.take(token, "1", "second")
        assert (await behind.ask("of-nobody", "POST", "/leases", {"request": "2%", "key": "k"}))[0] == 401
        assert (await behind.ask(token, "POST", "/devices/0/drain", {"drained": True}))[0] == 403
        assert (await behind.ask(admin, "DELETE", f"/leases/{mine['id']}"))[0] == 200
        told = [(each["event"], each.get("via"), each.get("by"), each.get("server")) for each in lines(log)]
        assert told == [
            ("granted", "server", "ada", "lab"),
            ("queued", "token", "ada", None),
            ("refused", "token", "ada", None),
            ("ended", "token", ADMIN, None),
            ("granted", None, None, None),
        ]
        assert lines(log)[3]["reason"] == "revoked"  # whatever reason they gave: it is another's lease
        assert not any(secret in log.read_text() for secret in (token, admin, server))
        await hub.stop_server("ada", "lab")


async def test_a_lease_that_is_not_heard_of_expires_in_nobodys_name(
    children: ForkServer, hub: Hub, folder: Path
) -> None:
    log = folder / "audit.jsonl"
    settings = f"c.ServeApp.ttl = 1\n{logging_to(log)}"
    async with serving_hub(children, hub, folder / "pool", settings) as behind:
        await behind.take(await hub.token("ada"))
        await eventually(lambda: len(lines(log)) == 2)
        assert (lines(log)[1]["reason"], "by" in lines(log)[1]) == ("expired", False)


async def test_it_is_opened_anew_on_a_signal(children: ForkServer, folder: Path) -> None:
    log = folder / "audit.jsonl"
    async with serving(children, folder / "pool", logging_to(log)) as service:
        log.rename(folder / "audit.1")
        assert service.process
        os.kill(service.process.pid, signal.SIGHUP)
        await eventually(log.exists)
        assert service.process.is_alive()
        async with connect(service.url) as pool:
            await take(pool, "2%", "key")
        assert [each["event"] for each in lines(log)] == ["granted"]


async def test_a_full_disk_is_in_the_numbers_and_stops_nothing(children: ForkServer, folder: Path) -> None:
    async with serving(children, folder / "pool", logging_to(Path("/dev/full"))) as service:
        async with connect(service.url) as pool:
            await pool.request(parse_request("2%"), Holder(""), "key")
            await pool.request(parse_request("2%"), Holder(""), "other")
        page = (await ask(service.socket, "GET", "/metrics", None, 20)).body
        assert b"gpu_pool_audit_lines_lost_total 2.0" in page
        assert service.log.count("/dev/full cannot be written: No space left on device") == 1


async def test_a_service_does_not_start_with_a_log_that_cannot_be_written(
    children: ForkServer, folder: Path
) -> None:
    service = Service(children, folder / "pool")
    service.configure(logging_to(folder / "missing" / "audit.jsonl"))
    process = service.launch()
    await eventually(lambda: not process.is_alive())
    assert "cannot be written: No such file or directory" in service.log
    assert "c.PoolSettings.audit_log" in service.log
