"""The loop that makes true what a pool has decided: named steps, one after the other, again and again.

Whatever happens by itself, such as the death of a process or the loss of a node, is noticed and followed up
here and nowhere else, so that looking at a pool changes nothing of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gpu_pool.store.reclaim import Findings
from gpu_pool_client import GpuPoolError, PoolStatus
from gpu_pool_client._log import get_logger

#: Seconds between two passes where nothing asks for one sooner.
EVERY: Final = 1.0
#: Rest after a pass, in seconds and in times of what the pass took: many changes are followed up together.
#: Never for longer than this, also where a pass has stood still with its machine.
_LEAST_REST, _REST_TIMES, _MOST_REST = 0.02, 9.0, 2.0


@dataclass(slots=True)
class Facts:
    """What one pass has seen so far, for its later steps."""

    #: Whether it is for this process to decide: of those that share a store one does.
    leads: bool = False
    findings: Findings = field(default_factory=Findings)
    #: Whether anybody is in the queue.
    somebody_waits: bool = False
    #: Leases, by id, of which something was where they take effect, such as pods, before the status was read.
    bound: frozenset[str] = frozenset()
    #: None where no step needs it.
    status: PoolStatus | None = None


class Step(NamedTuple):
    """One step of a pass: its name, and what does it and returns whether it changed anything."""

    name: str
    do: Callable[[Facts], Awaitable[bool]]


@dataclass(slots=True)
class StepCount:
    """How often a step was done, how long that took in all, in seconds, and how often it failed."""

    times: int = 0
    seconds: float = 0.0
    failures: int = 0


class Reconciler:
    """Does the steps of a pool. :meth:`once` may be called in any event loop, :meth:`run` in one."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        #: By the name of the step.
        self.counts = {step.name: StepCount() for step in steps}
        #: Told after each pass that changed something.
        self.on_change: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken, self._stopping = asyncio.Event(), asyncio.Event()
        #: Whether it is to stop, also where it has not begun yet.
        self._is_stopped = False
        #: What was last logged of each step that fails.
        self._complaints: dict[str, str] = {}

    async def once(self) -> bool:
        """Make one pass; return whether it changed anything.

        A step that fails keeps no other from being done. Raises what the first of them did.
        """
        facts, changed, failed = Facts(), False, None
        for step in self._steps:
            count, began = self.counts[step.name], time.monotonic()
            try:
                has_changed = await step.do(facts)
            except Exception as error:  # noqa: BLE001 - raised below
                count.failures += 1
                self._complain(step.name, error)
                failed = failed or error
            else:
                self._complaints.pop(step.name, None)
                changed = changed or has_changed
                if has_changed:
                    get_logger().debug("Reconciled: %s", step.name)
            count.times += 1
            count.seconds += time.monotonic() - began
        if failed is not None:
            raise failed
        return changed

    async def run(self) -> None:
        """Make passes until :meth:`stop`: when woken, and at least every second or so."""
        self._loop = asyncio.get_running_loop()
        while not self._is_stopped:
            began = time.monotonic()
            with suppress(Exception):  # logged, and tried again in the next pass
                if await self.once():
                    for tell in self.on_change:
                        tell()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _rest(time.monotonic() - began))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._woken.wait(), EVERY)
            self._woken.clear()

    def wake(self) -> None:
        """Have a pass made soon, since something has changed. May be called in any thread."""
        self._set(self._woken)

    def stop(self) -> None:
        """Make no pass any more after the one that is under way."""
        self._is_stopped = True
        self._set(self._stopping)
        self._set(self._woken)

    def _set(self, event: asyncio.Event) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # that loop has ended
                self._loop.call_soon_threadsafe(event.set)

    def _complain(self, name: str, error: Exception) -> None:
        """Log why a step fails, once until that changes."""
        text = str(error) if isinstance(error, GpuPoolError) else f"{type(error).__name__}: {error}"
        if self._complaints.get(name) != text:
            self._complaints[name] = text
            exc_info = None if isinstance(error, GpuPoolError) else error
            get_logger().error("Keeping the pool in order failed (%s): %s", name, text, exc_info=exc_info)


def _rest(took: float) -> float:
    """Return for how many seconds to rest after a pass that took so many."""
    return min(max(_LEAST_REST, _REST_TIMES * took), _MOST_REST)
