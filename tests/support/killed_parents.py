"""Processes that are killed once they have forked a child, which lives on.

An extension of a Jupyter server may fork it at any time, as :mod:`multiprocessing` does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from support.pools import running

#: ``stay`` is what the process does last: its child says a line then, when all is done that a fork brings.
_BEGINS = """
import os, signal, sys
def stay(said=""):
    if not os.fork():
        print(os.getpid(), said, flush=True)  # what is done in a forked child has been done by now
        os.close(sys.stdout.fileno())
    signal.pause()
"""


@contextmanager
def killed(code: str) -> Iterator[tuple[int, str]]:
    """Kill a process that has forked a child by ``stay(said)``; yield the child's pid and what was said.

    The child lives inside the block.
    """
    with running(_BEGINS + code) as server:
        assert server.stdout is not None
        child, _, said = server.stdout.readline().rstrip("\n").partition(" ")
        try:
            server.kill()
            server.wait()
            os.kill(int(child), 0)  # it lives
            yield int(child), said
        finally:
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
