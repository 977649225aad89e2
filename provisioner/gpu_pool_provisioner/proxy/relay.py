"""Frames from the frontends to the real kernel and back, as they are."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

import zmq
from jupyter_client.session import DELIM, Session

from gpu_pool_client._log import RareWarnings
from gpu_pool_provisioner.proxy.channels import ANSWERING, Channels, close_all, connect_back, ignore
from gpu_pool_provisioner.proxy.messages import HEADER, Message, UnreadableMessageError, read_message

#: Seconds after which a kernel that has answered is asked again, and how often, until its output is heard.
_ASK_AGAIN: Final = 0.2
_TRIES: Final = 10
#: No status message of a kernel has more bytes of content.
_STATUS_BYTES: Final = 64
#: What in a status message's parent says that somebody works with the kernel.
_WORK: Final = (b'"execute_request"', b'"comm_msg"', b'"comm_open"')
#: How messages of our own are named.
_OURS: Final = b'"gpu_pool_'
#: What a kernel of protocol 5.4 or newer publishes to each new subscriber of its output (JEP 65).
_WELCOME: Final = b'"iopub_welcome"'
#: What a kernel can work on at once, and lines that wait to be told: a hostile one makes up more.
_MOST_AT_WORK: Final = 1_000
_MOST_UNTOLD: Final = 20
_BOTH_WAYS: Final = ("shell", "control", "stdin", "hb")
#: Pieces of work that are kept until they are told; of more the oldest are left out.
_MOST_PIECES: Final = 1_000
#: Seconds by which two clocks may drift apart from one time that they are told to the next.
_CLOCK_WAS_SET: Final = 1.0
#: Seconds between two times that they are told.
EVERY: Final = 60.0


class BusyTimes:
    """When a kernel worked, in pieces: Unix seconds of the begin, and the length in seconds.

    Where the clock of the wall is set before a piece is told, it is told by that clock as it is then, by
    which the pool reads it.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall, self._clock = wall, clock
        #: When the piece began that is under way, by both clocks.
        self._begun: tuple[float, float] | None = None
        #: With each, by how much the clock of the wall was ahead of the other one then.
        self._spans: list[tuple[float, float, float]] = []
        self._told_at = clock()

    def see(self, *, busy: bool) -> None:
        """Note whether the kernel works now."""
        if busy and self._begun is None:
            self._begun = self._wall(), self._clock()
        elif not busy and self._begun is not None:
            began, by_clock = self._begun
            self._begun = None
            self._spans.append((began, self._clock() - by_clock, began - by_clock))
            del self._spans[:-_MOST_PIECES]

    def due(self, *, at_once: bool = False) -> tuple[tuple[float, float], ...]:
        """Return what is to be told now, once; nothing if that was done lately, unless ``at_once``."""
        now = self._clock()
        if not self._spans or (now - self._told_at < EVERY and not at_once):
            return ()
        ahead = self._wall() - now
        # What is told twice keeps its begin, by which the pool knows it again, unless the clock was set.
        told = tuple(
            (began + (ahead - before if abs(ahead - before) > _CLOCK_WAS_SET else 0.0), seconds)
            for began, seconds, before in self._spans
        )
        self._spans, self._told_at = [], now
        return told

    def untold(self, spans: Iterable[tuple[float, float]]) -> None:
        """Keep what was due and nobody has heard, until it is due again."""
        ahead = self._wall() - self._clock()
        self._spans = [*((*span, ahead) for span in spans), *self._spans][-_MOST_PIECES:]


class UnencryptedError(Exception):
    """The kernel listens without the encryption that its connection file asks for."""


