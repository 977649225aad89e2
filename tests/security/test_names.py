"""Names that nobody can tell apart: they are of different people, and change nothing around them."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_pool.audit.callers import Peer
from gpu_pool.names import LONGEST, is_name, name_of
from gpu_pool.service.callers import AccountNames, PeerIdentity
from gpu_pool.service.hub import named_by
from gpu_pool_client import BadRequest, Holder, Process, parse_request
from support.pools import device, embedded
from support.service import ForkServer
from support.stand_in_hub import behind_stand_in

#: Names that were one, or look like one.
TWINS = (
    "eve",
    "\u202eeve",
    "\u200beve",
    "?eve",
    "eve\u200d",
    "eve\ufe0f",
    "\u3164eve",
    "eve\x00",
    "eve\x85",
    "eve\n",
    "eve\u00a0",
    "%E2%80%8Beve",
    "%25E2%80%8Beve",
    "e\u0301ve",
    "\u00e9ve",
    "\uff45ve",
    "\u0435ve",
    "x" * 200,
    "x" * 201,
    "x" * 200 + "y",
    "x" * 5000,
    "local/eve",
    "service/eve",
    name_of("x" * 201),
)


async def test_no_two_users_of_a_hub_are_one_to_the_pool(children: ForkServer, open_folder: Path) -> None:
    async with behind_stand_in(children, open_folder / "pool", "c.PoolSettings.max_waiting = 0") as (
        hub,
        service,
    ):
        hub.users = {f"token-{number}": name for number, name in enumerate(TWINS)}
        hub.users["admin"], hub.admins = "root", {"root"}
        leases = [(await service.take(f"token-{number}"))["id"] for number in range(len(TWINS))]
        assert len(set(leases)) == len(TWINS)
        for number in range(len(TWINS)):
            _, seen = await service.ask(f"token-{number}", "GET", "/status")
            mine = [each["id"] for each in (*seen["leases"], *seen["queue"])]
            assert mine == [leases[number]], TWINS[number]
            other = leases[number - 1]
            assert (await service.ask(f"token-{number}", "GET", f"/leases/{other}"))[0] == 404
        _, seen = await service.ask("admin", "GET", "/status")
        names = [each["holder"]["user"] for each in (*seen["leases"], *seen["queue"])]
        assert len(set(names)) == len(TWINS)
        assert all(each.isprintable() and len(each) <= LONGEST and "/" not in each for each in names)
        # What can be seen is as it was.
        assert {"eve", "?eve", "\u00e9ve", "e\u0301ve", "\u0435ve"} <= set(names)


@given(st.text(), st.text())
def test_no_name_becomes_another_s(one: str, other: str) -> None:
    assert (name_of(one) == name_of(other)) is (one == other)
    assert is_name(name_of(one))


@given(st.text(max_size=16))
def test_what_is_escaped_is_still_told(text: str) -> None:
    assert unquote(name_of(text), errors="strict") == text


@given(st.text(alphabet="%25E0/A\u200b", max_size=12), st.text(alphabet="%25E0/A\u200b", max_size=12))
def test_escapes_that_somebody_is_called_are_no_escapes(one: str, other: str) -> None:
    assert (name_of(one, "/") == name_of(other, "/")) is (one == other)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ada", "ada"),
        ("Ada Lovelace", "Ada Lovelace"),
        ("ada@example.org", "ada@example.org"),
        ("100%", "100%"),
        ("Æsa", "Æsa"),
        ("李", "李"),
        ("\u202eeve", "%E2%80%AEeve"),
        ("%41da", "%2541da"),
        ("\u0301eve", "%CC%81eve"),
        ("", ""),
    ],
)
def test_what_somebody_is_called(text: str, name: str) -> None:
    assert name_of(text) == name


@pytest.mark.parametrize("name", ["\u202eeve", "eve\n", "x" * 201, "eve\ud800"])
async def test_the_store_takes_no_name_that_could_be_another_s(tmp_path: Path, name: str) -> None:
    async with embedded(tmp_path / "store.db", device(0)) as pool:
        with pytest.raises(BadRequest, match="is not a valid user name"):
            await pool.request(parse_request("2%"), Holder(name, process=Process.current()), "key")
        assert (await pool.status()).leases == ()


def test_so_are_accounts_of_the_machine() -> None:
    accounts = {2000: "eve", 2001: "\u200beve", 2002: "?eve", 2003: "%E2%80%8Beve", 2004: "x" * 300}
    known = AccountNames(account=accounts.get)
    for identity in (
        PeerIdentity(0, [], accounts=known),
        PeerIdentity(0, [], named_by("", known), known),
        PeerIdentity(0, [], named_by("{username}", known), known),
    ):
        names = [identity.caller(Peer(uid, Process.current(), contained=False)).user for uid in accounts]
        assert len(set(names)) == len(accounts)
        assert all(map(is_name, names))
