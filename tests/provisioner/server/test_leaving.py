"""What a server that ends does for its kernels, where something is not known of one of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from traitlets.config import Config

from gpu_pool_provisioner.server.leaving import leave


class Kernel:
    """One that can go to disk."""

    def __init__(self, kernel_id: str, size: int | Exception = 1, why: str = "") -> None:
        self.kernel_id, self.notebook, self._size, self._why = kernel_id, f"{kernel_id}.ipynb", size, why
        self.left: list[str] = []
        self.noted: list[str] = []
        self.sleep = self

    def leaves_bytes(self) -> int:
        if isinstance(self._size, Exception):
            raise self._size
        return self._size

    async def leave_image(self, path: str) -> str:
        if not self._why:
            self.left.append(path)
        return self._why

    async def note_not_left(self, why: str) -> None:
        if isinstance(self._size, Exception):
            raise self._size
        self.noted.append(why)


def server(variables: Callable[[str], dict[str, str]]) -> Any:
    """Return a server that has a session for each of two kernels."""

    async def list_sessions() -> list[dict[str, Any]]:
        return [{"kernel": {"id": each}, "path": f"{each}.ipynb", "name": each} for each in ("one", "two")]

    manager = SimpleNamespace(
        list_sessions=list_sessions, get_kernel_env=lambda path, name: variables(str(path))
    )
    return SimpleNamespace(config=Config(), session_manager=manager, log=logging.getLogger("leaving"))


def named(path: str) -> dict[str, str]:
    return {"JPY_SESSION_NAME": f"/home/{path}"}


def unnamed(path: str) -> dict[str, str]:
    return {} if path == "one.ipynb" else named(path)


def refused(path: str) -> dict[str, str]:
    raise LookupError(path)


@pytest.mark.parametrize(
    ("variables", "paths"),
    [
        (unnamed, [[""], ["/home/two.ipynb"]]),
        (refused, [[""], [""]]),
    ],
    ids=["without a name", "without sessions"],
)
async def test_kernels_go_to_disk_whatever_their_sessions_are(
    variables: Callable[[str], dict[str, str]], paths: list[list[str]]
) -> None:
    kernels: Any = [Kernel("one"), Kernel("two")]
    await leave(kernels, server(variables))
    assert [each.left for each in kernels] == paths


async def test_a_kernel_whose_size_is_not_known_goes_to_disk_last() -> None:
    odd = Kernel("one", OSError("Too many open files"))
    kernels: Any = [odd, Kernel("two")]
    await leave(kernels, server(named))
    assert [each.left for each in kernels] == [["/home/one.ipynb"], ["/home/two.ipynb"]]


async def test_a_note_that_cannot_be_written_keeps_no_other_from_being_written() -> None:
    odd = Kernel("one", OSError("The disk is full"), "It is at work.")
    kernels: Any = [odd, Kernel("two", why="It is at work.")]
    await leave(kernels, server(named))
    assert kernels[1].noted == ["It is at work."]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (asyncio.CancelledError(), "It could not be written to disk."),
        (ValueError("no such thing"), "It could not be written to disk."),
        (
            OSError(28, "No space left on device"),
            "It could not be written to disk (No space left on device).",
        ),
    ],
    ids=["cancelled", "mistake", "full disk"],
)
async def test_what_ends_one_kernels_way_to_disk_is_told_and_keeps_no_other_from_being_told(
    error: BaseException, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Kernel):
        async def leave_image(self, path: str) -> str:
            raise error

    kernels: Any = [Odd("one"), Odd("two")]
    await leave(kernels, server(named))
    told = [each.getMessage() for each in caplog.records]
    assert told == [f"The kernel of {name}.ipynb ends with this server: {error!r}" for name in ("one", "two")]
    assert [each.noted for each in kernels] == [[words], [words]]
