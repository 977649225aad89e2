"""Why a service cannot be reached, in words."""

from __future__ import annotations

from pathlib import Path

from gpu_pool_client.errors import PoolUnreachable

_START = (
    'Start "gpu-pool serve", or ask the administrator to; or unset GPU_POOL_URL to use a pool of your own.'
)
_ASK = "Ask the administrator, who chose by --mode and by the socket's group who may."
_AGAIN = "Try again; if that does not help, the service's log says why."


def may_pass(error: OSError) -> bool:
    """Whether a restart of the service, or a moment's patience, would put an end to this."""
    return not isinstance(error, (PermissionError, NotADirectoryError, TimeoutError))


def explain(error: OSError, path: Path) -> PoolUnreachable:
    """Say why nobody answers at the socket ``path``, and what to do about it."""
    if isinstance(error, PermissionError):
        return PoolUnreachable(f"You may not use the pool that is served at {path}.", _ASK)
    if isinstance(error, TimeoutError):
        return PoolUnreachable(f"The service of the pool at {path} does not answer.", _AGAIN)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return PoolUnreachable(f"Nobody serves a pool at {path}.", _START)
    if isinstance(error, ConnectionRefusedError):
        return PoolUnreachable(f"The service of the pool at {path} has ended.", _START)
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        words = "breaks connections off: it is about to stop, or too many of yours are open"
        return PoolUnreachable(f"The service of the pool at {path} {words}.", _AGAIN)
    return PoolUnreachable(
        f"The service of the pool at {path} cannot be asked: {error.strerror or error}.", _AGAIN
    )
