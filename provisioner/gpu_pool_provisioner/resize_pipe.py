"""How a running kernel asks for another size of its slice, and hears of memory on top of it.

Whether or not a proxy is in between, and also while a cell runs.

A private folder holds a pipe, into which the kernel writes its request as a line
of JSON (``{"id": "a1b2", "size": "10%"}``), and after that a file with the
answer, and with all variables that have changed since the kernel's start: it may
have read no answer before. A pipe, since it wakes us when something is written, tells the kernel
at once if nobody is there to read it, and needs no secret. What comes out of it is
the user's own, so it is read in small pieces, one request at a time.

Where a slice has a limit above what is granted, a second pipe goes the other way: a thread of the kernel
waits there for what changes in the variables of its slice (``gpu_pool_kernels.inkernel.burst``).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from gpu_pool_client._folders import HeldFolder
from gpu_pool_client._forks import OwnFile
from gpu_pool_client._log import get_logger

#: Names the folder to the kernel; gpu_pool_kernels.inkernel.slice_requests knows the names in it, too.
VARIABLE: Final = "GPU_POOL_RESIZE_DIR"
PIPE: Final = "requests"
ANSWER: Final = "answer"
CHANGES: Final = "changes"
#: Bytes that are written to a pipe as one (PIPE_BUF), and the most that is read at once.
_MOST: Final = 4096
_ID: Final = re.compile(r"[0-9a-f]{1,64}")

#: Returns the answer to a request for a size, in whatever form it was written. Raises nothing.
Grant = Callable[[str], Awaitable[Mapping[str, Any]]]


class ResizeRequests:
    """Receives one kernel's requests for another size, until :meth:`close` or until it is collected."""

    def __init__(self, connection_file: str, loop: asyncio.AbstractEventLoop) -> None:
        """Make it beside the connection file; it is served on ``loop``.

        Raises ``OSError`` where there are no such pipes.
        """
        self.connection_file = connection_file
        #: Grants or refuses a request. Must be set before a kernel is launched.
        self.grant: Grant | None = None
        if not hasattr(os, "mkfifo"):
            raise OSError("this system has no named pipes")
        self._loop = loop
        held = HeldFolder(Path(connection_file).resolve().parent, ".gpu-resize-")
        self._folder = Path(held.path)
        #: What a kernel needs in its environment to ask for another size.
        self.variables: Mapping[str, str] = {VARIABLE: str(self._folder)}
        try:
            os.mkfifo(self._folder / PIPE, 0o600)
            # For writing as well, so that it stays open when a kernel closes its end.
            self._pipe = _opened(self._folder / PIPE)
        except OSError:
            held.close()
            raise
        #: By which the kernel is told of changes; none where it is not.
        self._changes: list[OwnFile] = []
        #: Hears no more. May be called repeatedly, by any thread.
        self.close = weakref.finalize(self, _release, loop, self._pipe, held, self._changes, os.getpid())
        self._task: asyncio.Task[None] | None = None
        loop.call_soon_threadsafe(_add_reader, loop, self._pipe, weakref.ref(self))

    def open_changes(self) -> None:
        """Let the kernel that is launched next hear of changes; what an earlier one has not read is gone.

        Where that cannot be, it has what it was told at its start.
        """
        path = self._folder / CHANGES
        try:
            if not self._changes:
                os.mkfifo(path, 0o600)
                # For reading as well, so that it can be written to before the kernel reads.
                self._changes.append(_opened(path))
            with suppress(BlockingIOError):
                while True:
                    os.read(self._changes[0].fileno(), _MOST)
        except OSError as error:  # the folder is the user's, too
            get_logger().warning("A kernel will not hear what its slice may use: %s", error)

    @property
    def tells_changes(self) -> bool:
        """Whether the kernel hears of changes."""
        return bool(self._changes) and self.close.alive

    def tell(self, changed: Mapping[str, tuple[str | None, str | None]]) -> None:
        """Tell the kernel what changes in its environment: each variable's value before and now."""
        line = json.dumps(changed).encode() + b"\n"
        try:
            # None once it was closed, which another thread may do meanwhile.
            for pipe in tuple(self._changes) if changed and len(line) <= _MOST else ():
                os.write(pipe.fileno(), line)
        except (OSError, ValueError) as error:  # it does not read, or the pipe was closed just now
            get_logger().warning("A kernel could not be told what its slice may use now: %s", error)

    def hear(self) -> None:
        """Read what was written, and answer the last of it. Nothing more is read until that is done."""
        self._loop.remove_reader(self._pipe)
        self._task = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        try:
            request = _parse(os.read(self._pipe.fileno(), _MOST).rpartition(b"\n")[0].rpartition(b"\n")[2])
            if request is not None and self.grant is not None:
                request_id, size = request
                self._write({"id": request_id, **await self.grant(size)})
        finally:
            if self.close.alive:
                _add_reader(self._loop, self._pipe, weakref.ref(self))

    def _write(self, answer: Mapping[str, Any]) -> None:
        try:
            descriptor, draft = tempfile.mkstemp(dir=self._folder)
            with open(descriptor, "w") as file:
                json.dump(answer, file)
            Path(draft).replace(self._folder / ANSWER)
        except OSError as error:  # the folder is the user's, too, who may have removed it
            get_logger().warning(
                "The answer to a kernel's request for another size could not be written: %s", error
            )


def accept_resize_requests(connection_file: str, loop: asyncio.AbstractEventLoop) -> ResizeRequests | None:
    """Return what hears a kernel's requests for another size, or None where the system has no such pipes."""
    try:
        return ResizeRequests(connection_file, loop)
    except OSError as error:
        get_logger().warning("A kernel cannot ask for another size of its GPU slice: %s", error)
        return None


def _opened(pipe: Path) -> OwnFile:
    """Open a pipe for reading and writing, of this process alone. Raises ``OSError``.

    By a child that was forked, the kernel would find somebody there after this process has been killed.
    """
    return OwnFile(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))


def _add_reader(
    loop: asyncio.AbstractEventLoop, pipe: OwnFile, resize_requests: weakref.ref[ResizeRequests]
) -> None:
    # The loop must not keep alive what nobody else needs any more.
    def hear() -> None:
        found = resize_requests()
        if found is not None:
            found.hear()

    if resize_requests() is not None:
        loop.add_reader(pipe, hear)


def _release(
    loop: asyncio.AbstractEventLoop, pipe: OwnFile, folder: HeldFolder, changes: list[OwnFile], pid: int
) -> None:
    if os.getpid() != pid:  # a forked child has none of it, and the loop is its parent's
        return
    folder.close()
    for each in changes:
        each.close()
    changes.clear()
    if loop.is_closed():
        pipe.close()
    else:
        loop.call_soon_threadsafe(_close_pipe, loop, pipe)


def _close_pipe(loop: asyncio.AbstractEventLoop, pipe: OwnFile) -> None:
    loop.remove_reader(pipe)
    pipe.close()


def _parse(line: bytes) -> tuple[str, str] | None:
    """Return a request's id and size; None for what is not a request."""
    try:
        request = json.loads(line)
        request_id, size = request["id"], request["size"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if isinstance(request_id, str) and isinstance(size, str) and _ID.fullmatch(request_id):
        return request_id, size
    return None
