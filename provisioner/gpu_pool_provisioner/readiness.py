"""Does the kernel answer? A process that lives is not yet a kernel that works.

A thread asks, and not a task: a blocking ``KernelManager`` runs each of its
calls on an event loop that stands still in between.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from typing import Any, Final

import zmq
from jupyter_client.session import Session

from gpu_pool_client import LeaseGone, Process
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.kernel_slice import NOT_NOW

#: How often a waiting thread looks whether it should stop, in milliseconds.
_LOOK_EVERY_MS: Final = 250
#: How long to leave an unreachable pool alone before the next try, in seconds.
_RETRY_EVERY: Final = 1.0
#: How long a killed process may take to be gone before its slice is given back all the same, in seconds.
_KILLED_WITHIN: Final = 2.0


class ReadinessWatch(threading.Thread):
    """Waits for a kernel's first reply and confirms its lease; ends a kernel that stays silent.

    One signed ``kernel_info_request`` is sent on the control channel and one
    on the shell channel. Any reply counts: a kernel that is already running a
    long cell answers on control, and one that knows only shell answers there.
    The thread holds no reference to the provisioner or its manager.
    """

    def __init__(
        self,
        process: Process,
        connection: Mapping[str, Any],
        session: Session,
        *,
        timeout: float,
        confirm: Callable[[], Coroutine[Any, Any, object]],
        give_back: Callable[[], Coroutine[Any, Any, object]],
    ) -> None:
        """Take the kernel's connection info, and a session for this thread alone.

        ``confirm`` lifts the lease's deadline and ``give_back`` ends the lease;
        both raise what the pool raises, and run on an event loop of this thread.
        """
        super().__init__(name=f"gpu-pool-readiness-{process.pid}", daemon=True)
        self._process = process
        self._connection = connection
        self._session = session
        self._timeout = timeout
        self._confirm = confirm
        self._give_back = give_back
        #: Set once the manager's start went through; until then no reply counts.
        self.adopted = threading.Event()
        self._stopped = threading.Event()
        self._deciding = threading.Lock()

    def stop(self) -> bool:
        """End the watch: it touches neither the lease nor the kernel any more.

        Does not block; False while the watch is touching them, which takes it
        milliseconds. Then try again.
        """
        if not self._deciding.acquire(blocking=False):
            return False
        self._stopped.set()
        self._deciding.release()
        self.adopted.set()
        return True

    def run(self) -> None:
        """Ask until there is a reply, the deadline, the kernel's death, or :meth:`stop`."""
        deadline = time.monotonic() + self._timeout
        try:
            if not (self.adopted.wait(self._timeout) and self._answers(deadline)):
                why = f"did not become ready within {self._timeout:g} seconds"
            elif not self._confirmed(deadline):
                why = "has lost its GPU slice"
            else:
                return
        except Exception as error:  # noqa: BLE001 - else the kernel would run on after its lease's deadline
            get_logger().exception("Asking the kernel with pid %d failed.", self._process.pid)
            why = f"could not be asked whether it is ready ({type(error).__name__})"
        with self._deciding:
            if not self._stopped.is_set() and self._process.is_alive():
                self._end_kernel(why)

    def _answers(self, deadline: float) -> bool:
        """Ask on both channels; return whether there is a reply before the deadline."""
        info = self._connection
        separator = ":" if info["transport"] == "tcp" else "-"
        with ExitStack() as sockets:
            poller = zmq.Poller()
            for channel in ("control", "shell"):
                sock = sockets.enter_context(_context(os.getpid()).socket(zmq.DEALER))
                sock.linger = 0
                if "curve_publickey" in info:
                    # As KernelManager does: the one key pair of the connection file serves both ends.
                    sock.curve_secretkey = info["curve_secretkey"].encode()
                    sock.curve_publickey = info["curve_publickey"].encode()
                    sock.curve_serverkey = info["curve_publickey"].encode()
                sock.connect(f"{info['transport']}://{info['ip']}{separator}{info[channel + '_port']}")
                self._session.send(sock, "kernel_info_request", content={})
                poller.register(sock, zmq.POLLIN)
            while (
                not self._stopped.is_set()
                and self._process.is_alive() is not False
                and time.monotonic() < deadline
            ):
                if any(self._is_reply(sock.recv_multipart()) for sock, _ in poller.poll(_LOOK_EVERY_MS)):
                    return True
            return False

    def _is_reply(self, parts: list[bytes]) -> bool:
        try:
            self._session.deserialize(self._session.feed_identities(parts)[1])
        except Exception as error:  # noqa: BLE001 - a kernel can send anything, and reading it fails anyhow
            get_logger().warning("Ignored what is not a kernel's signed reply: %.200s", error)
            return False
        return True

    def _confirmed(self, deadline: float) -> bool:
        """Confirm the lease; False when it is gone, or the pool stays out of reach."""
        while True:
            try:
                with self._deciding:
                    if not self._stopped.is_set():
                        asyncio.run(self._confirm())
                    return True
            except LeaseGone:
                return False
            except NOT_NOW as error:
                get_logger().warning("The kernel is ready, its GPU pool is not: %s", error)
            if time.monotonic() >= deadline or self._stopped.wait(_RETRY_EVERY):
                return False

    def _end_kernel(self, why: str) -> None:
        """Kill the kernel's process group, then give its slice back: it must not run without one."""
        get_logger().error("Ending the kernel with pid %d: it %s.", self._process.pid, why)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except OSError as error:
            get_logger().warning("It was gone already, or cannot be ended: %s", error)
        gone_by = time.monotonic() + _KILLED_WITHIN
        while self._process.is_alive() and time.monotonic() < gone_by:
            time.sleep(0.01)
        try:
            asyncio.run(self._give_back())
        except NOT_NOW as error:
            get_logger().warning("The pool will end the kernel's lease by itself: %s", error)


@functools.cache
def _context(pid: int) -> zmq.Context[zmq.Socket[bytes]]:  # noqa: ARG001 - a forked child needs its own
    """Return the context of all watches: each context in use costs two threads.

    Nobody else's, so that nobody who ends a shared context ends these sockets.
    """
    return zmq.Context()
