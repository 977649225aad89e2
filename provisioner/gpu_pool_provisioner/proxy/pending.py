"""What a waiting kernel answers at once, what it holds, and what the waiting cell shows.

It answers with the kernel's own key, so that frontends see nothing unusual.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import zmq
from jupyter_client.session import Session

from gpu_pool_client._log import RareWarnings
from gpu_pool_provisioner.proxy import messages
from gpu_pool_provisioner.proxy.channels import Channels, ignore
from gpu_pool_provisioner.proxy.messages import HEADER, Message, UnreadableMessageError, read_message
from gpu_pool_provisioner.proxy.relay import Relay
from gpu_pool_provisioner.session import events, texts

#: Seconds after which what a waiting cell shows is published again, changed or not: by its messages a Jupyter
#: server, and by that a culler of a JupyterHub, knows that a kernel is not idle.
SHOWN_EVERY: Final = 60.0
#: Seconds for which a waiting cell counts as work after the last message of a frontend. Then nothing is
#: published of the wait, and a server that nobody has a page of may be culled.
COUNTS_FOR: Final = 4 * 3_600.0
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
#: What pages ask whenever somebody turns to a notebook: whether its kernel is being debugged.
_DEBUG: Final = (b'"debug_request"',)
_DEBUG_INFO: Final = b'"debugInfo"'


@dataclass(frozen=True, slots=True)
class HeldMessage:
    """One message that waits for the kernel, as it came."""

    channel: str
    frames: list[zmq.Frame]
    identities: list[bytes]
    message: Message
    #: Whether code was submitted, and whether somebody looks at its output.
    is_execution: bool
    is_cell: bool


class PendingKernel:
    """Receives messages for a kernel that does not run."""

    def __init__(
        self,
        session: Session,
        front: Channels,
        introduction: Mapping[str, Any],
        post: Callable[[events.Event], None],
        interrupt: Callable[[], None],
    ) -> None:
        """Answer nothing yet. ``post`` tells what frontends do, and ``interrupt`` that one interrupts."""
        self._session = session
        self._front = front
        self._warnings = RareWarnings()
        self._post, self._interrupt = post, interrupt
        #: The content of kernel_info_reply.
        self.introduction = introduction
        self._held: list[HeldMessage] = []
        #: What the waiting cell shows, or would show if there were one.
        self.text = ""
        #: The cell that shows the notice, and the notice's display_id.
        self._shown: tuple[HeldMessage, str] | None = None
        #: When something was last published of the wait, and when a frontend was last heard.
        self._published_at = self._heard_at = time.monotonic()
        front["iopub"].on_message = self._greet

    @property
    def holds_code(self) -> bool:
        """Whether code waits to be run."""
        return any(held.is_execution for held in self._held)

    @property
    def holds_work(self) -> bool:
        """Whether anything waits that the kernel would have to work on: code, or a widget's message."""
        return bool(self._held)

    def receive_all(self) -> None:
        """Answer in the kernel's name from now on, or hold."""
        for channel in ("shell", "control"):
            self._front[channel].on_message = partial(self.receive, channel)
        self._front["hb"].on_message = self._front["hb"].send

    def hold_all(self, *, answering: bool = True) -> None:
        """Hold what is submitted from now on, whatever it is; without ``answering``, be otherwise silent."""
        if answering:
            self._front["hb"].on_message = self._front["hb"].send
        else:
            for channel in ("control", "stdin", "hb"):
                self._front[channel].on_message = ignore
        self._front["shell"].on_message = self.hold

    def hold(self, frames: list[zmq.Frame]) -> None:
        """Hold a message of the shell channel, whatever it is."""
        held = self._read("shell", frames)
        if held is not None:
            self._held.append(held)

    def hold_first(self, messages: Iterable[list[zmq.Frame]]) -> None:
        """Hold messages that were submitted before those that are held."""
        later, self._held = self._held, []
        for frames in messages:
            self.hold(frames)
        self._held += later

    def receive(self, channel: str, frames: list[zmq.Frame]) -> None:
        """Answer a message, or hold it."""
        held = self._read(channel, frames)
        if held is None:
            return
        kind = held.message["msg_type"]
        if kind == "kernel_info_request":
            self._answer(held, self.introduction)
        elif channel == "control" and kind in ("interrupt_request", "shutdown_request"):
            self._answer(held, {"status": "ok", **held.message["content"]})
            if kind == "interrupt_request":
                self._interrupt()
            else:
                self._post(events.StopRequested())
        elif kind in messages.ANSWERS:
            self._answer(held, messages.ANSWERS[kind])
        elif channel == "control" and kind != "debug_request":
            self._answer(held, messages.error_reply(texts.NOT_GRANTED, "The kernel waits for its GPU slice."))
        else:
            self._held.append(held)
            if held.is_execution:
                self._post(events.WorkSubmitted())
                self._show()

    def hold_work(self, relay: Relay, is_resuming: Callable[[], bool]) -> None:
        """Hold what would make a running kernel work, and pass on the rest, until something else is done.

        While it ``is_resuming``, an interrupt is of a cell that waits here, and not for the kernel.
        """

        def shell(frames: list[zmq.Frame]) -> None:
            if _is_one_of(_QUESTIONS, frames):
                relay.back["shell"].send(frames)
                return
            self.receive("shell", frames)
            if self._held:
                self._post(events.WorkSubmitted())

        def control(frames: list[zmq.Frame]) -> None:
            asks_debugger = _is_one_of(_DEBUG, frames) and _DEBUG_INFO in frames[-1].bytes
            is_harmless = _is_one_of(_HARMLESS, frames) or asks_debugger
            if is_harmless and not (is_resuming() and _is_one_of(_INTERRUPT, frames)):
                relay.back["control"].send(frames)
            else:
                self.receive("control", frames)

        self._front["shell"].on_message, self._front["control"].on_message = shell, control

    def show(self, text: str) -> None:
        """Show ``text`` in the first waiting cell, in place of what it showed before. Empty: nothing.

        To be called once in a while for as long as a cell waits, also with the same text.
        """
        now, is_new = time.monotonic(), text != self.text
        self.text = text
        if now < self._heard_at + COUNTS_FOR and (is_new or now >= self._published_at + SHOWN_EVERY):
            self._show()

    def refuse(self, text: str, name: str = texts.NOT_GRANTED) -> None:
        """Answer the first waiting cell with an error, and abort the others, as a kernel would."""
        executions = [held for held in self._held if held.is_execution]
        first = next((held for held in executions if held.is_cell), None)
        self._held = [held for held in self._held if not held.is_execution]
        for held in executions:
            if held is first:
                self._fail(held, name, text)
            else:
                self._answer(held, {"status": "aborted"})

    def drop(self) -> None:
        """Forget what was held, as a restart does; code that was submitted is answered as aborted."""
        executions = [held for held in self._held if held.is_execution]
        self._held = []
        self._clear()
        for held in executions:
            self._answer(held, {"status": "aborted"})

    def hand_over(self, pass_on: Callable[[str, list[zmq.Frame]], None]) -> None:
        """Send what was held to the kernel, in order, and take the notice away."""
        self._clear()
        self.text = ""
        held_back, self._held = self._held, []
        for held in held_back:
            pass_on(held.channel, held.frames)

    def _greet(self, frames: list[zmq.Frame]) -> None:
        """Welcome a new subscriber of iopub, as kernels of protocol 5.4 do."""
        subscription = frames[0].bytes
        if subscription[:1] == b"\x01":
            topic = subscription[1:].decode(errors="replace")
            self._publish("iopub_welcome", {"subscription": topic}, None)

    def _read(self, channel: str, frames: list[zmq.Frame]) -> HeldMessage | None:
        try:
            # One that was passed on comes back when its kernel is ended.
            identities, message = read_message(self._session, frames, replayed=True)
        except UnreadableMessageError as error:
            self._warnings.warn("Ignored what is no message to a kernel: %s", error)
            return None
        self._heard_at = time.monotonic()
        is_execution = message["msg_type"] == "execute_request"
        is_cell = is_execution and not message["content"].get("silent")
        return HeldMessage(channel, frames, identities, message, is_execution, is_cell)

    def _answer(self, to: HeldMessage, content: Mapping[str, Any]) -> None:
        self._publish("status", {"execution_state": "busy"}, to)
        self._reply(to, content)
        self._publish("status", {"execution_state": "idle"}, to)
        self._publish_state(to)

    def _publish_state(self, answered: HeldMessage) -> None:
        """Say how the kernel is to a frontend that would take it from the last answer, or from none."""
        waiting = next((held for held in self._held if held.is_execution), None)
        if waiting is not None:
            self._publish("status", {"execution_state": "busy"}, waiting)
        elif answered.message["msg_type"] == "kernel_info_request":
            # A page that connects again asks only this, and JupyterLab from 4.5 on takes no note of the
            # state in its answer (PageConfig's untracked_message_types): it would show an unknown kernel.
            self._publish("status", {"execution_state": "idle"}, None)

    def _fail(self, held: HeldMessage, name: str, text: str) -> None:
        self._publish("status", {"execution_state": "busy"}, held)
        self._clear()
        self._publish("error", messages.error(name, text), held)
        self._reply(held, messages.error_reply(name, text))
        self._publish("status", {"execution_state": "idle"}, held)

    def _show(self) -> None:
        cell = next((held for held in self._held if held.is_cell), None)
        if cell is None or not self.text:
            return
        self._published_at, text = time.monotonic(), messages.dated(self.text, time.time())
        if self._shown is not None and self._shown[0] is cell:
            self._publish("update_display_data", messages.display(text, self._shown[1]), cell)
            return
        self._shown = cell, uuid.uuid4().hex
        self._publish("status", {"execution_state": "busy"}, cell)
        self._publish("display_data", messages.display(text, self._shown[1]), cell)

    def _clear(self) -> None:
        if self._shown is not None:
            self._publish("clear_output", {"wait": False}, self._shown[0])
            self._shown = None

    def _reply(self, to: HeldMessage, content: Mapping[str, Any]) -> None:
        kind = to.message["msg_type"].replace("_request", "_reply")
        message = self._session.msg(kind, dict(content), parent=to.message)
        self._front[to.channel].send(self._session.serialize(message, to.identities))

    def _publish(self, kind: str, content: dict[str, Any], parent: HeldMessage | None) -> None:
        message = self._session.msg(kind, content, parent=parent.message if parent else None)
        self._front["iopub"].send(self._session.serialize(message, kind.encode()))


def _is_one_of(kinds: Sequence[bytes], frames: list[zmq.Frame]) -> bool:
    header = frames[-HEADER].bytes if len(frames) > HEADER else b""
    return any(kind in header for kind in kinds)
