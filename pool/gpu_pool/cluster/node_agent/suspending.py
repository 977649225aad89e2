"""Suspends and restores what pods of this node keep on its devices, as the pool's service asks for it.

By the code that a pool of one machine does it with, :mod:`gpu_pool.enforcement.checkpoint`, and its program:
nothing but verbs, process ids and sizes reaches that. What is suspended is recorded in a folder of the
node's, which the next agent finds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

import psutil

from gpu_pool.cluster.node_agent.sampling import Container, container_on_this_node
from gpu_pool.devices.activity import has_open
from gpu_pool.enforcement.checkpoint import Broken, Checkpoint, NotRestored, NotSuspended
from gpu_pool.settings import PoolSettings
from gpu_pool_client import (
    Device,
    GpuPoolError,
    LeaseState,
    MemoryMove,
    MoveOutcome,
    MoveResult,
    MoveVerb,
    Pool,
)
from gpu_pool_client import _procfs as procfs
from gpu_pool_client._log import EscapingLogger

_log = EscapingLogger(logging.getLogger("gpu_pool.node_agent"))
#: What holds slices of devices that the pool divides: no daemon, through which processes would reach them.
_TIER: Final = "caps"
_MIB: Final = 1 << 20
#: The part of the node's memory that is used where nobody names another one.
_PART: Final = 4
#: Seconds for which the service may keep a question until it has something to do.
_QUESTION: Final = 15.0
#: Seconds until it is asked again where it did not answer.
_AGAIN_AFTER: Final = 1.0
#: Seconds to wait where a move is wanted of a pod of which another one is just being ended.
_BUSY: Final = 0.2


class PodSuspender:
    """Moves what pods keep on this node's devices to its memory, and back. Its methods block."""

    def __init__(
        self,
        folder: Path,
        settings: PoolSettings,
        container: Callable[[int], Container | None] = container_on_this_node,
    ) -> None:
        """Keep records in ``folder``.

        ``settings`` say whether it is tried where it is not known to work, and how much of the node's memory
        it may take. ``container`` says whose container a process is in.
        """
        self._container = container
        if not settings.checkpoint_host_mib:
            # The agent's own cgroup limits nothing: the memory is that of the pods.
            settings.checkpoint_host_mib = int(psutil.virtual_memory().total) // _PART // _MIB
        self._cuda = settings.tuning.cuda_device
        self._checkpoint = Checkpoint(folder, settings)

    def unmovable(self, devices: Collection[Device]) -> Mapping[str, str]:
        """Return, by uuid, why nothing can be moved off these devices; empty where it can."""
        return {
            each.uuid: self._checkpoint.unavailable(each, _TIER) for each in devices if not each.simulated
        }

    def forget_ended(self) -> None:
        """Keep no record of processes that have ended, such as those of a pod that has gone."""
        self._checkpoint.recover(dict.fromkeys(self._checkpoint.suspended(), LeaseState.PARKED))

    def move(self, move: MemoryMove) -> MoveResult:
        """Do what is asked for; return what came of it."""
        try:
            if move.verb is MoveVerb.RESTORE:
                self._checkpoint.restore(move.pod)
            else:
                self._suspend(move)
        except NotSuspended as error:
            return MoveResult(move.id, MoveOutcome.KEPT, _clause(error))
        except NotRestored as error:
            return MoveResult(move.id, MoveOutcome.NOT_YET, _clause(error))
        except Broken as error:
            return MoveResult(move.id, MoveOutcome.LOST, _clause(error))
        return MoveResult(move.id, MoveOutcome.DONE)

    def _suspend(self, move: MemoryMove) -> None:
        pids = [pid for pid in procfs.pids() if self._is_of(pid, move)]
        # Those that have, or may have, initialised CUDA.
        users = [pid for pid in pids if has_open(pid, self._cuda) is not False]
        # As a process that goes over its pod's limit is ended, shared pages rather count twice than never.
        left = None if move.limit_mib is None else max(0, move.limit_mib - sum(map(_resident_mib, pids)))
        self._checkpoint.suspend(move.pod, users, move.device, left)

    def _is_of(self, pid: int, move: MemoryMove) -> bool:
        """Whether a process is one of the pod's."""
        whose = self._container(pid)
        if whose is None:
            return False
        return whose.pod == move.pod or (not whose.pod and whose.container in move.containers)

    def close(self) -> None:
        """End what asks the driver."""
        self._checkpoint.close()


