"""Reads all GPUs at once, so that one that does not answer holds up no other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

#: Seconds in which the first must have answered: without persistence mode, the driver sets them all up now.
_FIRST_WITHIN: Final = 120.0
#: The others have so many times as long as the slowest took so far, and at least so many seconds.
_TIMES: Final = 3.0
_LEAST: Final = 5.0


def read_all(count: int, read: Callable[[int], T], least: float = _LEAST) -> list[T | None]:
    """Return what ``read`` returns for each index, None where it does not return.

    Whoever is slow while the others are, is waited for. A question that hangs keeps its thread,
    which does not keep the interpreter from exiting. ``least`` is the fewest seconds that the others have
    once one has answered. Raises what ``read`` raises.
    """
    answers: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()

    def ask(index: int) -> None:
        try:
            answers.put((index, read(index), None))
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever asks for all
            answers.put((index, None, error))

    began = time.monotonic()
    for index in range(count):
        threading.Thread(target=ask, args=(index,), name=f"gpu-pool-gpu-{index}", daemon=True).start()
    found: list[T | None] = [None] * count
    give_up_at = began + _FIRST_WITHIN
    for _ in range(count):
        try:
            index, answer, error = answers.get(timeout=max(0.0, give_up_at - time.monotonic()))
        except queue.Empty:
            break
        if error is not None:
            raise error
        found[index] = answer
        took = time.monotonic() - began
        give_up_at = began + took + max(least, _TIMES * took)
    return found
