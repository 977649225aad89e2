"""A real JupyterHub alone says who asks over TCP."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from gpu_pool_client import Holder, LeaseGone, NotAllowed, PoolUnreachable, connect, parse_request
from gpu_pool_spawner.pool_view import PoolView
from support.hub import ADMIN, SECRET, TESTER, Hub, HubService, serving_hub
from support.pools import take
from support.service import ForkServer
from support.users import NOBODY, Users

OWN_SERVICE = ["access:services!service=gpu-pool"]


async def test_a_servers_own_token_says_user_groups_and_server(behind_hub: HubService, hub: Hub) -> None:
    token = await hub.start_server("ada", "lab")
    lease = await behind_hub.take(token)
    assert lease["holder"]["user"] == "ada"
    assert f"ada[hub:lab]: request 2%: lease {lease['id']}" in behind_hub.service.log


async def test_the_token_of_a_server_that_was_stopped_is_refused_at_once(
    behind_hub: HubService, hub: Hub
) -> None:
    token = await hub.start_server("ada", "short")
    await behind_hub.take(token)
    await hub.stop_server("ada", "short")
    status, problem = await behind_hub.ask(token, "POST", "/leases", {"request": "2%", "key": "more"})
    assert (status, problem["code"]) == (401, "not-allowed")


async def test_a_revoked_token_is_refused_at_once(behind_hub: HubService, hub: Hub) -> None:
    token = await hub.token("ada")
    lease = await behind_hub.take(token)
    await hub.revoke(token)
    assert (await behind_hub.ask(token, "DELETE", f"/leases/{lease['id']}"))[0] == 401


async def test_an_expired_token_is_refused(behind_hub: HubService, hub: Hub) -> None:
    token = await hub.token("ada", expires_in=1)
    while (await hub.status_of(token)) == 200:
        pass
    assert (await behind_hub.ask(token, "POST", "/leases", {"request": "2%", "key": "key"}))[0] == 401


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer nonsense",
        "Basic YWRhOmFkYQ==",
        "Bearer " + "x" * 4096,
    ],
)
async def test_whoever_is_nobody_to_the_hub_is_refused(behind_hub: HubService, header: str) -> None:
    for method, path in (
        ("GET", "/status"),
        ("POST", "/leases"),
        ("DELETE", "/leases/1-0"),
        ("POST", "/heartbeat"),
    ):
        status, problem = await behind_hub.ask(None, method, path, {}, Authorization=header)
        assert (status, problem["code"]) == (401, "not-allowed")


async def test_a_token_counts_in_its_header_only(behind_hub: HubService, hub: Hub) -> None:
    token = await hub.token("ada")
    cookie = {"Cookie": f"service-gpu-pool={token}; token={token}", "Sec_Fetch_Mode": "websocket"}
    assert (await behind_hub.ask(None, "GET", f"/status?token={token}", **cookie))[0] == 401
    assert (await behind_hub.ask(token, "GET", "/status"))[0] == 200


async def test_tokens_of_services_and_tokens_for_others_are_refused(behind_hub: HubService, hub: Hub) -> None:
    # One that another service got of its visitor, say: it names the visitor, and nothing more.
    of_another_service = await hub.token("ada", scopes=["read:users:name!user=ada"])
    # One that an administrator's browser has left at a student's server.
    left_by_a_visitor = await hub.token(ADMIN, scopes=["access:servers!server=ada/"])
    for token in (SECRET, of_another_service, left_by_a_visitor):
        status, problem = await behind_hub.ask(token, "GET", "/status")
        assert (status, problem["code"]) == (403, "not-allowed"), problem
        assert "may not access the pool" in problem["message"]


async def test_a_service_that_may_access_the_pool_reads_what_is_free(
    behind_hub: HubService, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await behind_hub.take(await hub.token("ada"), "60%")
    waiting = await behind_hub.take(await hub.token("bob"), "60%")
    assert (held["state"], waiting["state"]) == ("held", "waiting")
    status, seen = await behind_hub.ask(TESTER, "GET", "/status")
    assert status == 200
    assert seen["devices"][0]["held_milli"] == 600
    assert "ada" not in str(seen)
    assert "bob" not in str(seen)
    # What the spawn page says by it, which does not see the line.
    monkeypatch.setenv("GPU_POOL_TOKEN", TESTER)
    offered = [("ml", parse_request("50%")), ("ml", parse_request("40%"))]
    supply = await PoolView(behind_hub.url).supply(offered)
    assert supply is not None
    assert supply.waits[offered[0]] == "1 in the queue before you"


async def test_a_service_is_nobody_with_slices(behind_hub: HubService, hub: Hub) -> None:
    lease = (await behind_hub.take(await hub.token("ada")))["id"]
    for method, path, body in (
        ("POST", "/leases", {"request": "2%", "key": "key"}),
        ("GET", f"/leases/{lease}", None),
        ("DELETE", f"/leases/{lease}", None),
        ("POST", f"/leases/{lease}/renew", {}),
        ("POST", "/heartbeat", {"leases": [lease]}),
        ("GET", "/history", None),
        ("POST", "/devices/0/drain", {"drained": True}),
        ("GET", "/forecast?request=2%25", None),
        ("GET", "/forecast?request=2%25&course=ml", None),
    ):
        status, problem = await behind_hub.ask(TESTER, method, path, body)
        assert (status, problem["code"]) == (403, "not-allowed"), (method, path, problem)
    assert (await behind_hub.ask(TESTER, "GET", "/forecast?request=2%25&anybody=1")) == (200, None)


async def test_administrators_are_the_hubs_and_not_their_servers(behind_hub: HubService, hub: Hub) -> None:
    student, admin = await hub.token("ada"), await hub.token(ADMIN, scopes=OWN_SERVICE)
    notebook = await hub.start_server(ADMIN)
    lease = await behind_hub.take(student)
    for token in (student, notebook):
        assert (await behind_hub.ask(token, "POST", "/devices/0/drain", {"drained": True}))[0] == 403
    assert (await behind_hub.ask(notebook, "GET", f"/leases/{lease['id']}"))[0] == 404
    assert (await behind_hub.ask(admin, "POST", "/devices/0/drain", {"drained": True}))[0] == 200
    _, seen = await behind_hub.ask(admin, "GET", "/status")
    assert [each["holder"]["user"] for each in seen["leases"]] == ["ada"]


async def test_users_see_and_end_their_own_only(behind_hub: HubService, hub: Hub) -> None:
    ada, bob = await hub.token("ada"), await hub.token("bob")
    lease = (await behind_hub.take(ada, "50%"))["id"]
    assert (await behind_hub.take(bob, "2%", "key"))["id"] != lease
    assert (await behind_hub.ask(bob, "GET", f"/leases/{lease}"))[0] == 404
    assert (await behind_hub.ask(bob, "DELETE", f"/leases/{lease}"))[0] == 200  # and nothing happened
    assert (await behind_hub.ask(bob, "POST", "/heartbeat", {"leases": [lease]}))[1] == {"unknown": [lease]}
    _, seen = await behind_hub.ask(bob, "GET", "/status")
    assert [each["holder"]["user"] for each in seen["leases"]] == ["bob"]
    assert seen["devices"][0]["held_milli"] == 520
    assert (await behind_hub.ask(ada, "GET", f"/leases/{lease}"))[1]["state"] == "held"


async def test_a_forged_holder_and_forged_proxy_headers_say_nothing(behind_hub: HubService, hub: Hub) -> None:
    forged = {"user": "bob", "holder": {"user": "bob"}, "request": "2%", "key": "key"}
    headers = {
        "X_Forwarded_For": "10.0.0.1",
        "X_Real_Ip": "10.0.0.1",
        "X_Forwarded_User": "bob",
        "Remote_User": "bob",
        "Host": "evil.example",
    }
    status, lease = await behind_hub.ask(await hub.token("ada"), "POST", "/leases", forged, **headers)
    assert (status, lease["holder"]["user"]) == (200, "ada")
    assert "evil.example" not in str(lease)


async def test_tokens_are_in_no_log(behind_hub: HubService, hub: Hub) -> None:
    token = await hub.token("ada")
    await behind_hub.take(token)
    await behind_hub.ask(token, "GET", f"/nothing?token={token}")
    await behind_hub.ask(None, "GET", f"/status?token={token}")
    await behind_hub.ask(token, "POST", "/leases", {"request": "never", "key": token})
    await hub.revoke(token)
    await behind_hub.ask(token, "POST", "/leases", {"request": "2%", "key": "more"})
    for secret in (token, SECRET):
        assert secret not in behind_hub.service.log


async def test_the_hubs_users_and_the_machines_are_different_people(
    behind_hub: HubService, hub: Hub, users_behind: Users
) -> None:
    mine = await behind_hub.take(await hub.token("nobody"))
    lease = f"return (await pool.get_lease({mine['id']!r})).id"
    with pytest.raises(LeaseGone):
        await users_behind.run(NOBODY, lease)
    asked = 'return (await pool.request(parse_request("2%"), Holder(""), "key")).holder.user'
    assert await users_behind.run(NOBODY, asked) == "local/nobody"


async def test_with_system_users_a_process_is_attached_over_the_socket(
    children: ForkServer, hub: Hub, folder: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be other users")
    settings = 'c.ServeApp.system_users = "{username}"'
    async with serving_hub(children, hub, folder / "pool", settings, "--mode=0666") as behind:
        users = Users(behind.service)
        token = await hub.token("nobody")
        lease = (await behind.take(token))["id"]
        attach = f"return (await pool.attach({lease!r}, Process.current())).process.pid"
        pid, process = await users.start(NOBODY, attach)
        assert pid == process.pid
        users.close()
        status, ended = 200, {"state": "held"}
        while ended["state"] != "ended":
            status, ended = await behind.ask(token, "GET", f"/leases/{lease}")
        assert (status, ended["end_reason"]) == (200, "process-gone")


async def test_a_hub_that_does_not_answer_is_waited_for(
    behind_hub: HubService, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_TOKEN", await hub.token("ada"))
    async with connect(behind_hub.url) as pool:
        await take(pool, "2%", "first")
        hub.signal(signal.SIGSTOP)
        asking = asyncio.create_task(pool.request(parse_request("2%"), Holder(""), "second"))
        assert await asyncio.wait([asking], timeout=0.3) == (set(), {asking})
        hub.signal(signal.SIGCONT)
        assert (await asking).slices


async def test_without_a_hub_nobody_is_known(
    children: ForkServer, folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving_hub(children, hub, folder / "pool", "", api="http://127.0.0.1:1/hub/api") as behind:
        status, problem = await behind.ask("anything", "POST", "/leases", {"request": "2%", "key": "key"})
        assert (status, problem["code"]) == (503, "pool-unreachable")
        monkeypatch.setenv("GPU_POOL_TOKEN", "anything")
        async with connect(behind.url) as pool:
            with pytest.raises(PoolUnreachable):
                await pool.status()


async def test_a_client_without_a_token_is_told_where_there_is_one(
    behind_hub: HubService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUPYTERHUB_API_TOKEN", raising=False)
    async with connect(behind_hub.url) as pool:
        with pytest.raises(NotAllowed, match="GPU_POOL_TOKEN"):
            await pool.status()
