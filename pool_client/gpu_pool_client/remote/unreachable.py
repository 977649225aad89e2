"""Why a service cannot be reached, in words."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from gpu_pool_client.errors import PoolUnreachable
from gpu_pool_client.remote.endpoints import Endpoint
from gpu_pool_client.remote.exchange import NotConnectedError

_OWN = "or unset GPU_POOL_URL to use a pool of your own."
_START = f'Start "gpu-pool serve", or ask the administrator to; {_OWN}'
_ASK = "Ask the administrator, who chose by --mode and by the socket's group who may."
_AGAIN = "Try again; if that does not help, the service's log says why."
#: To those behind a JupyterHub, who have chosen no pool and start no service.
_HUB = "Try again in a minute. If that does not help, tell whoever looks after this JupyterHub."
_ADDRESS = (
    "Ask the administrator for its address. "
    "Where it has a certificate of its own, name that in SSL_CERT_FILE."
)


def may_pass(error: OSError) -> bool:
    """Whether a restart of the service, or a moment's patience, would put an end to this."""
    lasting = (PermissionError, NotADirectoryError, TimeoutError, socket.gaierror, ssl.SSLError)
    return not isinstance(error, lasting)


def explain(error: OSError, endpoint: Endpoint) -> PoolUnreachable:
    """Say why nobody answers there, and what to do about it."""
    place = endpoint.where if isinstance(endpoint.where, Path) else endpoint.url
    has_hub = endpoint.token is not None
    if isinstance(error, socket.gaierror):
        hint = _HUB if has_hub else f"Check its name, {_OWN}"
        return PoolUnreachable(f"The host of {place} cannot be found.", hint)
    if has_hub and not isinstance(error, ssl.SSLError):
        return PoolUnreachable(
            f"The pool of GPUs does not answer at the moment; its service ({place}) may be just starting.",
            _HUB,
        )
    if isinstance(error, ssl.SSLError):
        return PoolUnreachable(f"What answers at {place} cannot prove who it is: {error.reason}.", _ADDRESS)
    if isinstance(error, PermissionError):
        return PoolUnreachable(f"You may not use the pool that is served at {place}.", _ASK)
    if isinstance(error, (TimeoutError, NotConnectedError)):
        return PoolUnreachable(f"The service of the pool at {place} does not answer.", _AGAIN)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return PoolUnreachable(f"Nobody serves a pool at {place}.", _START)
    if isinstance(error, ConnectionRefusedError):
        return PoolUnreachable(f"The service of the pool at {place} has ended.", _START)
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        words = "breaks connections off: it is about to stop, or too many of yours are open"
        return PoolUnreachable(f"The service of the pool at {place} {words}.", _AGAIN)
    return PoolUnreachable(
        f"The service of the pool at {place} cannot be asked: {error.strerror or error}.", _AGAIN
    )
