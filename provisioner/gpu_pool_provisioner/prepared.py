"""Prepared kernels: each becomes one kernel that may sleep on disk, and has imported what that needs.

Such a kernel is in namespaces of its own from its start, into which no template can fork one. So its process
is started ahead of need, after the first kernel of its kind, and waits to be told which kernel it is
(``gpu_pool_kernels.inkernel.prepared``). Of each kind there is one, which counts as a template does.

Whatever is in doubt starts cold, at once: nothing here raises because of a prepared kernel.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final

from gpu_pool_client._folders import HeldFolder
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.environment import PARENT_VARIABLE
from gpu_pool_provisioner.hibernation.kept import KeptKernel, Program
from gpu_pool_provisioner.templates import Kind, StartColdError, TemplateProcess, TemplateSettings, templates

#: How the names of folders begin in which it is waited for a process that was started.
_FOLDER: Final = "gpu-pool-prepared-"
#: Seconds in which it has connected, once it was started.
_CONNECTS_WITHIN: Final = 60.0
#: Of a process' status what one that it starts has from it; and other files of its folder in /proc.
_STATUS: Final = (b"Umask", b"Uid", b"Gid", b"Groups", b"CapBnd", b"NoNewPrivs", b"Seccomp")
_FILES: Final = ("cgroup", "limits", "oom_score_adj")


class PreparedKernel(TemplateProcess):
    """One process that becomes a kernel, from its start until it is taken, or ended."""

    def __init__(self, program: Program, kind: Kind, max_mib: int) -> None:
        """Let the program start one. Raises ``OSError``."""
        self.kernel = KeptKernel(program)
        self._is_begun = threading.Event()
        #: What this process was like when it was started.
        self._inherited = _inherited()
        super().__init__(kind.command, kind.early, max_mib)

    def _begin(self) -> None:
        """Listen for it: it is started by a thread, since sudo may take its time."""
        self._folder = HeldFolder(tempfile.gettempdir(), _FOLDER)
        self._path = f"{self._folder.path}/socket"
        try:
            self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control.bind(self._path)
            self._control.listen()
        except OSError:
            self._folder.close()
            raise
        self._process = self.kernel

    def _import(self) -> None:
        try:
            self._start()
            if not self._is_ended:
                self._control = self._connected(self._control)
        except (OSError, ValueError) as error:  # ValueError: of a socket that was closed meanwhile
            if not self._is_ended:
                get_logger().warning("A kernel that may sleep on disk was not prepared: %s", error)
            self.end()
        finally:
            self._folder.close()
            self._is_begun.set()
        if self._is_ended:
            self.end()  # once more: it may have begun after that
            self._ready.set()
        else:
            super()._import()

    def _start(self) -> None:
        """Let the program start its process. Raises ``OSError``."""
        self.kernel.begin(self._command(self._path), self._environment, None)
        if self._inherited != _inherited():
            raise OSError("what its server hands on has changed meanwhile")

    def _connected(self, listening: socket.socket) -> socket.socket:
        """Return the connection of the process that was started, and of no other. Raises ``OSError``."""
        give_up_at = time.monotonic() + _CONNECTS_WITHIN
        ended, either = os.pidfd_open(self.kernel.pid), select.poll()
        for each in (listening.fileno(), ended):
            either.register(each, select.POLLIN)
        try:
            with listening:
                while (seconds := give_up_at - time.monotonic()) > 0:
                    if listening.fileno() not in {each for each, _ in either.poll(seconds * 1000)}:
                        break
                    connection, _ = listening.accept()
                    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                    pid, uid, _ = struct.unpack("iII", told)
                    if (pid, uid) == (self.kernel.pid, os.getuid()):
                        return connection
                    connection.close()
        finally:
            os.close(ended)
        raise OSError("its process ended, or did not connect")

    @property
    def pid(self) -> int:
        """Its process, once that was started."""
        return self.kernel.pid

    @property
    def has_ended(self) -> bool:
        """Whether it is gone, or was never there."""
        return self._is_ended or (self._is_begun.is_set() and super().has_ended)

    def end(self) -> None:
        """End it."""
        self._is_ended = True
        self.kernel.end()
        self._let_go()

    def _let_go(self) -> None:
        self._control.close()
        self._folder.close()
        self._executor.shutdown(wait=False)

    def forget(self) -> None:
        """Leave it to the process that has forked this one, with which it ends."""
        self._control.close()

    def _look(self, cwd: str | None) -> None:
        """Raise ``StartColdError`` where one that starts now would be another, or none."""
        if self._inherited != _inherited():
            raise StartColdError("what its server hands on to kernels is not what it was")
        if cwd is not None and not Path(cwd).is_dir():
            raise StartColdError(f"there is no folder {cwd}")

    async def taken(self, argv: list[str], environment: Mapping[str, str], cwd: str | None) -> KeptKernel:
        """Return it as a kernel with this command, once it listens.

        Raises ``StartColdError`` and ``OSError``, and has ended then.
        """
        try:
            await asyncio.to_thread(self._look, cwd)  # the user's home may be on another machine
            await self.fork(argv, environment, cwd or str(Path.cwd()), ())
            await asyncio.to_thread(self.kernel.take)
        except BaseException:
            self.end()
            raise
        self._let_go()
        return self.kernel

    def _ask(self, content: bytes, channel: socket.socket, _: Any) -> int:
        try:
            with channel:
                told = self._told(content, [channel.fileno()])
        except (OSError, ValueError) as error:
            why = f"the prepared one did not answer ({error or type(error).__name__})"
            raise StartColdError(why) from error
        if "pid" not in told:
            raise StartColdError(told["cold"])
        return self.kernel.pid

    def _end_kernel(self, _: Future[int]) -> None:
        self.kernel.end()


def _inherited() -> tuple[Any, ...]:
    """Return what of this process a kernel has that it starts now, its variables and folder apart."""
    lines = Path("/proc/self/status").read_bytes().split(b"\n")
    status = [line for line in lines if line.partition(b":")[0] in _STATUS]
    files = [Path("/proc/self", name).read_bytes() for name in _FILES]
    namespaces = sorted((each.name, os.readlink(each.path)) for each in os.scandir("/proc/self/ns"))
    pid = os.getpid()
    priority = os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)
    return status, files, namespaces, os.sched_getaffinity(pid), priority


def kind_of(program: Program, argv: list[str], kwargs: Mapping[str, Any], settings: TemplateSettings) -> Kind:
    """Return the kind of a kernel that may sleep by this program. Raises ``StartColdError``."""
    # Its streams are those that the program gives it.
    known = {"env": _variables(kwargs)}
    return Kind.made_by(partial(PreparedKernel, program), argv, known, settings, only=program)


def _variables(kwargs: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in kwargs["env"].items() if name != PARENT_VARIABLE}


async def prepared_kernel(
    program: Program, argv: list[str], kwargs: Mapping[str, Any], settings: TemplateSettings
) -> KeptKernel | None:
    """Return a prepared kernel that listens; None where it is to start cold. The next one is prepared soon.

    ``argv`` and ``kwargs`` are those of ``jupyter_client.launcher.launch_kernel``.
    """
    try:
        kind = kind_of(program, argv, kwargs, settings)
        found = await asyncio.to_thread(templates().find, kind, settings)
        if isinstance(found, PreparedKernel):
            return await found.taken(argv, _variables(kwargs), kwargs.get("cwd"))
    except StartColdError as why:
        get_logger().info("This kernel starts cold: %s.", why)
    except Exception as error:  # noqa: BLE001 - no student gets an error because of it
        get_logger().warning("This kernel starts cold: %r", error)
    return None
