"""What the service is to a JupyterHub: its address there, and the users it shares with this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from gpu_pool.service.callers import Peer, account_name, user_name
from gpu_pool.service.hub import HubApi, mark_of
from gpu_pool.user_names import name_of
from gpu_pool_client import BadRequest
from gpu_pool_client.remote.exchange import ServerAddress, Where

_DEFAULT_API: Final = "http://127.0.0.1:8081/hub/api"
_DEFAULT_PREFIX: Final = "/services/gpu-pool/"
_USERNAME: Final = "{username}"


@dataclass(frozen=True, slots=True)
class HubPlace:
    """Where the service listens for the Hub's users, and where the Hub is."""

    host: str
    port: int
    #: What all addresses begin and end with.
    prefix: str
    hub: HubApi
    api_url: str
    #: This service's secret, by which browsers' logins are completed; in no log.
    token: str = field(repr=False)
    client_id: str


def hub_place(bind: str, prefix: str) -> HubPlace | None:
    """Return the place that the settings or the Hub's environment name; None where neither does.

    A Hub that starts the service says everything in its environment. The
    secret is taken out of it, so that what the service starts does not get it.
    """
    url = os.environ.get("JUPYTERHUB_SERVICE_URL", "")
    if not (bind or url):
        return None
    host, port = _read_bind(bind or url)
    prefix = prefix or os.environ.get("JUPYTERHUB_SERVICE_PREFIX") or _DEFAULT_PREFIX
    prefix = f"/{prefix.strip('/')}/"
    name = os.environ.get("JUPYTERHUB_SERVICE_NAME") or prefix.rstrip("/").rpartition("/")[2]
    api_url = os.environ.get("JUPYTERHUB_API_URL") or _DEFAULT_API
    where, path = _read_api(api_url)
    client_id = os.environ.get("JUPYTERHUB_CLIENT_ID") or f"service-{name}"
    token = os.environ.pop("JUPYTERHUB_API_TOKEN", "")
    if not token:
        raise BadRequest(
            "The service has no token for the JupyterHub.",
            'Let the Hub start it, or set JUPYTERHUB_API_TOKEN to the "api_token" of the service there.',
        )
    return HubPlace(host, port, prefix, HubApi(where, path, name), api_url, token, client_id)


def _read_bind(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(text if "//" in text else f"http://{text}")
        if parts.scheme == "http" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise BadRequest(
        f"{text[:200]!a} is not where a service can listen.",
        "Accepted: HOST:PORT, such as 127.0.0.1:10101; for HTTPS put a proxy before it.",
    )


def _read_api(url: str) -> tuple[Where, str]:
    try:
        parts = urlsplit(url)
        if parts.scheme == "http+unix":
            return Path(unquote(parts.netloc)), parts.path.rstrip("/")
        if parts.scheme == "http" and parts.hostname:
            return ServerAddress(parts.hostname, parts.port or 80), parts.path.rstrip("/")
    except ValueError:
        pass
    raise BadRequest(
        f"{url[:200]!a} is not the address of a JupyterHub's API.",
        "JUPYTERHUB_API_URL begins with http:// and ends with /hub/api.",
    )


def named_by(system_users: str) -> Callable[[Peer], tuple[str, str]]:
    """Return what names the users of the socket: by the Hub's name where ``system_users`` says it is theirs.

    ``system_users`` is what the Hub's users are called on this machine, with
    ``{username}`` in it, or empty. Everybody else is called ``local/NAME``,
    since no user of a Hub has a "/" in their name. So is root, and whoever is
    in a container, where many can share one uid, or runs as a uid without a name.
    """
    before, found, after = system_users.partition(_USERNAME)
    if system_users and not found:
        raise BadRequest(f"system_users is {system_users!a}.", f"Accepted: a name with {_USERNAME} in it.")

    def named(peer: Peer) -> tuple[str, str]:
        name = user_name(peer.uid)
        user = name[len(before) : len(name) - len(after)]
        is_account = account_name(peer.uid) is not None and peer.uid != 0 and not peer.contained
        is_theirs = is_account and user and name == f"{before}{user}{after}"
        if found and is_theirs:
            known = name_of(user, apart_from="/")
            return known, mark_of(known)
        return name_of(f"local/{name}"), str(peer.uid)

    return named
