"""Connections, in any number, from one address or person: others still get theirs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from gpu_pool_client import PoolUnreachable, Process
from gpu_pool_client._log import RareWarnings
from gpu_pool_client._remote.exchange import ask
from support.hub import PREFIX, HubService
from support.pools import eventually
from support.readable import is_readable
from support.service import ForkServer, Service, is_closed, serving
from support.stand_in_hub import Outcome, StandInHub, ask_from, behind_stand_in
from support.users import NOBODY, SOMEBODY, Users

ATTACKER, STUDENT, PROXY = "127.0.0.2", "127.0.0.3", "127.0.0.4"
QUESTION = "GET {prefix}api/v1/{path} HTTP/1.1\r\nHost: x\r\n{more}\r\n"
SLOW = f"POST {PREFIX}api/v1/leases HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n{{more}}\r\n"
BY_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")


@contextmanager
def connected(service: HubService, address: str, sent: str = "") -> Iterator[socket.socket]:
    where = "127.0.0.1", service.hub.service_port
    with closing(socket.create_connection(where, 20, (address, 0))) as connection:
        connection.sendall(sent.encode())
        yield connection


def question_of(token: str, path: str = "status") -> str:
    return QUESTION.format(prefix=PREFIX, path=path, more=f"Authorization: Bearer {token}\r\n")


async def wait_of(service: HubService, token: str) -> str:
    """Ask for more than is free; return the question that is answered once there is."""
    lease = await service.take(token, "1", f"waits-{token}")
    assert lease["state"] == "waiting"
    return question_of(token, f"leases/{lease['id']}/wait?seconds=300")


async def refused_beside(
    stack: ExitStack, service: HubService, waits: Sequence[tuple[str, str]], token: str
) -> Outcome:
    """Ask beside questions that wait, each from an address, until that is refused; return how."""
    opened: dict[int, socket.socket] = {}
    while (found := await ask_from(service, STUDENT, token)).status == 200:
        for number, (address, question) in enumerate(waits):
            # One may have been refused itself, beside whoever had asked before.
            if number not in opened or is_readable(opened[number]):
                opened[number] = stack.enter_context(connected(service, address, question))
    return found


async def first_line(connection: socket.socket) -> str:
    connection.setblocking(False)
    return (await asyncio.get_running_loop().sock_recv(connection, 12)).decode()


async def fill(stack: ExitStack, hub: StandInHub, service: HubService) -> list[socket.socket]:
    """Connect with made-up tokens, as many as the Hub is asked about at once, and wait until it is."""
    before, opened = len(hub.asked), []
    for number in range(4):
        opened.append(stack.enter_context(connected(service, ATTACKER, question_of(f"made-up-{number}"))))
        await eventually(lambda asked=before + number: len(hub.asked) > asked)
    return opened


# -- Over TCP ----------------------------------------------------------------


async def test_one_address_has_so_many_connections_and_is_not_shut_out_itself(
    children: ForkServer, open_folder: Path
) -> None:
    async with behind_stand_in(children, open_folder / "pool", "c.ServeApp.max_unknown_clients = 5") as (
        hub,
        service,
    ):
        hub.users = {"grace": "grace"}
        with ExitStack() as stack:
            opened = [stack.enter_context(connected(service, ATTACKER)) for _ in range(40)]
            await eventually(lambda: sum(map(is_closed, opened)) == 35)
            # The oldest have ended for the new ones, and one more ends for whoever asks something.
            assert not any(map(is_closed, opened[-5:]))
            for address in (STUDENT, ATTACKER):
                assert (await ask_from(service, address, "grace")).status == 200
        assert service.service.log.count(f"address {ATTACKER}: 5 connections already") == 1


async def test_who_sends_a_request_slowly_gives_way_too(children: ForkServer, open_folder: Path) -> None:
    async with behind_stand_in(children, open_folder / "pool", "c.ServeApp.max_unknown_clients = 5") as (
        hub,
        service,
    ):
        hub.users = {"grace": "grace"}
        with ExitStack() as stack:
            for part in range(40):
                slow = SLOW.format(more="")[: -(part % 9) or None]
                stack.enter_context(connected(service, ATTACKER, slow))
            assert (await ask_from(service, ATTACKER, "grace")).status == 200


async def test_many_addresses_together_shut_nobody_out(children: ForkServer, open_folder: Path) -> None:
    settings = "c.ServeApp.max_clients = 20"
    async with behind_stand_in(children, open_folder / "pool", settings) as (hub, service):
        hub.users = {"grace": "grace"}
        with ExitStack() as stack:
            many = [f"127.0.1.{number // 2 + 1}" for number in range(40)]
            opened = [stack.enter_context(connected(service, address)) for address in many]
            await eventually(lambda: sum(map(is_closed, opened)) >= 19)
            assert (await ask_from(service, STUDENT, "grace")).status == 200
        assert service.service.log.count("TCP: 20 connections already") == 1


async def test_a_connection_on_which_nothing_comes_ends_soon_and_one_that_has_asked_stays(
    children: ForkServer, open_folder: Path
) -> None:
    async with behind_stand_in(children, open_folder / "pool", "c.ServeApp.first_request_within = 0.3") as (
        hub,
        service,
    ):
        hub.users = {"grace": "grace"}
        question = f"GET {PREFIX}api/v1/health HTTP/1.1\r\nHost: x\r\n\r\n"
        with ExitStack() as stack:
            asked = stack.enter_context(connected(service, ATTACKER, question))
            assert await first_line(asked) == "HTTP/1.1 200"
            idle = stack.enter_context(connected(service, ATTACKER))
            slow = stack.enter_context(connected(service, ATTACKER, question[:-2]))
            await eventually(lambda: is_closed(idle) and is_closed(slow))
            assert not is_closed(asked)


async def test_the_last_connections_are_kept_for_those_who_hold_slices_and_administrators(
    children: ForkServer, open_folder: Path
) -> None:
    settings = "c.ServeApp.max_clients = 12\nc.ServeApp.reserved_clients = 6"
    async with behind_stand_in(children, open_folder / "pool", settings) as (hub, service):
        hub.users = {name: name for name in ("ada", "eve", "mallory", "grace", "root")}
        hub.admins = {"root"}
        assert (await service.take("ada"))["state"] == "held"
        with ExitStack() as stack:
            waits = [(ATTACKER, await wait_of(service, user)) for user in ("eve", "mallory")]
            refused = await refused_beside(stack, service, waits * 3, "grace")
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            assert "kept for administrators and for users who hold a slice" in refused.problem["message"]
            assert (await ask_from(service, STUDENT, "root")).status == 200
            # That she holds one is seen with the next look at the pool.
            while (await ask_from(service, STUDENT, "ada")).status != 200:
                pass
        assert service.service.log.count("6 of them kept for administrators") == 1


async def test_who_waits_to_be_known_shuts_out_neither_administrators_nor_others(
    children: ForkServer, open_folder: Path
) -> None:
    settings = "c.ServeApp.max_clients = 4\nc.ServeApp.reserved_clients = 2"
    async with behind_stand_in(children, open_folder / "pool", settings) as (hub, service):
        hub.users, hub.admins = {"grace": "grace", "root": "root"}, {"root"}
        for token in ("grace", "root"):
            assert (await ask_from(service, STUDENT, token)).status == 200
        hub.is_kept = lambda token: token.startswith("made-up")
        with ExitStack() as stack:
            opened = await fill(stack, hub, service)
            for token in ("root", "grace"):
                assert (await ask_from(service, STUDENT, token, "DELETE", "api/v1/leases/1-0")).status == 200
            # The oldest of the address that has most has ended for them.
            await eventually(lambda: is_closed(opened[0]))
            assert not is_closed(opened[-1])


async def test_one_address_has_so_many_connections_though_all_wait_to_be_known(
    children: ForkServer, open_folder: Path
) -> None:
    settings = "c.ServeApp.max_unknown_clients = 1\nc.ServeApp.max_unknown_tokens = 2"
    async with behind_stand_in(children, open_folder / "pool", settings) as (hub, service):
        hub.users = {"grace": "grace"}
        assert (await ask_from(service, ATTACKER, "grace")).status == 200
        hub.is_kept = lambda token: token.startswith("made-up")
        with ExitStack() as stack:
            opened = await fill(stack, hub, service)
            await eventually(lambda: is_closed(opened[0]))
            assert not any(map(is_closed, opened[1:]))
            # Who has a token that is known still gets as far as to show it.
            assert (await ask_from(service, ATTACKER, "grace", "DELETE", "api/v1/leases/1-0")).status == 200
        assert f"address {ATTACKER}: 3 connections already: the oldest are closed" in service.service.log


async def test_one_user_has_so_many_connections_from_wherever(
    children: ForkServer, open_folder: Path
) -> None:
    async with behind_stand_in(children, open_folder / "pool", "c.ServeApp.max_connections = 3") as (
        hub,
        service,
    ):
        hub.users = {"eve": "eve", "eve-2": "eve", "grace": "grace"}
        with ExitStack() as stack:
            await service.take("grace")
            tokens = enumerate(("eve", "eve-2", "eve"))
            waits = [(f"127.0.1.{number + 1}", await wait_of(service, token)) for number, token in tokens]
            refused = await refused_beside(stack, service, waits, "eve")
            assert refused.status == 429
            assert "3 connections to the pool already" in refused.problem["message"]
            assert (await ask_from(service, ATTACKER, "grace")).status == 200


async def test_clients_of_a_trusted_proxy_count_by_themselves(
    children: ForkServer, open_folder: Path
) -> None:
    settings = f"c.ServeApp.max_unknown_clients = 5\nc.ServeApp.trusted_downstream_ips = ['{PROXY}']"
    async with behind_stand_in(children, open_folder / "pool", settings) as (hub, service):
        hub.users = {"grace": "grace"}
        with ExitStack() as stack:
            passed_on = SLOW.format(more="X-Forwarded-For: 203.0.113.7\r\n")
            slow = [stack.enter_context(connected(service, PROXY, passed_on)) for _ in range(20)]
            await eventually(lambda: sum(map(is_closed, slow)) == 15)
            idle = [stack.enter_context(connected(service, PROXY)) for _ in range(20)]
            assert (await ask_from(service, PROXY, "grace", X_Forwarded_For="203.0.113.9")).status == 200
            assert not any(map(is_closed, idle))


# -- Over the Unix socket ----------------------------------------------------

_OPENER = """
import socket
opened = []
for _ in range({count}):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect({path!r})
    connection.sendall({sent!r})
    opened.append(connection)
    print("opened", flush=True)
