"""Whose groups count for who asks at the socket: the pool may call them by the Hub's name for the account."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_pool.audit.callers import Peer
from gpu_pool.courses.access import system_groups
from gpu_pool.courses.admission import CourseAdmission
from gpu_pool.service.callers import ACCOUNTS, PeerIdentity
from gpu_pool.service.hub import named_by
from gpu_pool.settings import PoolSettings
from gpu_pool_client import Process

#: An account that every system has, and its groups.
UID = 65534
ACCOUNT = ACCOUNTS.user(UID)
GROUPS = system_groups(ACCOUNT)
#: As on a Hub that calls an account by what is left of its name.
SHORT = f"{ACCOUNT[:2]}{{username}}"


@pytest.mark.parametrize(
    ("system_users", "uid", "contained", "user", "found"),
    [
        (SHORT, UID, False, ACCOUNT[2:], GROUPS),
        ("{username}", UID, False, ACCOUNT, GROUPS),
        # Nobody of the Hub's: whoever has that name there is somebody else.
        ("", UID, False, f"local/{ACCOUNT}", frozenset()),
        (SHORT, UID, True, f"local/{ACCOUNT}", frozenset()),
        # Root in a container is not root.
        (SHORT, 0, True, "uid-0", frozenset()),
    ],
)
async def test_groups_are_those_of_the_account_that_asks(
    tmp_path: Path, system_users: str, uid: int, contained: bool, user: str, found: frozenset[str]
) -> None:
    assert GROUPS
    identity = PeerIdentity(0, [], named_by(system_users))
    caller = identity.caller(Peer(uid, Process.current(), contained))
    assert caller.user == user
    courses = CourseAdmission(PoolSettings(courses_dir=str(tmp_path)))
    assert await courses.groups(caller.account or caller.user) == found
