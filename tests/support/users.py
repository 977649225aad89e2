"""Clients of a service, each in a process of its own and as a Unix user of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_pool_client import Process
from gpu_pool_client._remote.bodies import error_of
from support.pools import eventually
from support.service import Service

#: Two users who hold nothing on this machine; the second has no name.
NOBODY, SOMEBODY = 65534, 64_999

_CLIENT = """
from gpu_pool_client._remote.bodies import problem_of

async def act(pool):
{body}

async def tell():
    async with connect({url!r}) as pool:
        try:
            print(json.dumps({{"value": await act(pool)}}), flush=True)
        except GpuPoolError as error:
            print(json.dumps({{"problem": problem_of(error).model_dump_json()}}), flush=True)

asyncio.run(tell())
if {stays!r}:
    signal.pause()
"""


@dataclass
class Users:
    """Runs the body of ``async def act(pool)`` as a user."""

    service: Service
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _started: list[Process] = field(default_factory=list)

    async def run(self, uid: int, body: str) -> Any:
        """Return what the body returns, or raise what it raises."""
        return (await self.start(uid, body, stays=False))[0]

    async def start(self, uid: int, body: str, *, stays: bool = True) -> tuple[Any, Process]:
        """Also return the process, which lives on."""
        log = self.service.folder / f"client-{next(self._numbers)}"
        code = _CLIENT.format(body=textwrap.indent(body, "    "), url=self.service.url, stays=stays)
        log.touch()
        process = self.service.children.start(code, {}, log, uid)
        self._started.append(process)
        await eventually(lambda: log.read_text().endswith("}\n") or not process.is_alive())
        return _told(log), process

    def close(self) -> None:
        """End those who live on."""
        for process in self._started:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # it may end by itself meanwhile
                    os.kill(process.pid, signal.SIGKILL)


def _told(log: Path) -> Any:
    line = log.read_text().splitlines()[-1]
    assert line.startswith("{"), log.read_text()
    told = json.loads(line)
    if "problem" in told:
        raise error_of(told["problem"].encode())
    return told["value"]
