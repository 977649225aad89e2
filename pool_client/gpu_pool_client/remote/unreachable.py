"""Why a service cannot be reached, in words."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Final

from gpu_pool_client._errors import PoolUnreachable
from gpu_pool_client.remote.endpoints import Endpoint
from gpu_pool_client.remote.exchange import NotConnectedError

_OWN = "or unset GPU_POOL_URL to use a pool of your own."
_START = f'Start "gpu-pool serve", or ask the administrator to; {_OWN}'
_ASK = "Ask the administrator, who decides that by --mode and by the socket's group."
_AGAIN = "Try again; if that does not help, the service's log says why."
#: To those behind a JupyterHub, who have chosen no pool and start no service.
_HUB = "Try again in a minute. If that does not help, tell whoever looks after this JupyterHub."
_ADDRESS = (
    "Ask the administrator for its address. "
    "Where it has a certificate of its own, name that in SSL_CERT_FILE."
)


#: What neither a restart of the service nor a retry mends.
_LASTING: Final = (PermissionError, NotADirectoryError, ssl.SSLError)


def is_soon_over(error: OSError) -> bool:
    """Whether a restart of the service, or a retry a moment later, would mend this."""
    return not isinstance(error, (*_LASTING, TimeoutError, socket.gaierror))


def explain(error: OSError, endpoint: Endpoint) -> PoolUnreachable:
    """Say why nobody answers there, what to do about it, and whether it may pass within minutes."""
    found = _in_words(error, endpoint)
    # A cluster's names are away for a moment when its name server is. On a machine of one's own, a
    # name that is not known was written wrongly.
    unknown = isinstance(error, socket.gaierror) and endpoint.token is None
    found.may_pass = not isinstance(error, _LASTING) and not unknown
    return found


def _in_words(error: OSError, endpoint: Endpoint) -> PoolUnreachable:
    place = endpoint.where if isinstance(endpoint.where, Path) else endpoint.url
    has_hub = endpoint.token is not None
    if isinstance(error, socket.gaierror):
        if not has_hub:
            return PoolUnreachable(f"The host of {place} cannot be found.", f"Check its name, {_OWN}")
        return PoolUnreachable("The host of the GPU pool cannot be found at the moment.", _HUB)
    if has_hub and not isinstance(error, ssl.SSLError):
        return PoolUnreachable("The GPU pool does not answer at the moment.", _HUB)
    if isinstance(error, ssl.SSLError):
        return PoolUnreachable(
            f"The server at {place} could not prove its identity: {error.reason}.", _ADDRESS
        )
    if isinstance(error, PermissionError):
        return PoolUnreachable(f"You may not use the pool that is served at {place}.", _ASK)
    if isinstance(error, (TimeoutError, NotConnectedError)):
        return PoolUnreachable(f"The service of the pool at {place} does not answer.", _AGAIN)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return PoolUnreachable(f"No pool is served at {place}.", _START)
    if isinstance(error, ConnectionRefusedError):
        return PoolUnreachable(f"The service of the pool at {place} has ended.", _START)
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        words = "closes connections: it is about to stop, or you have too many open"
        return PoolUnreachable(f"The service of the pool at {place} {words}.", _AGAIN)
    return PoolUnreachable(
        f"The service of the pool at {place} cannot be asked: {error.strerror or error}.", _AGAIN
    )
