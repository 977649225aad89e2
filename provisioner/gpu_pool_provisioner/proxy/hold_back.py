"""Holds what would make a running kernel work, and passes on the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import zmq

from gpu_pool_provisioner.proxy.channels import Channels
from gpu_pool_provisioner.proxy.pending import PendingKernel
from gpu_pool_provisioner.proxy.relay import Relay

#: Where a message's header is, from its end.
_HEADER: Final = 4
#: Types of requests that a parked kernel may answer: on shell, and on control.
_QUESTIONS: Final = (
    *(b'"kernel_info_request"', b'"comm_info_request"'),
    *(b'"history_request"', b'"is_complete_request"'),
)
_HARMLESS: Final = (
    *(b'"shutdown_request"', b'"interrupt_request"', b'"kernel_info_request"', b'"usage_request"'),
    *(b'"create_subshell_request"', b'"delete_subshell_request"', b'"list_subshell_request"'),
)
_INTERRUPT: Final = (b'"interrupt_request"',)


def hold_work(
    front: Channels,
    relay: Relay,
    pending: PendingKernel,
    submitted: Callable[[], None],
    waits: Callable[[], bool],
) -> None:
    """Hold what would make a kernel work whose slice is not its own just now, until something else is done.

    ``submitted`` is called for whatever is held; ``waits`` is whether the kernel waits for its slice.
    """

    def shell(frames: list[zmq.Frame]) -> None:
        """Pass on questions about the kernel's state; hold whatever makes it work."""
        if _is_one_of(_QUESTIONS, frames):
            relay.back["shell"].send(frames)
            return
        pending.receive("shell", frames)
        if pending.holds_work:
            submitted()

    def control(frames: list[zmq.Frame]) -> None:
        """Pass on what does not make the kernel work, but an interrupt of a cell that waits here."""
        interrupt = waits() and _is_one_of(_INTERRUPT, frames)
        if _is_one_of(_HARMLESS, frames) and not interrupt:
            relay.back["control"].send(frames)
        else:
            pending.receive("control", frames)

    front["shell"].on_message = shell
    front["control"].on_message = control


def _is_one_of(kinds: Sequence[bytes], frames: list[zmq.Frame]) -> bool:
    header = frames[-_HEADER].bytes if len(frames) > _HEADER else b""
    return any(kind in header for kind in kinds)
