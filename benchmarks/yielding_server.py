"""A Jupyter server's process with an embedded pool of ten slices, whose idle kernels give way, or do not.

``benchmarks.yielding`` runs it and makes a report of what it prints.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

from benchmarks.kernels import LOST_AFTER, first_reply
from benchmarks.sizes import sized
from benchmarks.warm_server import is_warm, template
from gpu_pool_client import LeaseState, connect

#: As many hold all the slices as come later.
SLICES = sized(10, 2)
ROUNDS = sized(3, 1)
#: Seconds for which kernels idle before anything is wanted of them: longer than ``yield_after``.
IDLE = 3.0
#: Seconds over which it is seen what idle kernels cost.
WATCHED_SECONDS = sized(60.0, 2.0)


@dataclass
class Student:
    """Somebody's kernel, and the one variable that is in it."""

    manager: AsyncKernelManager
    client: AsyncKernelClient
    kept: int

    async def cell(self) -> float:
        """Run a cell; return the seconds to its reply. Raise ``AssertionError`` if the variable is lost."""
        return await self._run("None")

    async def begin(self) -> None:
        """Set the variable."""
        await self._run(f"kept = {self.kept}")

    async def leave(self) -> None:
        """Shut the kernel down."""
        self.client.stop_channels()
        await self.manager.shutdown_kernel(now=True)

    async def _run(self, code: str) -> float:
        began = time.perf_counter()
        asked = self.client.execute(code, user_expressions={"kept": "kept"})
        while True:
            reply = await self.client.get_shell_msg(timeout=LOST_AFTER)
            if reply["parent_header"].get("msg_id") == asked:
                break
        seconds = time.perf_counter() - began
        found = reply["content"].get("user_expressions", {}).get("kept", {}).get("data", {})
        assert found.get("text/plain") == str(self.kept), f"a variable is lost: {reply['content']}"
        return seconds


@dataclass
class Taken:
    """Seconds that students waited, each list in the order in which they came."""

    #: From a start that found no slice free to the reply to the first cell; the same where one was free.
    first: list[float] = field(default_factory=list)
    first_when_free: list[float] = field(default_factory=list)
    #: A cell of a parked kernel: when a slice was free, and while all others held one and idled.
    parked: list[float] = field(default_factory=list)
    parked_others_idle: list[float] = field(default_factory=list)
    #: A cell of the same kernel when it had idled as long and had kept its slice.
    held: list[float] = field(default_factory=list)
    #: How many of the first cells ran in kernels that were forked.
    warm: int = 0


async def come(name: str, kept: int) -> tuple[Student, float]:
    """Start a kernel; return it, and the seconds to the reply to its first cell."""
    manager = AsyncKernelManager(kernel_name=name)
    began = time.perf_counter()
    client = await first_reply(manager)
    seconds = time.perf_counter() - began
    assert client is not None, f"kernel {kept} was lost"
    student = Student(manager, client, kept)
    await student.begin()
    return student, seconds


async def cells(students: Sequence[Student]) -> list[float]:
    """Let students who have idled run a cell, one after the other; return the seconds of each."""
    await asyncio.sleep(IDLE)
    return [await student.cell() for student in students]


async def all_parked() -> None:
    """See that all who came first have given way: else a cell's time would say nothing."""
    states = [lease.state for lease in (await connect().status()).leases]
    assert states.count(LeaseState.PARKED) == SLICES, f"not all have given way: {states}"


async def one_round(name: str, holders: Sequence[Student], taken: Taken) -> None:
    """Let as many again come one after the other, go on in turn with those who idled, and leave."""
    others = []
    await asyncio.sleep(IDLE)
    for number in range(SLICES):
        student, seconds = await come(name, 1000 + number)
        others.append(student)
        taken.first.append(seconds)
        taken.warm += is_warm(student.manager)
    await all_parked()
    taken.parked_others_idle += await cells(holders)
    taken.parked_others_idle += await cells(others)
    await all_parked()
    for student in others:
        await student.leave()
    for number in range(SLICES):
        student, seconds = await come(name, 2000 + number)
        taken.first_when_free.append(seconds)
        await student.leave()
    taken.parked += await cells(holders)
    taken.held += await cells(holders)


async def students(name: str, rounds: str) -> dict[str, object]:
    """Measure rounds of students whose kernels are of a kind, ``warm`` or ``cold``."""
    await template()
    holders = [(await come("warm", number))[0] for number in range(SLICES)]
    taken = Taken()
    for _ in range(int(rounds)):
        await one_round(name, holders, taken)
    for student in holders:
        await student.leave()
    return asdict(taken)


async def idle(after: str) -> float:
    """Return what this process takes of a core while all slices are held by kernels that idle so long."""
    await template()
    holders = [(await come("warm", number))[0] for number in range(SLICES)]
    await asyncio.sleep(float(after) + 5)  # what follows a kernel's start, too
    began, used = time.perf_counter(), time.process_time()
    await asyncio.sleep(WATCHED_SECONDS)
    share = (time.process_time() - used) / (time.perf_counter() - began)
    for student in holders:
        await student.leave()
    return share


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)  # this process needs it, and its kernels do not
    parts: dict[str, Callable[..., Coroutine[object, object, object]]] = {"students": students, "idle": idle}
    print(json.dumps(asyncio.run(parts[sys.argv[1]](*sys.argv[2:]))))