class MoveLoop:
    """Asks the service what is to be moved, again and again, and has it moved."""

    def __init__(
        self,
        suspender: PodSuspender,
        pool: Callable[[], Pool],
        devices: Callable[[], Sequence[Device]],
        again_after: float = _AGAIN_AFTER,
    ) -> None:
        """``pool`` returns the service's, with the token that is good now, and ``devices`` the node's."""
        self._suspender, self._pool, self._devices, self._again_after = suspender, pool, devices, again_after
        #: What is being moved, or told, by the uid of the pod.
        self._moving: dict[str, MemoryMove] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unmovable: Mapping[str, str] | None = None
        self._complaint = ""

    async def run(self) -> NoReturn:
        """Ask and move, until cancelled."""
        while True:
            try:
                wanted = await self._ask()
            except Exception as error:  # noqa: BLE001 - without it nothing of this node is moved any more
                self._complain(str(error) or repr(error))
                await asyncio.sleep(self._again_after)
                continue
            self._complain("")
            new = [each for each in wanted if self._moving.get(each.pod) != each]
            begun = [self._begin(each) for each in new]
            if not all(begun):
                await asyncio.sleep(_BUSY)

    async def _ask(self) -> Sequence[MemoryMove]:
        known = [each.id for each in self._moving.values()]
        unmovable = await asyncio.to_thread(self._look)
        return await self._pool().move_memory(unmovable, known=known, seconds=_QUESTION)

    def _look(self) -> Mapping[str, str]:
        self._suspender.forget_ended()
        found = self._suspender.unmovable(self._devices())
        if found != self._unmovable:
            self._unmovable = found
            able = [uuid for uuid, why in found.items() if not why]
            _log.info(
                "What kernels keep on %d of %d GPUs can be moved to this node's memory", len(able), len(found)
            )
            for uuid, why in sorted(found.items()):
                if why:
                    _log.info("Nothing is moved off %s, since %s", uuid, why)
        return found

    def _begin(self, move: MemoryMove) -> bool:
        """Begin with a move; return False where another one of the same pod has not ended yet."""
        if move.pod in self._moving:
            return False
        self._moving[move.pod] = move
        task = asyncio.create_task(self._move(move))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _move(self, move: MemoryMove) -> None:
        try:
            try:
                result = await asyncio.to_thread(self._suspender.move, move)
            except Exception as error:  # noqa: BLE001 - whoever waits for it is to know
                _log.exception("Pod %s, %s", move.pod, move.verb.value)
                result = MoveResult(move.id, MoveOutcome.NOT_YET, f"the agent failed: {type(error).__name__}")
            told = result.outcome.value, f": {result.why}" if result.why else ""
            _log.info("Pod %s, %s: %s%s", move.pod, move.verb.value, *told)
            await self._tell(result)
        finally:
            del self._moving[move.pod]

    async def _tell(self, result: MoveResult) -> None:
        """Tell the service what came of a move, for as long as it takes: it waits for that."""
        while True:
            try:
                await self._pool().move_memory(self._unmovable or {}, [result])
            except GpuPoolError as error:  # noqa: PERF203 - it is away, and comes back
                self._complain(str(error))
                await asyncio.sleep(self._again_after)
            else:
                return

    def _complain(self, text: str) -> None:
        """Log that the service does not answer, once until that changes."""
        if text and text != self._complaint:
            _log.warning("Kernels of this node are not suspended now: %s", text)
        self._complaint = text


def _resident_mib(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss) // _MIB
    except psutil.Error:  # it has ended
        return 0


def _clause(error: Exception) -> str:
    """Return why something was not done, as a clause."""
    text = str(error).rstrip(".")
    return text[:1].lower() + text[1:]
