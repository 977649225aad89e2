"""What settings and environment say of a JupyterHub."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_pool.audit.callers import Peer
from gpu_pool.service.callers import ACCOUNTS, PeerName
from gpu_pool.service.hub import hub_place, mark_of, named_by
from gpu_pool_client import BadRequest
from gpu_pool_client._remote.exchange import ServerAddress

OF_THE_HUB = {
    "JUPYTERHUB_SERVICE_URL": "http://127.0.0.1:10101",
    "JUPYTERHUB_SERVICE_PREFIX": "/base/services/slices/",
    "JUPYTERHUB_SERVICE_NAME": "slices",
    "JUPYTERHUB_API_URL": "http://hub:8081/base/hub/api",
    "JUPYTERHUB_API_TOKEN": "secret",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith("JUPYTERHUB_")]:
        monkeypatch.delenv(name)


def setenv(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in {**OF_THE_HUB, **values}.items():
        monkeypatch.setenv(name, value)


def test_without_a_hub_there_is_the_socket_only() -> None:
    assert hub_place("", "") is None


def test_a_hub_that_starts_the_service_says_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    setenv(monkeypatch)
    place = hub_place("", "")
    assert place
    assert (place.host, place.port, place.prefix) == ("127.0.0.1", 10101, "/base/services/slices/")
    assert (place.hub.api, place.hub.path) == (ServerAddress("hub", 8081), "/base/hub/api")
    assert (place.hub.service, place.client_id) == ("slices", "service-slices")


def test_the_secret_does_not_stay_where_what_is_started_would_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    setenv(monkeypatch)
    place = hub_place("", "")
    assert place
    assert place.token == "secret"
    assert "secret" not in repr(place)
    assert "JUPYTERHUB_API_TOKEN" not in os.environ


def test_a_hub_on_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    setenv(monkeypatch, JUPYTERHUB_API_URL="http+unix://%2Frun%2Fhub.sock/hub/api")
    place = hub_place("", "")
    assert place
    assert (place.hub.api, place.hub.path) == (Path("/run/hub.sock"), "/hub/api")


def test_a_service_that_the_hub_has_no_address_for_says_where_to_set_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setenv(monkeypatch, JUPYTERHUB_SERVICE_URL="http://127.0.0.1:0/")
    with pytest.raises(BadRequest, match=r'Give the service a "url" in c\.JupyterHub\.services'):
        hub_place("", "")
    place = hub_place("127.0.0.1:10102", "")
    assert place
    assert place.port == 10102


@pytest.mark.parametrize("bind", ["here", "127.0.0.1", "127.0.0.1:x", ":0", "https://127.0.0.1:1", "["])
def test_where_nobody_can_listen_is_refused(monkeypatch: pytest.MonkeyPatch, bind: str) -> None:
    setenv(monkeypatch)
    with pytest.raises(BadRequest, match="HOST:PORT"):
        hub_place(bind, "")


@pytest.mark.parametrize("url", ["https://hub/hub/api", "hub", "http://", "http://["])
def test_a_hub_that_cannot_be_asked_is_refused(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    setenv(monkeypatch, JUPYTERHUB_API_URL=url)
    with pytest.raises(BadRequest, match="JUPYTERHUB_API_URL"):
        hub_place("", "")


def test_a_service_without_a_secret_is_refused() -> None:
    with pytest.raises(BadRequest, match="JUPYTERHUB_API_TOKEN"):
        hub_place("127.0.0.1:10101", "")


NOBODY = ACCOUNTS.user(65534)


@pytest.mark.parametrize(
    ("system_users", "uid", "contained", "user"),
    [
        ("", 65534, False, f"local/{NOBODY}"),
        ("{username}", 65534, False, NOBODY),
        (f"{NOBODY[0]}{{username}}{NOBODY[-1]}", 65534, False, NOBODY[1:-1]),
        ("jupyter-{username}", 65534, False, f"local/{NOBODY}"),
        (f"{NOBODY}{{username}}", 65534, False, f"local/{NOBODY}"),
        # Many share one uid there, and root is nobody's account.
        ("{username}", 65534, True, f"local/{NOBODY}"),
        ("{username}", 0, False, f"local/{ACCOUNTS.user(0)}"),
    ],
)
def test_whose_account_is_a_hub_users(system_users: str, uid: int, contained: bool, user: str) -> None:
    theirs = PeerName(user, mark_of(user), ACCOUNTS.user(uid))
    local = PeerName(user, str(uid))
    expected = local if user.startswith("local/") else theirs
    assert named_by(system_users)(Peer(uid, None, contained)) == expected


def test_what_says_nothing_of_a_name_is_refused() -> None:
    with pytest.raises(BadRequest, match="{username}"):
        named_by("ada")


def test_no_name_runs_into_a_key() -> None:
    assert len({len(mark_of(user)) for user in ("a", "a:b", "ä" * 200)}) == 1