class Relay:
    """Stands between the front of a kernel and the real one, which may not listen yet."""

    def __init__(
        self,
        connection: Mapping[str, Any],
        session: Session,
        front: Channels,
        *,
        once: Collection[str] | None = None,
    ) -> None:
        """Connect to the kernel; ``once`` is as :func:`connect_back` takes it."""
        self._session = session
        self._front = front
        self._warnings = RareWarnings()
        self._answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        #: Set once the kernel's output, and what it asks for, is heard.
        self._heard, self._connected = asyncio.Event(), asyncio.Event()
        #: When the kernel last began or ended work that was submitted (``time.monotonic()``); None if never.
        self.last_activity: float | None = None
        #: When it worked, for the pool's history.
        self.busy_times = BusyTimes()
        #: What is done with messages of our own that the kernel publishes, by their type.
        self.messages: dict[str, Callable[[Mapping[str, Any]], None]] = {}
        #: Headers of what the kernel works on, by message id: with subshells, several at a time.
        self._at_work: dict[str, Message] = {}
        #: Code that was passed on and has had no reply, by message id.
        self._unanswered: dict[str, list[zmq.Frame]] = {}
        #: Headers of code that was passed on, by message id, until the kernel has published that it is idle.
        self._not_idle: dict[str, Message] = {}
        self._untold: list[str] = []
        #: Set once the kernel works again.
        self._work_comes = asyncio.Event()
        handlers = {
            **dict.fromkeys(_BOTH_WAYS, self._take_answer),
            "hb": ignore,
            "iopub": self._output,
        }
        #: The channels on which the kernel may still send something, and whether all were lost.
        self._open: set[str] = set()
        self._lost = asyncio.Event()
        self._is_once = once is not None
        self._closing: set[asyncio.Task[None]] = set()
        self.back = connect_back(connection, handlers, self._connection, once=once)

    async def ready(self) -> dict[str, Any]:
        """Return the content of the kernel's first kernel_info_reply, once its output and stdin are heard.

        A kernel that knows no control channel answers on shell. One without output or stdin is waited for
        only a while. Raises ``UnencryptedError``.
        """
        self._ask("control")
        self._ask("shell")
        answer = await self._answer
        for _ in range(_TRIES):
            both = asyncio.gather(self._heard.wait(), self._connected.wait())
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(both, _ASK_AGAIN)
                break
            if not self._heard.is_set():
                self._ask("shell")
        return answer

    def begin(self) -> None:
        """Connect the two sides. What was held must be sent before anything else happens on the loop."""
        for channel in _BOTH_WAYS:
            self._front[channel].on_message = self.back[channel].send
        self._front["shell"].on_message = partial(self.pass_on, "shell")
        self._pass_back()

    def _pass_back(self) -> None:
        for channel in _BOTH_WAYS:
            self.back[channel].on_message = self._front[channel].send
        for channel in ("shell", "control"):
            self.back[channel].on_message = partial(self._reply, channel)

    def go_on(self, before: Relay) -> None:
        """Pass on what the kernel says, in place of the relay that it had ``before``."""
        self.last_activity, self.busy_times = before.last_activity, before.busy_times
        self._untold = before._untold
        self._pass_back()

    @property
    def busy(self) -> bool:
        """Whether the kernel works on what somebody submitted."""
        return bool(self._at_work)

    @property
    def seen(self) -> tuple[bool, float]:
        """Whether the kernel works, and when it last began or ended work; 0 if never."""
        return self.busy, self.last_activity or 0.0

    def unanswered(self) -> list[list[zmq.Frame]]:
        """Return the code that was passed on and has had no reply, in order."""
        return list(self._unanswered.values())

    def end_halves(self) -> None:
        """End for an ended kernel what it has answered, or done, without having said the other.

        A reply and the status *idle* go out on two sockets, so that of a kernel that is killed one of them
        may be lost, and a page has a cell for running until both have come (Jupyter's messaging protocol,
        "Kernel status"). What has no reply, but whose output is whole, has no place for another output.
        """
        for message_id, header in {**self._not_idle, **self._at_work}.items():
            if message_id not in self._unanswered:
                self._publish("status", {"execution_state": "idle"}, header)
        for message_id, frames in list(self._unanswered.items()):
            if message_id not in self._not_idle:
                del self._unanswered[message_id]
                with suppress(UnreadableMessageError):
                    identities, message = read_message(self._session, frames, replayed=True)
                    reply = self._session.msg("execute_reply", {"status": "aborted"}, parent=message)
                    self._front["shell"].send(self._session.serialize(reply, identities))
        self._not_idle.clear()
        self._at_work.clear()

    async def read_last(self, within: float) -> None:
        """Return once all that an ended kernel has sent was passed on, or so many seconds later.

        It takes that long where a process that the kernel has left behind keeps its connections open.
        """
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._read_last(), within)

    async def _read_last(self) -> None:
        if self._open:
            await self._lost.wait()
        for channel in ANSWERING:
            await self.back[channel].read()

    def close(self) -> None:
        """Let go of the kernel. May be repeated."""
        close_all(self.back)

    def _ask(self, channel: str) -> None:
        self.back[channel].send(self._session.serialize(self._session.msg("kernel_info_request", {})))

    def _take_answer(self, frames: list[zmq.Frame]) -> None:
        if self._answer.done() or frames[0].bytes != DELIM:
            return
        try:
            _, message = read_message(self._session, frames)
        except UnreadableMessageError as error:
            self._warnings.warn("Ignored what is not a kernel's signed reply: %s", error)
            return
        self._answer.set_result(message["content"])

    def tell(self, text: str) -> None:
        """Print a line below the cell that runs or is to run, or else below the next one."""
        others = [each for each in self._untold if each != text]
        self._untold = [*others, text][-_MOST_UNTOLD:]
        submitted = [header for each, header in self._not_idle.items() if each in self._unanswered]
        if headers := [*self._at_work.values()] or submitted:
            self._tell_now(headers[-1])

    def show(self, text: str) -> None:
        """Print a line among the output of the cell that runs, if one does."""
        if self.busy:
            content = {"name": "stdout", "text": f"{text}\n"}
            self._publish("stream", content, next(reversed(self._at_work.values())))

    async def is_idle(self, within: float) -> bool:
        """Whether the kernel has done all that was passed on to it, and did nothing on the way here.

        To be asked while nothing more is passed on: a kernel answers in the order of asking.
        """
        before = self.last_activity
        for channel in ("control", "shell"):
            self._answer = asyncio.get_running_loop().create_future()
            self._ask(channel)
            await asyncio.wait({self._answer}, timeout=within)
            if not self._answer.done():
                return False
        return not self.busy and not self._unanswered and self.last_activity == before

    async def works(self) -> None:
        """Return once the kernel works on what was submitted, or something is submitted to it."""
        if not self.busy and not self._unanswered:
            self._work_comes.clear()
            await self._work_comes.wait()

    def interrupt(self) -> None:
        """Interrupt the kernel by a message, where it takes no signals."""
        self.back["control"].send(self._session.serialize(self._session.msg("interrupt_request", {})))

    def run_silently(self, code: str) -> None:
        """Let the kernel run code of ours that nobody sees."""
        content = {"code": code, "silent": True, "store_history": False, "allow_stdin": False}
        self.back["shell"].send(self._session.serialize(self._session.msg("execute_request", content)))

    def _output(self, frames: list[zmq.Frame]) -> None:
        header = frames[-HEADER].bytes if len(frames) > HEADER else b""
        if _OURS in header and self._take(frames):
            return
        if _WELCOME in header:
            # It is for this proxy, which subscribes once. Each page has had ours, from when it subscribed; a
            # second one, for a topic that it has not asked for, breaks some (jupyter_server#1497).
            self._heard.set()
            return
        is_short = len(frames[-1]) <= _STATUS_BYTES and len(frames) > 3
        state = frames[-1].bytes if is_short and b'"execution_state"' in frames[-1].bytes else b""
        # To its frontends it has been there for a long time. JupyterLab from 4.5 on would show it as starting
        # until a cell is run, since it ignores the state of a kernel that answers kernel_info_request.
        if b'"starting"' not in state:
            self._front["iopub"].send(frames)
        self._heard.set()
        if state:
            self._observe(frames[-3].bytes, state)

    def _connection(self, channel: str, event: int) -> None:
        if channel == "stdin":
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected.set()
            # A connection that was lost comes back by itself.
            is_refused = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and not self._connected.is_set()
            if is_refused and not self._answer.done():
                self._answer.set_exception(UnencryptedError())
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._open.add(channel)
        elif event == zmq.EVENT_DISCONNECTED:
            self._open.discard(channel)
            if self._is_once:
                closing = asyncio.create_task(self._close_read(channel))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            if not self._open:
                self._lost.set()

    async def _close_read(self, channel: str) -> None:
        await self.back[channel].read()
        self.back[channel].close()

    def _reply(self, channel: str, frames: list[zmq.Frame]) -> None:
        if frames[0].bytes == DELIM:  # to a request of ours, which has no identity
            self._take_answer(frames)
            return
        if len(frames) > HEADER and b'"execute_reply"' in frames[-HEADER].bytes:
            self._unanswered.pop(_header(frames[-HEADER + 1].bytes).get("msg_id", ""), None)
            if len(self._not_idle) > len(self._unanswered) + _MOST_AT_WORK:
                del self._not_idle[next(each for each in self._not_idle if each not in self._unanswered)]
        self._front[channel].send(frames)

    def pass_on(self, channel: str, frames: list[zmq.Frame]) -> None:
        """Send the kernel what came for it on a channel."""
        if channel == "shell" and len(frames) > HEADER and b'"execute_request"' in frames[-HEADER].bytes:
            header = _header(frames[-HEADER].bytes)
            message_id = header.get("msg_id", "")
            self._unanswered[message_id] = frames
            self._not_idle[message_id] = header
            self._work_comes.set()
            if self._untold:  # not once it runs: what is told may be why it does not
                self._tell_now(header)
        self.back[channel].send(frames)

    def _observe(self, parent: bytes, content: bytes) -> None:
        if any(kind in parent for kind in _WORK) and self._session.session.encode() not in parent:
            header = _header(parent)
            message_id = header.get("msg_id", "")
            self.last_activity = time.monotonic()
            if b'"busy"' not in content:
                self._at_work.pop(message_id, None)
                self._not_idle.pop(message_id, None)
                self.busy_times.see(busy=self.busy)
                return
            self.busy_times.see(busy=True)
            self._work_comes.set()
            self._at_work[message_id] = header
            if len(self._at_work) > _MOST_AT_WORK:
                del self._at_work[next(iter(self._at_work))]
            if self._untold:
                self._tell_now(header)

    def _tell_now(self, header: Message) -> None:
        lines, self._untold = self._untold, []
        content = {"name": "stderr", "text": "".join(f"{line}\n" for line in lines)}
        self._publish("stream", content, header)

    def _publish(self, kind: str, content: Mapping[str, Any], header: Message) -> None:
        message = self._session.msg(kind, dict(content))
        message["parent_header"] = header
        self._front["iopub"].send(self._session.serialize(message, kind.encode()))

    def _take(self, frames: list[zmq.Frame]) -> bool:
        """Take a message of ours that the kernel published; return whether it was one."""
        try:
            _, message = read_message(self._session, frames)
        except UnreadableMessageError as error:
            self._warnings.warn("Ignored what is not a kernel's signed message: %s", error)
            return False
        kind, content = message["msg_type"], message["content"]
        if kind not in self.messages:
            return False
        self.messages[kind](content)
        return True


def _header(text: bytes) -> Message:
    """Read a message's header, which a kernel may have made up."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    known = isinstance(header, dict) and isinstance(header.get("msg_id", ""), str)
    return header if known else {}