signal.pause()
"""
#: A machine on which a person has subordinate uids.
_ADA_HAS_SUBORDINATES = """
import pwd
from types import SimpleNamespace
from gpu_pool.service import callers
pwd.getpwnam = lambda name: SimpleNamespace(pw_name=name, pw_uid=1000)
callers.ACCOUNTS.__init__(subordinates=__import__("pathlib").Path({file!r}))
"""


class Openers:
    """Processes of other users, each with connections."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started: list[Process] = []

    async def open(self, uid: int, count: int, sent: bytes = b"") -> None:
        """Open so many connections as a user."""
        log = self._service.folder / f"opener-{len(self._started)}"
        log.touch()
        code = _OPENER.format(count=count, path=str(self._service.socket), sent=sent)
        process = self._service.children.start(code, {}, log, uid)
        self._started.append(process)
        await eventually(lambda: log.read_text().count("opened") == count or not process.is_alive())

    def close(self) -> None:
        for process in self._started:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)


@contextmanager
def openers(service: Service) -> Iterator[Openers]:
    made = Openers(service)
    try:
        yield made
    finally:
        made.close()


def files_of(service: Service) -> int:
    """Return how many files the service has open."""
    assert service.process
    return sum(1 for _ in Path(f"/proc/{service.process.pid}/fd").iterdir())


