"""Tokens that are made up, in any number: they hold up nobody whom the Hub knows.

Shown by which tokens the Hub is asked about, and in which order: it answers when the test says so.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.audit.callers import Caller
from gpu_pool.service.connections import client_address, counted_by, read_networks
from gpu_pool.service.hub import HubApi as PlaceOfHub
from gpu_pool.service.hub import HubIdentity
from gpu_pool.service.tokens import (
    Client,
    FairSemaphore,
    KnownTokens,
    TooManyUnknown,
    WaitingClients,
    digest_of,
)
from gpu_pool_client import PoolUnreachable
from gpu_pool_client._remote.client import RemotePool
from gpu_pool_client._remote.endpoints import Endpoint, http_endpoint
from gpu_pool_client._remote.exchange import ServerAddress, ServiceAnswer
from support.hub import HubService
from support.pools import eventually
from support.service import ForkServer
from support.stand_in_hub import Outcome, StandInHub, ask_from, behind_stand_in, standing_in

ADA, GRACE = "token-of-ada", "token-of-grace"
ATTACKER, STUDENT = "127.0.0.2", "127.0.0.3"


def made_up(count: int) -> list[str]:
    return [f"made-up-{secrets.token_hex(12)}" for _ in range(count)]


def is_made_up(token: str) -> bool:
    return token.startswith("made-up-")


@asynccontextmanager
async def attacked(
    hub: StandInHub, service: HubService, count: int, **headers: str
) -> AsyncIterator[list[asyncio.Task[Outcome]]]:
    """Let so many made-up tokens wait, which the Hub keeps thinking about, all of one address."""
    hub.is_kept = is_made_up
    tasks = [asyncio.create_task(ask_from(service, ATTACKER, token, **headers)) for token in made_up(count)]
    await eventually(lambda: any(map(is_made_up, hub.asked)))
    try:
        yield tasks
    finally:
        hub.answer_all()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_known_token_waits_for_no_made_up_ones(children: ForkServer, open_folder: Path) -> None:
    async with behind_stand_in(children, open_folder / "pool") as (hub, service):
        hub.users = {ADA: "ada"}
        assert (await ask_from(service, STUDENT, ADA)).status == 200
        async with attacked(hub, service, 200) as attack:
            # None of the attacker's is answered before, also where ada comes from the same address.
            for address in (STUDENT, ATTACKER):
                for method, path in (("GET", "api/v1/status"), ("DELETE", "api/v1/leases/1-0")):
                    assert (await ask_from(service, address, ADA, method, path)).status == 200
            assert hub.asked.count(ADA) >= 3  # what changes something is asked anew
            assert not any(each.done() for each in attack)
            # Only a few of them are questions to the Hub, which has others to answer.
            assert sum(map(is_made_up, hub.asked)) <= 4


async def test_a_known_token_gets_through_though_all_that_its_address_may_have_is_taken(
    children: ForkServer, open_folder: Path
) -> None:
    settings = "c.ServeApp.max_unknown_clients = 5\nc.ServeApp.max_unknown_tokens = 5"
    async with behind_stand_in(children, open_folder / "pool", settings) as (hub, service):
        hub.users = {ADA: "ada"}
        assert (await ask_from(service, ATTACKER, ADA)).status == 200
        async with attacked(hub, service, 5) as attack:
            attack += [asyncio.create_task(ask_from(service, ATTACKER, token)) for token in made_up(30)]
            # What is not answered by now waits for the Hub.
            await eventually(lambda: sum(each.done() for each in attack) == 35 - 4 - 5)
            assert (await ask_from(service, ATTACKER, ADA, "DELETE", "api/v1/leases/1-0")).status == 200


async def test_who_is_new_is_next_though_hundreds_of_another_address_wait(
    children: ForkServer, open_folder: Path
) -> None:
    async with behind_stand_in(children, open_folder / "pool") as (hub, service):
        hub.users = {GRACE: "grace"}
        async with attacked(hub, service, 200) as attack:
            await eventually(lambda: len(hub.asked) == 4)
            # The whole attack waits before her.
            new = asyncio.create_task(ask_from(service, STUDENT, GRACE))
            for _ in range(100):
                if GRACE in hub.asked:
                    break
                before = len(hub.asked)
                hub.answer()
                await eventually(lambda before=before: len(hub.asked) > before)
            assert (await new).status == 200
            # At most those of the attacker's that were asked about already, and one of the rotation's.
            assert hub.asked.index(GRACE) <= 4 + 2
            assert sum(each.done() for each in attack) <= 3


async def test_a_made_up_token_is_asked_about_once_in_a_while(
    children: ForkServer, open_folder: Path
) -> None:
    async with behind_stand_in(children, open_folder / "pool") as (hub, service):
        (token,) = made_up(1)
        answers = await asyncio.gather(*(ask_from(service, ATTACKER, token) for _ in range(20)))
        assert {each.status for each in answers} == {401}
        assert hub.asked == [token]
        # Its connections are not kept for more of that kind.
        assert answers[0].headers["Connection"] == "close"
        assert token not in service.service.log


async def test_many_requests_with_a_new_token_are_one_question(
    children: ForkServer, open_folder: Path
) -> None:
    async with behind_stand_in(children, open_folder / "pool", "c.ServeApp.max_unknown_tokens = 49") as (
        hub,
        service,
    ):
        hub.users = {ADA: "ada"}
        hub.is_kept = lambda token: token == ADA
        asking = [asyncio.create_task(ask_from(service, STUDENT, ADA)) for _ in range(50)]
        await eventually(lambda: hub.asked)
        hub.answer_all()
        assert {each.status for each in await asyncio.gather(*asking)} == {200}
        assert hub.asked == [ADA]


async def test_a_failure_of_the_hub_holds_for_one_question(children: ForkServer, open_folder: Path) -> None:
    async with behind_stand_in(children, open_folder / "pool") as (hub, service):
        hub.users, hub.is_well = {ADA: "ada"}, False
        hub.is_kept = lambda token: token == ADA
        asking = [asyncio.create_task(ask_from(service, STUDENT, ADA)) for _ in range(5)]
        await eventually(lambda: hub.asked)
        hub.answer_all()
        assert {each.status for each in await asyncio.gather(*asking)} == {503}
        hub.is_well = True
        assert (await ask_from(service, STUDENT, ADA)).status == 200


async def test_one_address_may_have_so_many_requests_with_one_unknown_token_wait(
    children: ForkServer, open_folder: Path
) -> None:
    async with behind_stand_in(children, open_folder / "pool", "c.ServeApp.max_unknown_tokens = 5") as (
        hub,
        service,
    ):
        hub.is_kept = is_made_up
        (token,) = made_up(1)
        asking = [asyncio.create_task(ask_from(service, ATTACKER, token)) for _ in range(20)]
        # One is asked about, five wait for what the Hub says.
        await eventually(lambda: hub.asked and sum(each.done() for each in asking) == 14)
        assert hub.asked == [token]
        hub.answer_all()
        assert Counter([each.status for each in await asyncio.gather(*asking)]) == {401: 6, 429: 14}


async def test_a_request_goes_on_where_the_client_that_asked_first_with_its_token_has_gone() -> None:
    async with standing_in() as (hub, port):
        hub.users, hub.is_kept = {ADA: "ada"}, is_made_up
        identity = HubIdentity(
            PlaceOfHub(ServerAddress("127.0.0.1", port), "/hub/api", "gpu-pool"), [], "boot"
        )

        def asking(token: str, origin: Client) -> asyncio.Task[Caller]:
            return asyncio.create_task(identity.caller(token, "", fresh=False, origin=origin))

        attack = [asking(token, Client(ATTACKER)) for token in made_up(4)]
        await eventually(lambda: len(hub.asked) == 4)
        first = asking(ADA, Client("gone", lambda: True))
        others = [asking(ADA, Client(STUDENT)) for _ in range(3)]
        hub.answer_all()
        with pytest.raises(PoolUnreachable, match="has gone"):
            await first
        assert {each.user for each in await asyncio.gather(*others)} == {"ada"}
        assert hub.asked.count(ADA) == 1
        await asyncio.gather(*attack, return_exceptions=True)


async def test_one_address_may_have_so_many_unknown_tokens_wait(
    children: ForkServer, open_folder: Path
) -> None:
    async with behind_stand_in(children, open_folder / "pool", "c.ServeApp.max_unknown_tokens = 5") as (
        hub,
        service,
    ):
        hub.users = {ADA: "ada", GRACE: "grace"}
        assert (await ask_from(service, ATTACKER, ADA)).status == 200
        async with attacked(hub, service, 20) as attack:
            # Four are asked about, five wait.
            await eventually(lambda: sum(each.done() for each in attack) == 11)
            refused = next(each.result() for each in attack if each.done())
            assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
            assert refused.problem["code"] == "over-quota"
            assert f"5 requests from {ATTACKER}" in refused.problem["message"]
            assert "Try again in 1 second" in refused.problem["remedy"]
            # A proxy may stand between: it is the address of many. Whoever was there before stays.
            assert (await ask_from(service, ATTACKER, ADA, "DELETE", "api/v1/leases/1-0")).status == 200
            new = asyncio.create_task(ask_from(service, STUDENT, GRACE))
            hub.answer_all()
            assert (await new).status == 200


@dataclass(frozen=True)
class HeardEndpoint(Endpoint):
    """Knows with which status each question was answered."""

    statuses: list[int] = field(default_factory=list, compare=False)

    @classmethod
    def of(cls, endpoint: Endpoint) -> HeardEndpoint:
        return cls(**{each.name: getattr(endpoint, each.name) for each in fields(endpoint)})

    async def ask(self, *question: Any) -> ServiceAnswer:
        answer = await super().ask(*question)
        self.statuses.append(answer.status)
        return answer


async def test_our_client_tries_again(
    children: ForkServer, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with behind_stand_in(children, open_folder / "pool", "c.ServeApp.max_unknown_tokens = 1") as (
        hub,
        service,
    ):
        hub.users = {GRACE: "grace"}
        monkeypatch.setenv("GPU_POOL_TOKEN", GRACE)
        hub.is_kept = is_made_up
        # From where the client asks, too.
        attack = [asyncio.create_task(ask_from(service, "127.0.0.1", token)) for token in made_up(8)]
        await eventually(lambda: sum(each.done() for each in attack) == 3)
        endpoint = HeardEndpoint.of(http_endpoint(service.url))
        async with RemotePool(endpoint) as pool:
            asking = asyncio.create_task(pool.status())
            await eventually(lambda: endpoint.statuses)
            hub.answer_all()
            assert len((await asking).devices) == 1
        assert endpoint.statuses == [429, 200]
        await asyncio.gather(*attack)


async def test_of_a_trusted_proxy_each_client_counts_by_itself(
    children: ForkServer, open_folder: Path
) -> None:
    settings = f"c.ServeApp.max_unknown_tokens = 5\nc.ServeApp.trusted_downstream_ips = ['{ATTACKER}']"
    async with behind_stand_in(children, open_folder / "pool", settings) as (hub, service):
        hub.users = {GRACE: "grace"}
        # The proxy appends where it was asked from; what stands before that was made up.
        async with attacked(hub, service, 20, X_Forwarded_For="198.51.100.1, 203.0.113.7") as attack:
            await eventually(lambda: sum(each.done() for each in attack) == 11)
            assert "203.0.113.7" in next(each.result() for each in attack if each.done()).problem["message"]
            new = asyncio.create_task(
                ask_from(service, ATTACKER, GRACE, X_Forwarded_For="203.0.113.7, 198.51.100.1")
            )
            hub.answer_all()
            assert (await new).status == 200


async def test_what_others_say_of_their_address_is_passed_over(
    children: ForkServer, open_folder: Path
) -> None:
    async with behind_stand_in(children, open_folder / "pool", "c.ServeApp.max_unknown_tokens = 1") as (
        hub,
        service,
    ):
        hub.is_kept = is_made_up
        asking = [
            asyncio.create_task(
                ask_from(
                    service, ATTACKER, token, X_Forwarded_For=f"198.51.100.{n}", X_Real_Ip=f"192.0.2.{n}"
                )
            )
            for n, token in enumerate(made_up(10))
        ]
        await eventually(lambda: sum(each.done() for each in asking) == 5)
        hub.answer_all()
        assert Counter([each.status for each in await asyncio.gather(*asking)]) == {401: 5, 429: 5}


async def test_who_has_gone_takes_no_turn_and_no_place(children: ForkServer, open_folder: Path) -> None:
    async with behind_stand_in(children, open_folder / "pool", "c.ServeApp.max_unknown_tokens = 5") as (
        hub,
        service,
    ):
        hub.users = {GRACE: "grace"}
        async with attacked(hub, service, 9) as attack:
            await eventually(lambda: len(hub.asked) == 4)
            for each in attack:
                each.cancel()
            await asyncio.wait(attack)
            # The service hears of it soon; from the same address, too, there is room then.
            while (task := asyncio.create_task(ask_from(service, ATTACKER, GRACE))) is not None:
                done, _ = await asyncio.wait([task], timeout=3)
                if not done:
                    break
                assert task.result().status == 429
            hub.answer_all()
            assert (await task).status == 200
            assert sum(map(is_made_up, hub.asked)) <= 5


async def test_turns_go_round_among_addresses() -> None:
    semaphore, order = FairSemaphore(1, WaitingClients(10)), []
    await semaphore.acquire(Client("busy"))

    async def take(address: str) -> None:
        await semaphore.acquire(Client(address))
        order.append(address)
        semaphore.release()

    waiting = [asyncio.create_task(take(each)) for each in "aaaabbc"]
    await asyncio.sleep(0)
    semaphore.release()
    await asyncio.gather(*waiting)
    assert order == list("abcabaa")
    await asyncio.wait_for(semaphore.acquire(Client("x")), 60)  # nothing was lost on the way


async def test_a_turn_that_came_while_it_was_given_up_goes_to_the_next() -> None:
    semaphore = FairSemaphore(1, WaitingClients(1))
    await semaphore.acquire(Client("a"))
    waiting = asyncio.create_task(semaphore.acquire(Client("a")))
    await asyncio.sleep(0)
    with pytest.raises(TooManyUnknown, match="1 requests from a "):
        await semaphore.acquire(Client("a"))
    semaphore.release()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(semaphore.acquire(Client("b")), 60)


async def test_a_client_that_had_gone_leaves_no_place_that_it_never_had() -> None:
    semaphore = FairSemaphore(1, WaitingClients(10))
    await semaphore.acquire(Client("a"))
    gone = asyncio.create_task(semaphore.acquire(Client("b", lambda: True)))
    await asyncio.sleep(0)
    semaphore.release()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await asyncio.wait_for(semaphore.acquire(Client("c")), 60)
    second = asyncio.create_task(semaphore.acquire(Client("d")))
    await asyncio.sleep(0)
    assert not second.done()
    semaphore.release()
    await asyncio.wait_for(second, 60)


def test_what_is_remembered_of_tokens_is_bounded_and_names_none() -> None:
    now = 0.0
    tokens: KnownTokens[str] = KnownTokens(lambda: now)
    tokens.learn(digest_of(ADA), "ada")
    for token in made_up(10_000):
        tokens.refuse(digest_of(token))
    assert tokens.is_refused(digest_of(token))
    assert tokens.owner(digest_of(ADA)) == (0.0, "ada")  # made-up ones do not push out those that are known
    assert ADA not in repr(vars(tokens))
    assert len(tokens._refused) <= 4096
    now = 60.0
    assert not tokens.is_refused(digest_of(token))
    tokens.refuse(digest_of(ADA))
    assert tokens.owner(digest_of(ADA)) is None
    tokens.learn(digest_of(ADA), "ada")
    assert not tokens.is_refused(digest_of(ADA))
    now = 100_000.0
    assert tokens.owner(digest_of(ADA)) is None


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", "unknown"),
    ],
)
def test_what_a_client_is_counted_by(address: str, counted: str) -> None:
    assert counted_by(address) == counted


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.1", "192.0.2.1", "192.0.2.1"),
        ("10.0.0.1", "198.51.100.1, 192.0.2.1", "192.0.2.1"),
        ("10.0.0.1", "198.51.100.1, 192.0.2.1, 10.0.0.2", "192.0.2.1"),
        ("::ffff:10.0.0.1", "192.0.2.1", "192.0.2.1"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "nonsense", "10.0.0.1"),
        ("10.0.0.1", "192.0.2.1, nonsense", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("192.0.2.9", "192.0.2.1", "192.0.2.9"),
    ],
)
def test_which_address_a_proxy_is_believed(peer: str, forwarded: str, client: str) -> None:
    assert client_address(peer, forwarded, read_networks(["10.0.0.0/8"], "x")) == client
