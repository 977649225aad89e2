"""Uids without a name, as containers run as them: whose they are, and what they may."""

from __future__ import annotations

import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu_pool.audit.callers import Peer
from gpu_pool.service.callers import AccountNames, PeerIdentity, subordinate_owner
from gpu_pool.service.hub import named_by
from gpu_pool_client import Process

ACCOUNTS = {"root": 0, "dockremap": 990, "ada": 1000, "grace": 1001, "nobody": 65534}
#: In ada's range.
HERS = 100_999


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with these accounts; return its file of subordinate uids."""

    def by_name(name: str) -> SimpleNamespace:
        return SimpleNamespace(pw_name=name, pw_uid=ACCOUNTS[name])

    def by_uid(uid: int) -> SimpleNamespace:
        return by_name({number: name for name, number in ACCOUNTS.items()}[uid])

    monkeypatch.setattr(pwd, "getpwnam", by_name)
    monkeypatch.setattr(pwd, "getpwuid", by_uid)
    file = tmp_path / "subuid"
    file.write_text("ada:100000:65536\n")
    return file


@pytest.mark.parametrize(
    ("text", "uid", "owner"),
    [
        ("ada:100000:65536\n", 100_000, "ada"),
        ("ada:100000:65536\n", 165_535, "ada"),
        ("ada:100000:65536\n", 165_536, None),
        ("ada:100000:65536\n", 99_999, None),
        ("# whose\n\nada:x:65536\nada:1\ngrace:100000:65536", 100_001, "grace"),
        ("1000:100000:65536", 100_001, "ada"),
        # A newline is all that ends a line.
        ("x:1:1\rada:100000:65536\n", 100_001, None),
        ("x:1:1\x85ada:100000:65536\n", 100_001, None),
        # Nobody's account, and what claims everything with numbers that are none.
        ("turing:100000:65536", 100_001, None),
        ("ada:-1:99999999999999999999", 100_001, None),
        ("ada:१०००००:65536", 100_001, None),
        # Containers of many people, and of root above all, are not one user.
        ("root:100000:65536", 100_001, None),
        ("0:100000:65536", 100_001, None),
        ("dockremap:100000:65536", 100_001, None),
        ("nobody:100000:65536", 100_001, None),
        ("ada:100000:65536\ngrace:100000:65536", 100_001, None),
        ("ada:100000:65536\nada:100000:10", 100_001, "ada"),
    ],
)
def test_whose_a_subordinate_uid_is(machine: Path, text: str, uid: int, owner: str | None) -> None:
    machine.write_text(text)
    assert subordinate_owner(uid, machine) == owner


def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert subordinate_owner(HERS, tmp_path / "missing") is None
    assert subordinate_owner(HERS, tmp_path) is None


@pytest.mark.parametrize("contained", [True, False])
def test_it_counts_as_its_owner_and_never_as_an_administrator(machine: Path, contained: bool) -> None:
    identity = PeerIdentity(0, ["ada"], accounts=AccountNames(subordinates=machine))
    container = identity.caller(Peer(HERS, Process.current(), contained))
    assert (container.user, container.is_admin) == ("ada", False)
    assert identity.caller(Peer(1000, Process.current(), contained=False)).is_admin
    # Keys of the one are not found by the other's.
    assert container.mark != identity.caller(Peer(1000, Process.current(), contained=False)).mark


def test_what_nobody_owns_has_a_number(machine: Path) -> None:
    machine.unlink()
    identity = PeerIdentity(0, [], accounts=AccountNames(subordinates=machine))
    assert identity.caller(Peer(HERS, Process.current(), contained=True)).user == f"uid-{HERS}"


def test_root_in_a_container_is_nobodys(machine: Path) -> None:
    machine.write_text("ada:0:65536\n")
    identity = PeerIdentity(0, [], accounts=AccountNames(subordinates=machine))
    assert identity.caller(Peer(0, Process.current(), contained=True)).user == "uid-0"


def test_it_is_no_account_of_the_hubs_users(machine: Path) -> None:
    named = named_by("{username}", AccountNames(subordinates=machine))
    assert named(Peer(1000, None, contained=False))[0] == "ada"
    assert named(Peer(HERS, None, contained=False))[0] == "local/ada"
