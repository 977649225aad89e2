"""What the Tab key offers beside verbs and options: leases, GPUs, kernels and workloads.

Whoever presses it waits, and sees no messages: where the pool is away, slow or
broken, nothing is offered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import click
from click.shell_completion import CompletionItem

from gpu_pool.cli.formatting import granted, safe
from gpu_pool.cli.session import CommandSession
from gpu_pool_client import Lease, LeaseState, PoolStatus

#: Seconds in which the pool has to answer.
_WITHIN: Final = 1.0

_Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
#: (what is offered, what it is).
_Offers = Iterable[tuple[str, str]]


def _offering(find: Callable[[CommandSession], _Offers]) -> _Complete:
    """Make what finds all that there is complete a word for Click."""

    def complete(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
        # Nobody wants to read here why there is nothing.
        with contextlib.suppress(Exception):
            given = context.params.get(parameter.name or "")
            named = given if isinstance(given, tuple) else ()
            found = dict(find(context.ensure_object(CommandSession)))
            return [
                CompletionItem(word, help=said)
                for word, said in found.items()
                if word.startswith(begun) and word not in named
            ]
        return []

    return complete


def _status(session: CommandSession) -> PoolStatus:
    """Return the pool's status. Raises whatever is wrong, also that a store would have to be made."""
    if not session.is_served:
        from gpu_pool.embedded.pool import store_path

        store_path(session.address).stat()

    async def ask() -> PoolStatus:
        async with session.connect() as pool:
            return await pool.status()

    return asyncio.run(asyncio.wait_for(ask(), _WITHIN))


def _told(leases: Iterable[Lease]) -> Iterator[tuple[str, str]]:
    for lease in leases:
        what = granted(lease) if lease.slices else f"{lease.request.named}, {lease.state.value}"
        yield lease.id, f"{what}, {safe(lease.holder.user)}"


def _leases(session: CommandSession) -> _Offers:
    status = _status(session)
    return _told((*status.leases, *status.queue))


def _held_leases(session: CommandSession) -> _Offers:
    return _told(lease for lease in _status(session).leases if lease.state is LeaseState.HELD)


def _waiting_leases(session: CommandSession) -> _Offers:
    return _told(_status(session).queue)


def _devices(session: CommandSession) -> _Offers:
    for each in _status(session).devices:
        label = safe(each.device.label) + (", drained" if each.drained else "")
        yield str(each.device.index), label
        yield each.device.uuid, label


def _kernels(_session: CommandSession) -> _Offers:
    from gpu_pool_kernels.installer import installed

    return ((each.name, safe(each.display_name)) for each in installed())


def _base_kernels(_session: CommandSession) -> _Offers:
    from jupyter_client.kernelspec import KernelSpecManager

    return ((name, "") for name in KernelSpecManager().find_kernel_specs())


def _workloads(_session: CommandSession) -> _Offers:
    from gpu_pool.simulation import WORKLOADS

    return ((name, each.about) for name, each in WORKLOADS.items())


leases = _offering(_leases)
held_leases = _offering(_held_leases)
waiting_leases = _offering(_waiting_leases)
devices = _offering(_devices)
kernels = _offering(_kernels)
base_kernels = _offering(_base_kernels)


def workloads(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Offer the workloads by name; a file of one's own is completed by the shell."""
    return _offering(_workloads)(context, parameter, begun) or [CompletionItem(begun, type="file")]