@contextmanager
def acting(service: Service) -> Iterator[Users]:
    users = Users(service)
    try:
        yield users
    finally:
        users.close()


ASKS = "return len((await pool.status()).devices)"


async def refusal(users: Users, uid: int) -> str | None:
    """Ask as a user; return what stands against it, None for nothing."""
    try:
        await users.run(uid, ASKS)
    except PoolUnreachable as error:
        return str(error)
    return None


#: Asks for more than is free.
WAITS = "return (await pool.request(parse_request('1'), Holder('x'), 'waits')).id"


@BY_ROOT
async def test_subordinate_uids_have_the_connections_of_their_owner(
    children: ForkServer, open_folder: Path
) -> None:
    ranges = open_folder / "subuid"
    ranges.write_text("ada:100000:65536\n")
    service = Service(children, open_folder / "pool", ("--mode=0666",))
    service.prelude = _ADA_HAS_SUBORDINATES.format(file=str(ranges))
    service.configure("c.ServeApp.max_connections = 5")
    await service.start()
    try:
        with openers(service) as attack, acting(service) as users:
            before = files_of(service)
            for number in range(4):
                await attack.open(100_001 + number, 5)
            await eventually(lambda: files_of(service) - before == 5)
            assert await users.run(SOMEBODY, ASKS) == 1
            with pytest.raises(PoolUnreachable, match="you have too many open"):
                await users.run(100_020, ASKS)
            assert service.log.count("user ada: 5 connections already: more are refused") == 1
            assert "subordinate" not in service.log
    finally:
        await service.end()


