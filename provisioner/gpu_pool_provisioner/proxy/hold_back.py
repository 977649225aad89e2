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


class HoldBack:
    """Stands between the frontends and a kernel whose slice is not its own just now."""

    def __init__(
        self, relay: Relay, pending: PendingKernel, submitted: Callable[[], None], waits: Callable[[], bool]
    ) -> None:
        """Take what is called for whatever is held; ``waits`` is whether the kernel waits for its slice."""
        self._relay = relay
        self._pending = pending
        self._submitted = submitted
        self._waits = waits

    def begin(self, front: Channels) -> None:
        """Hold from now on, until something else is done with what arrives."""
        front["shell"].on_message = self._shell
        front["control"].on_message = self._control

    def _shell(self, frames: list[zmq.Frame]) -> None:
        """Pass on questions about the kernel's state; hold whatever makes it work."""
        if _is_one_of(_QUESTIONS, frames):
            self._relay.back["shell"].send(frames)
            return
        self._pending.receive("shell", frames)
        if self._pending.holds_work:
            self._submitted()

    def _control(self, frames: list[zmq.Frame]) -> None:
        """Pass on what does not make the kernel work, but an interrupt of a cell that waits here."""
        interrupt = self._waits() and _is_one_of(_INTERRUPT, frames)
        if _is_one_of(_HARMLESS, frames) and not interrupt:
            self._relay.back["control"].send(frames)
        else:
            self._pending.receive("control", frames)


def _is_one_of(kinds: Sequence[bytes], frames: list[zmq.Frame]) -> bool:
    header = frames[-_HEADER].bytes if len(frames) > _HEADER else b""
    return any(kind in header for kind in kinds)
