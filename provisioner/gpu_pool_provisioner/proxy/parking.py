"""A kernel whose slice is lent to others while it idles, and taken again at the next cell.

Its process lives on, with all its variables. What is submitted meanwhile is
held: no cell runs without the slice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import zmq

from gpu_pool_client import GpuPoolError, Lease, LeaseState, NotAllowed, PoolUnreachable
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.kernel_slice import NOT_NOW
from gpu_pool_provisioner.proxy.channels import Channels
from gpu_pool_provisioner.proxy.lease_client import LeaseClient, retry
from gpu_pool_provisioner.proxy.pending import PendingKernel
from gpu_pool_provisioner.proxy.runs import KernelRun
from gpu_pool_provisioner.session import texts

#: Seconds in which an idle kernel answers; one that does not is left alone.
_ANSWERS_WITHIN: Final = 5.0
#: What a Python kernel that has not initialised CUDA sees of its devices.
_VISIBLE: Final = "__import__('os').environ.update({!r})"
#: The variables that say so, the first of them always.
_NAMING: Final = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_NONE: Final = {_NAMING[0]: "-1"}
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
#: Changes the variables of a Python kernel's slice, by what the kernel's extension has for that.
_CHANGE: Final = (
    "__import__('importlib').import_module('.resize', get_ipython().find_line_magic('gpu').__module__"
    ".rpartition('.')[0]).apply({!r})"
)
_AT_WORK: Final = "The size of a kernel's GPU slice cannot change while it runs a cell."
_WHEN_ENDED: Final = "Try again when its cells have ended."
_POISONED: Final = (
    "While this kernel's GPU slice was lent to others, something in it looked for a GPU and found none. "
    "If CUDA now says that there is no device, restart the kernel."
)


class Parking:
    """One time that a kernel is parked."""

    def __init__(
        self,
        lease_client: LeaseClient,
        run: KernelRun,
        front: Channels,
        pending: PendingKernel,
        *,
        given_back: bool = False,
    ) -> None:
        """``given_back`` is whether the kernel's user asks for it."""
        self._lease_client = lease_client
        self._run = run
        self._front = front
        self._pending = pending
        self._wanted = asyncio.Event()
        self._given_up = asyncio.Event()
        #: Whether something was submitted, and the slice is asked for again.
        self.resuming = False
        #: Whether its slice has gone.
        self.is_parked = False
        #: Whether the pool said that it cannot be parked.
        self.is_refused = False
        #: Whether it was asked and did not answer, so that the slice may have gone, or go later.
        self.is_unanswered = False
        #: Whether the kernel is over: nothing may be passed on to it any more.
        self.is_over = False
        #: Whether its user gave the slice back.
        self.is_given_back = given_back
        self._moved = False
        #: Who took the slice, where it was not for its idleness alone.
        self._taken = ""

    @property
    def why(self) -> str:
        """Why it has no slice, in sentences."""
        return self._taken or (texts.GIVEN_BACK if self.is_given_back else texts.PARKED)

    def resume(self) -> None:
        """Take the slice again, although nothing was submitted."""
        self._wanted.set()

    def give_up(self) -> None:
        """Let what was submitted fail, and leave the slice to others. The kernel stays as it is."""
        self._given_up.set()

    async def begin(self) -> bool:
        """Hold what is submitted from now on, and lend the slice; return whether that was done.

        Not where the kernel turns out to be at work, or to keep state on its device.
        """
        self._hold_back()
        if await self._is_idle() and await self._parked():
            return True
        self._relay_again()
        return False

    async def complete(self) -> None:
        """Hold what is submitted from now on: the slice has gone, and the answer that said so was lost.

        The kernel may have begun to work since then, and gets the slice back at once.
        """
        self._hold_back()
        # Asked again, the pool moves away what it may have moved back when it could not answer.
        if not (await self._is_idle() and await self._parked()):
            self._moved, self.is_parked = await self._initialised(), True
            self._wanted.set()

    async def finds_idle(self) -> bool:
        """Hold what is submitted from now on if the kernel does nothing; otherwise all is relayed again.

        A kernel that does not answer, and works on nothing that is known, counts as idle.
        """
        relay = self._run.relay
        before = relay.last_activity
        self._hold_back()
        if await self._is_idle():
            return True
        does_nothing = not relay.busy and not relay.unanswered() and relay.last_activity == before
        if does_nothing and not self._wanted.is_set():
            return True
        self._relay_again()
        return False

    async def while_idle(self, grant: Callable[[], Awaitable[Mapping[str, Any]]]) -> Mapping[str, Any]:
        """Call ``grant`` while nothing is passed on, and tell the kernel the variables that it answers with.

        Raises ``NotAllowed`` where the kernel is at work, and what ``grant`` raises. It may be cancelled.
        """
        if self._run.relay.busy:
            raise NotAllowed(_AT_WORK, _WHEN_ENDED)
        self._hold_back()
        try:
            if not await self._is_idle():
                raise NotAllowed(_AT_WORK, _WHEN_ENDED)
            answer = await grant()
            if answer.get("variables"):
                self._run.relay.run_silently(_CHANGE.format(dict(answer["variables"])))
            return answer
        finally:
            if not self.is_over:
                self._relay_again()

    def _hold_back(self) -> None:
        self._front["shell"].on_message = self._hold
        self._front["control"].on_message = self._control

    async def _is_idle(self) -> bool:
        return await self._run.relay.is_idle(_ANSWERS_WITHIN) and not self._wanted.is_set()

    async def _parked(self) -> bool:
        """Lend the slice; return whether that was done."""
        self._moved = await self._initialised()
        try:
            parked = await self._lease_client.park()
        except (NotAllowed, *NOT_NOW) as error:
            self.is_refused = isinstance(error, NotAllowed)
            self.is_unanswered = isinstance(error, PoolUnreachable)
            get_logger().info("The slice of an idle kernel is kept: %s", error)
            return False
        self._taken, self.is_parked = parked.message, True
        self._show_devices(_NONE)
        return True

    async def until_resumed(self) -> Lease:
        """Return the lease when it is held again and everything is relayed again.

        Raises ``LeaseGone`` when the lease has ended.
        """
        resumed: Lease | None = None
        while resumed is None:
            await self._wanted.wait()
            self._wanted.clear()
            self._given_up.clear()
            resumed = await self._resumed()
        environment = resumed.environment
        self._show_devices({name: environment[name] for name in _NAMING if name in environment})
        # What had used CUDA before has had its state moved away and back.
        if not self._moved and await self._initialised():
            self._run.relay.tell(_POISONED)
        if self._taken:
            self._run.relay.tell(self._taken)
        self._relay_again()
        return resumed

    async def _resumed(self) -> Lease | None:
        """Return the lease once it is held again, None if that was given up."""
        self.resuming = True
        wait = asyncio.create_task(self._wait_for_slice())
        giving_up = asyncio.create_task(self._given_up.wait())
        whatever_first: set[asyncio.Future[Any]] = {wait, giving_up}
        try:
            await asyncio.wait(whatever_first, return_when=asyncio.FIRST_COMPLETED)
            if wait.done():
                return wait.result()
        finally:
            for task in (wait, giving_up):
                task.cancel()
            await asyncio.gather(wait, giving_up, return_exceptions=True)
            self.resuming = False
        self._pending.refuse(texts.gave_up(self._lease_client.size))
        self._pending.show("")
        try:
            await retry(self._lease_client.park, self._show_fault)
        except NotAllowed:  # it was granted, and used, in the same moment
            return await retry(self._lease_client.lease, self._show_fault)
        return None

    async def _wait_for_slice(self) -> Lease:
        lease = await retry(self._lease_client.resume, self._show_fault)
        if lease.state is LeaseState.WAITING:
            looked_at = asyncio.Event()
            looked_at.set()
            lease = await self._lease_client.granted(lease.id, self._show, looked_at)
        return lease

    def _show_fault(self, error: GpuPoolError) -> None:
        """Show why the pool does not answer. It is asked again: there are variables to be kept."""
        self._show(texts.unreachable(self._lease_client.size, error))

    async def _initialised(self) -> bool:
        try:
            return bool((await self._lease_client.activity()).initialised)
        except NOT_NOW:
            return False

    def _show(self, text: str) -> None:
        self._pending.show(f"{self.why} {text}")

    def _hold(self, frames: list[zmq.Frame]) -> None:
        """Pass on questions about the kernel's state; hold whatever makes it work."""
        if _is_one_of(_QUESTIONS, frames):
            self._run.relay.back["shell"].send(frames)
            return
        self._pending.receive("shell", frames)
        if self._pending.holds_work:
            self._wanted.set()

    def _control(self, frames: list[zmq.Frame]) -> None:
        """Pass on what does not make the kernel work, but an interrupt of a cell that waits here."""
        interrupt = self.resuming and _is_one_of((b'"interrupt_request"',), frames)
        if _is_one_of(_HARMLESS, frames) and not interrupt:
            self._run.relay.back["control"].send(frames)
        else:
            self._pending.receive("control", frames)

    def _relay_again(self) -> None:
        self._run.relay.begin()
        self._pending.hand_over(self._run.relay.pass_on)

    def _show_devices(self, visible: Mapping[str, str]) -> None:
        language = self._pending.introduction.get("language_info", {}).get("name")
        if language == "python":
            self._run.relay.run_silently(_VISIBLE.format(visible))


def _is_one_of(kinds: Sequence[bytes], frames: list[zmq.Frame]) -> bool:
    header = frames[-_HEADER].bytes if len(frames) > _HEADER else b""
    return any(kind in header for kind in kinds)