@BY_ROOT
async def test_the_sockets_last_connections_are_kept_for_those_who_hold_slices_and_administrators(
    children: ForkServer, open_folder: Path
) -> None:
    settings = "c.ServeApp.max_socket_clients = 12\nc.ServeApp.reserved_clients = 6"
    async with serving(children, open_folder / "pool", settings, "--mode=0666") as service:
        with openers(service) as attack, acting(service) as users:
            holds = "return (await pool.request(parse_request('2%'), Holder('x'), 'key')).state.value"
            # She lives on: with her process her lease would end.
            assert (await users.start(SOMEBODY, holds))[0] == "held"
            leases = {uid: (await users.start(uid, WAITS))[0] for uid in (64_001, 64_002)}
            for uid, lease in leases.items():
                waits = QUESTION.format(prefix="/", path=f"leases/{lease}/wait?seconds=300", more="")
                await attack.open(uid, 3, waits.encode())
            while (said := await refusal(users, NOBODY)) is None:
                # In place of one that was refused itself, beside whoever had asked before.
                await attack.open(uid, 1, waits.encode())
            assert "too many" in said
            assert await users.run(0, ASKS) == 1
            while True:  # that she holds one is seen with the next look at the pool
                with suppress(PoolUnreachable):
                    assert await users.run(SOMEBODY, ASKS) == 1
                    break
            assert service.log.count("The socket: 12 connections already, 6 of them kept") == 1


@BY_ROOT
async def test_whoever_has_the_most_on_the_socket_loses_those_that_ask_nothing(
    children: ForkServer, open_folder: Path
) -> None:
    settings = "c.ServeApp.max_socket_clients = 12\nc.ServeApp.reserved_clients = 2"
    async with serving(children, open_folder / "pool", settings, "--mode=0666") as service:
        with openers(service) as attack, acting(service) as users:
            for uid in range(64_001, 64_005):
                await attack.open(uid, 5)
            assert await users.run(SOMEBODY, ASKS) == 1


async def test_there_are_no_more_connections_than_the_system_allows_files(
    children: ForkServer, open_folder: Path
) -> None:
    service = Service(children, open_folder / "pool")
    service.prelude = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))"
    service.configure("c.ServeApp.max_connections = 1000")
    await service.start()
    try:
        assert "allows this process 200 open files: at most 150 connections to the socket" in service.log
        with ExitStack() as stack:
            for _ in range(400):
                connection = stack.enter_context(closing(socket.socket(socket.AF_UNIX)))
                connection.connect(str(service.socket))
            answer = await ask(service.socket, "GET", "/api/v1/status", None, 20)
            assert answer.status == 200
            assert files_of(service) <= 200
        assert "Too many open files" not in service.log
    finally:
        await service.end()


async def test_an_idle_connection_to_the_socket_ends_soon(children: ForkServer, open_folder: Path) -> None:
    async with serving(children, open_folder / "pool", "c.ServeApp.first_request_within = 0.3") as service:
        with closing(socket.socket(socket.AF_UNIX)) as idle:
            idle.connect(str(service.socket))
            await eventually(lambda: is_closed(idle))


# -- What is said of it ------------------------------------------------------


def test_the_log_says_it_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, 1.0, 59.0, 61.0, 62.0))
    warnings = RareWarnings(logging.getLogger("connections-test"), lambda: next(times, 63.0))
    for _ in range(5):
        warnings.warn("too many")
    assert [each.message for each in caplog.records] == ["too many", "too many (2 times since this was said)"]
    for number in range(3_000):
        warnings.warn(f"of {number}")
    assert len(warnings._told) <= 1_024
