"""A kernel on this machine that may sleep on disk: its launch, its way there, and its way back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final

from gpu_pool_client import Lease, Process
from gpu_pool_client._forks import close_in_children
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.environment import PARENT_VARIABLE
from gpu_pool_provisioner.hibernation import giving_way, left
from gpu_pool_provisioner.hibernation.calling import (
    INSTALLED,
    Program,
    ProgramEnded,
    ProgramRefused,
    Stays,
    answered,
    environment,
    too_late,
    why_not,
)
from gpu_pool_provisioner.hibernation.program.gpu_pool_hibernation.processes import needs_bytes
from gpu_pool_provisioner.launchers.base import (
    CannotSleepError,
    CannotWakeError,
    ImageGoneError,
    StaysAwakeError,
)
from gpu_pool_provisioner.launchers.process import ContinuedProcess
from gpu_pool_provisioner.session import texts

__all__ = ["INSTALLED", "KeptKernel", "Program", "why_not"]

#: Seconds in which a kernel has heard that its connections are closed. Where it has not, CRIU refuses.
_CLOSED_WITHIN: Final = 1.0
_LOOK_EVERY: Final = 0.01
#: Bytes of the longest answer that is read: it may repeat what was noted.
_LONGEST_ANSWER: Final = 1 << 20
#: Held while others give way to a kernel, in the loop in which all kernels of this process sleep.
_making_room: Final = asyncio.Lock()
#: The state of a connected socket in /proc/net/unix.
_CONNECTED: Final = b"03"


class _First:
    """The first process of a kernel's pid namespace, which ``/proc`` may hide from its user (``hidepid``)."""

    def __init__(self, pid: int) -> None:
        """Take it while it runs. Raises ``OSError``."""
        self._descriptor = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._descriptor)

    def kill(self) -> None:
        """End it, and with it all of the namespace; unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self) -> None:
        """Return once all of the namespace has ended (pid_namespaces(7)). Blocks."""
        over = select.poll()
        over.register(self._descriptor, select.POLLIN)
        over.poll()


class KeptKernel:
    """One kernel that may sleep, and each process that it has had: jupyter_client's view of it as well."""

    def __init__(self, program: Program) -> None:
        """Launch nothing yet."""
        self._program = program
        #: What tells the user's other servers that this one has it; None before it is launched.
        self._held: left.Hold | None = None
        #: What the program says of its image; None where there is none, or none that we know of.
        self._image: dict[str, Any] | None = None
        #: Whether there may be one, also of a dump that was given up; and the process of the last dump.
        self._may_have_image = False
        self._dump: asyncio.subprocess.Process | None = None
        #: Its image, where that outlives this process, and whether it is left to the next one.
        self._left: left.LeftImage | None = None
        self._is_left = False
        #: Whether it goes on from its image, or did since it slept last: the image is nobody's then.
        self._goes_on = False
        #: What the next server must know of it; None where its images end with this process.
        self.record: left.KernelRecord | None = None
        #: Is told the pid of each process that it gets.
        self.note_process: Callable[[int], object] = lambda _: None
        #: Whether it ends unless it goes to disk, as its server does.
        self.would_be_lost = False
        #: What changes in its environment where it goes on from another server's image.
        self.changed: dict[str, tuple[str | None, str | None]] = {}
        self._process: ContinuedProcess | None = None
        self._first: _First | None = None
        #: Keeps the ports at which it listened from others while it sleeps.
        self._ports: Sequence[socket.socket] = ()
        self._is_over = False
        #: What keeps the kernel alive.
        self._stays: Stays | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None

    @classmethod
    def claimed(cls, program: Program, owner: left.Owner) -> KeptKernel | None:
        """Return the owner's kernel that another server has left; None where there is none. Blocks."""
        image = left.claim(program, owner)
        if image is None:
            return None
        kept = cls(program)
        kept._left, kept._held, kept.record = image, image.held, image.record
        kept._image, kept._may_have_image = image.image, True
        return kept

    # -- As jupyter_client knows a process -------------------------------------

    @property
    def pid(self) -> int:
        """Of the process that it has, or had last."""
        assert self._process is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return None while it has a process."""
        return 0 if self._process is None else self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Return its status once its process has ended. Raises ``subprocess.TimeoutExpired``."""
        return 0 if self._process is None else self._process.wait(timeout)

    def send_signal(self, signum: int) -> None:
        """Send a signal to its process and what that has started, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signum)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, with all that it has started."""
        if self._first is not None:
            self._first.kill()

    # -- Its launch, its way to disk and back ----------------------------------

    async def launch(self, command: Sequence[str], environment: Mapping[str, str], cwd: str | None) -> int:
        """Launch it, and return its pid. Raises ``OSError``."""
        return await asyncio.to_thread(self._launched, command, environment, cwd)

    def _launched(self, command: Sequence[str], environment: Mapping[str, str], cwd: str | None) -> int:
        self.begin(command, environment, cwd)
        try:
            return self.take()
        except OSError:
            self.end()
            raise

    def begin(self, command: Sequence[str], environment: Mapping[str, str], cwd: str | None) -> None:
        """Launch what is to be a kernel of this server once it is taken. Blocks.

        Raises ``OSError``: ``CannotSleepError`` where it is only that it could not sleep.
        """
        left.remove_abandoned_once(self._program)
        # Its parent is no server, and what ends it is the program: it must not look for another one.
        known = {name: value for name, value in environment.items() if name != PARENT_VARIABLE}
        request = {"argv": list(command), "env": known, "cwd": cwd or str(Path.cwd()), "umask": _umask()}
        try:
            self._begun("launch", **request)
        except ProgramRefused as error:
            if error.is_of_kernel:
                raise OSError(error.errno, str(error)) from error
            raise CannotSleepError(str(error)) from error

    def take(self) -> int:
        """Let it be a kernel of this server; return its pid. Raises ``CannotSleepError``."""
        assert self._stays is not None
        try:
            self._held = left.hold(self._stays.answer["id"])
        except OSError as error:
            raise CannotSleepError(left.not_held(error)) from error
        left.remove_refused()
        return self.pid

    def _begun(self, *words: str, **request: Any) -> int:
        """Let the program begin a kernel, and return its pid. Raises ``ProgramRefused`` and ``OSError``."""
        stays = self._program.start(*words, **request)
        with contextlib.suppress(ProcessLookupError):
            first = _First(stays.answer["first"])
            # Looked at after that: while it lives the first does, which is no other process then.
            process = Process.of(stays.answer["pid"])
            if process is not None and not self._is_over:
                self._stays, self._process, self._first = stays, ContinuedProcess(process), first
                self.note_process(process.pid)
                if not self._is_over:
                    return process.pid
                self.end()  # once more: it was ended just now
        stays.close()
        why = "it was ended." if self._is_over else "it ended at once."
        raise ProgramRefused(why, is_of_kernel=True)

    async def closed(self, prefix: str) -> None:
        """Return once nobody is connected to the kernel's sockets, whose paths begin so, or after a while."""
        give_up_at = time.monotonic() + _CLOSED_WITHIN
        while _is_connected(os.fsencode(prefix)) and time.monotonic() < give_up_at:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_EVERY)

    async def sleep(self, lease: Lease) -> int:
        """Write it to disk and end its process; return the bytes of its image.

        Raises ``StaysAwakeError``, and it runs as before. So it does where this is given up.
        """
        assert self._held is not None
        record = replace(self.record, at=time.time()) if self.record is not None else None
        note = left.note_of(lease, record)
        try:
            told = await self._dumped_in_room(note)
        except ProgramRefused as error:
            get_logger().info("A kernel was not written to disk: %s", error)
            raise StaysAwakeError(str(error)) from error
        except OSError as error:
            raise StaysAwakeError(f"it could not be written ({error.strerror or error}).") from error
        except Exception as error:  # a mistake of ours must not end a kernel that was idle
            get_logger().exception("A kernel was not written to disk")
            raise StaysAwakeError(f"it could not be written ({error!r}).") from error
        self._image, self._goes_on = told["image"], False
        if record is not None:
            self._left = left.LeftImage(self._program, self._held, {**told, "note": note})
            await asyncio.to_thread(_write_notice, self._left)
        await asyncio.to_thread(self.wait)
        self._let_go()
        self._keep_ports()
        return int(self._image["bytes"])

    async def _dumped_in_room(self, note: dict[str, Any]) -> dict[str, Any]:
        """Let the program write it; where it would be lost for want of room, older ones give way to it."""
        try:
            return await self._dumped_well(note)
        except ProgramRefused as error:
            if not self.would_be_lost or self.record is None or error.room is None:
                raise
        async with _making_room:  # of two at once each would have others removed
            try:
                return await self._dumped_well(note)
            except ProgramRefused as error:
                room, owner = error.room, self.record.owner
                if room is None or not await asyncio.to_thread(
                    giving_way.make_room, self._program, room, owner, lambda: not self._is_over
                ):
                    raise
            return await self._dumped_well(note)

    async def _dumped_well(self, note: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._dumped(note)
        except ProgramEnded:  # killed; it finishes what it has begun, or begins anew
            return await self._dumped_again(note)

    async def _dumped_again(self, note: dict[str, Any]) -> dict[str, Any]:
        """Let the program write it after it was killed. Where it does not, the kernel is not left stopped."""
        assert self._held is not None
        try:
            return await self._dumped(note)
        except ProgramRefused:
            told = await asyncio.to_thread(
                self._program.call, "note", self._held.kernel, note=note, server=os.getpid()
            )
            if told.get("asleep"):
                return told
            raise

    async def _dumped(self, note: dict[str, Any]) -> dict[str, Any]:
        """Let the program write it; return what it says. Given up, it goes on. Raises ``ProgramRefused``."""
        assert self._held is not None
        self._may_have_image = True
        process = self._dump = await asyncio.create_subprocess_exec(
            *self._program.command("dump", self._held.kernel),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            cwd="/",
            limit=_LONGEST_ANSWER,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        within = self._program.finishes_within
        try:
            process.stdin.write(self._program.request(note=note, server=os.getpid()))
            answer = answered(await asyncio.wait_for(process.stdout.readline(), within))
        except asyncio.TimeoutError:
            raise too_late("dump", within) from None
        finally:
            process.stdin.close()  # which ends what it has not done by now
        await process.wait()
        return answer

    @property
    def image(self) -> left.LeftImage | None:
        """Its image, where another server may go on from it; None where there is none."""
        return self._left

    async def wake(self) -> int:
        """Let it go on from disk; return its pid. Its image stays until :meth:`remove_image`.

        Raises ``CannotWakeError``: then it sleeps on. Where what it got does not go on as it should,
        :meth:`sleep_on` is called.
        """
        if self._is_left or self.would_be_lost:
            raise CannotWakeError("its server ends, and the next one goes on with it.")
        self._goes_on = True
        try:
            return await self._woken()
        except BaseException:
            self._goes_on = False
            raise

    async def _woken(self) -> int:
        assert self._held is not None
        assert self._image is not None
        self._ports = self._ports or _hold(self._image["listens"])
        _share(self._ports)
        try:
            pid = await asyncio.to_thread(self._begun, "restore", self._held.kernel)
        except (OSError, ProgramRefused) as error:
            self._let_ports_go()
            self._keep_ports()
            if isinstance(error, ProgramRefused) and error.is_gone:
                raise ImageGoneError(str(error)) from error
            raise CannotWakeError(str(error)) from error
        self._let_ports_go()
        return pid

    async def sleep_on(self) -> None:
        """End what it got when it was woken: it sleeps as before. May be called where it got nothing."""
        if not self._goes_on:
            return
        self.kill()
        if self._first is not None:
            await asyncio.to_thread(self._first.wait)  # whoever wakes it next must not find it there
        self._let_go()
        self._goes_on = False
        self._keep_ports()

    def _keep_ports(self) -> None:
        """Keep the ports at which it listened from others, unless somebody was faster, who may end."""
        assert self._image is not None
        with contextlib.suppress(CannotWakeError):
            self._ports = _hold(self._image["listens"])

    def _let_go(self) -> None:
        if self._stays is not None:
            self._stays.close()

    def _let_ports_go(self) -> None:
        _close(self._ports)
        self._ports = ()

    @property
    def needs_bytes(self) -> int:
        """How many bytes it takes at most to put it to disk; 0 where it is there."""
        return 0 if self.poll() is not None else needs_bytes(self.pid)

    def end(self) -> None:
        """End the process that it has, or is about to have."""
        self._is_over = True
        self.kill()
        self._let_go()
        self._let_ports_go()
        if self._held is not None and not self._may_have_image:
            self._held.remove()

    async def belong_to(self, owner: left.Owner) -> None:
        """Let its images be another owner's: its notebook was renamed. Raises ``OSError``."""
        if self.record is not None:
            self.record = replace(self.record, owner=owner)
        if self._left is not None:
            before = self._left.record.owner
            await asyncio.to_thread(self._left.belong_to, owner)
            await asyncio.to_thread(giving_way.take_notice, before)

    def leave_image(self) -> bool:
        """Leave its image to the next server from now on, and do not wake; return whether there is one.

        There is none any more of a kernel that goes on from it already: there are never two of one kernel.
        """
        if self._left is not None and not self._goes_on:
            self._is_left = True
        return self._is_left

    async def note_use(self) -> None:
        """Note that somebody had its image until now."""
        if self._left is not None:
            await asyncio.to_thread(self._left.note_left)
            await asyncio.to_thread(_write_notice, self._left)

    async def remove_image(self) -> None:
        """Remove what is on disk of it, unless it is left. May be repeated.

        A dump that was given up may have become an image meanwhile.
        """
        if self._is_left or self._held is None:
            return
        if self._left is not None:
            await asyncio.to_thread(giving_way.take_notice, self._left.record.owner)
        self._image = self._left = None
        if self._may_have_image:
            if self._dump is not None:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._dump.wait(), self._program.answers_within)
            left.remove_refused()
            removed = await asyncio.to_thread(left.remove_image, self._program, self._held.kernel)
            self._may_have_image = not removed
        if self._is_over and self._may_have_image:
            left.remove_later(self._program, self._held)
        elif self._is_over:
            self._held.remove()


def _write_notice(image: left.LeftImage) -> None:
    """Have its notebook told, where it is neither there nor was woken or removed, that it is gone. Blocks."""
    record = image.record
    has = record.has_in_words(image.mib)
    giving_way.write_notice(record.owner, record.at, has, texts.NOT_ON_DISK)


def _umask() -> int:
    """Return which rights new files of this process do not have; os.umask tells only what it changes."""
    for line in Path("/proc/self/status").read_bytes().split(b"\n"):
        if line.startswith(b"Umask:"):
            return int(line.split()[1], 8)
    return 0o022


def _hold(listens: Iterable[tuple[str, int]]) -> list[socket.socket]:
    """Listen at ports in place of a kernel that sleeps, so that nobody else does.

    Raises ``CannotWakeError`` where somebody else does already.
    """
    held: list[socket.socket] = []
    for address, port in listens:
        is_ipv6 = ":" in address
        try:
            each = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
            held.append(each)
            close_in_children(each)
            if is_ipv6:  # the same port of the other protocol may be another socket's
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind((address, port))
            each.listen(0)
        except OSError as error:
            _close(held)
            why = "which cannot be kept for it"
            if error.errno == errno.EADDRINUSE:
                why = "which another program of this machine has now"
            raise CannotWakeError(
                f"it listened at {address}, port {port}, {why} ({error.strerror})."
            ) from error
    return held


def _share(held: Iterable[socket.socket]) -> None:
    """Listen no more at ports that are kept: who wakes may share them (``SO_REUSEADDR``, socket(7))."""
    for each in held:
        each.shutdown(socket.SHUT_RD)


def _close(held: Iterable[socket.socket]) -> None:
    for each in held:
        each.close()


def _is_connected(prefix: bytes) -> bool:
    """Whether it is seen that somebody is."""
    try:
        lines = Path("/proc/net/unix").read_bytes().split(b"\n")
    except OSError:
        return False
    for line in lines:
        words = line.split(b" ", 7)
        if len(words) == 8 and words[5] == _CONNECTED and words[7].strip().startswith(prefix):
            return True
    return False
