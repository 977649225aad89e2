"""Parks kernels in pods that keep memory on a device: the agent of their node moves it to the host's memory.

The agent does it as one machine's pool does, :mod:`gpu_pool.enforcement.checkpoint`; here it is decided what
it is asked for. A pod is annotated before anything of it is touched, and until all of it runs again, so
whichever service comes next knows what may be suspended. What follows from that needs no more memory: of a
pod with the annotation, everything is moved back while its lease is held, and stays away while it is not.

Agents ask, again and again, what they are to do; nobody connects to them. One that has not asked for a while
is away. Its word ends no wait: a slice is lent once an agent has said that its memory is free, and a kernel
goes on once one has said that its memory is back.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from gpu_pool.cluster.api import ApiWriter, path_of
from gpu_pool.cluster.dialects import Manifest
from gpu_pool.cluster.dialects.objects import PREFIX, listing, mapping, mib
from gpu_pool.cluster.manifests import number_of
from gpu_pool.cluster.pod_states import PodTaken
from gpu_pool.cluster.settings import CONTAINER, ClusterTimes
from gpu_pool.cluster.view import ClusterView
from gpu_pool.settings import PoolSettings
from gpu_pool_client import (
    BadRequest,
    EndReason,
    GpuPoolError,
    Lease,
    LeaseGone,
    LeaseState,
    MemoryMove,
    MoveOutcome,
    MoveResult,
    MoveVerb,
    NotAllowed,
    PoolUnreachable,
)
from gpu_pool_client._log import escaped

#: On a pod of which something may be suspended: since when, in Unix seconds.
SUSPENDED: Final = f"{PREFIX}/suspended"
#: Seconds after which an agent's question is answered at the latest.
_LONGEST_QUESTION: Final = 15.0
#: MiB that a driver copies in each second, at least.
_MIB_PER_SECOND: Final = 250
#: Seconds that all else may take.
_BESIDE_COPYING: Final = 90.0
#: Seconds between two looks at whether an agent is still there.
_LOOK_EVERY: Final = 1.0
#: Devices and moves that one report may name: more than any node has.
_MOST_DEVICES: Final = 256
_MOST_MOVES: Final = 1_024
#: Characters of a reason why something was not done.
_LONGEST_WHY: Final = 400
_NAME: Final = re.compile(r"[!-~]{1,128}", re.ASCII)
_AGENTS_LOG: Final = "See the log of the node agent."
_LOST: Final = "What this kernel kept on its GPU could not be brought back, so it is ended: {}."
#: Where no agent has said that it moves anything.
_NOBODY: Final = (
    "the agent of its node moves nothing, or has not been heard of lately (nodeAgent.suspend of the chart)"
)


def check_moves(unmovable: Mapping[str, str], results: Sequence[MoveResult], known: Collection[str]) -> None:
    """Raise ``BadRequest`` for what cannot be so. Pure."""
    if len(unmovable) > _MOST_DEVICES or max(len(results), len(known)) > _MOST_MOVES:
        raise BadRequest(
            f"The agent tells of {len(unmovable)} devices and {max(len(results), len(known))} moves.",
            f"Accepted: {_MOST_DEVICES} and {_MOST_MOVES} at most.",
        )
    for name in (*unmovable, *known, *(each.id for each in results)):
        if not _NAME.fullmatch(name):
            raise BadRequest(
                f"{name[:40]!a} is neither the uuid of a device nor the id of a move.", _AGENTS_LOG
            )


@dataclass(frozen=True, slots=True)
class _Agent:
    """What the agent of a node said last."""

    at: float
    unmovable: Mapping[str, str]


@dataclass(slots=True)
class _Move:
    """A move that is wanted, and what will be said of it."""

    move: MemoryMove
    node: str
    lease_id: str
    wanted_at: float
    said: asyncio.Future[MoveResult]


class PodSuspension:
    """See ``Suspension``: for kernels in pods, by the agents of their nodes. Used in one event loop."""

    def __init__(
        self,
        view: ClusterView,
        writer: ApiWriter,
        times: ClusterTimes,
        settings: PoolSettings,
        log: logging.Logger,
        end_taken: Callable[[str, PodTaken], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view, self._writer, self._log, self._clock = view, writer, log, clock
        self._settings, self._end_taken, self._holds = settings, end_taken, times.use_holds
        self._agents: dict[str, _Agent] = {}
        #: By the uid of the pod.
        self._moves: dict[str, _Move] = {}
        #: Leases that are being suspended or are about to be parked: since when, and until when at most.
        self._parking: dict[str, tuple[float, float]] = {}
        #: When what leases had was last moved back.
        self._restored: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wanted, self._stopped = asyncio.Event(), False

    # -- What the pool asks ------------------------------------------------------

    async def is_movable(self, lease: Lease) -> bool:
        """See ``Suspension.is_movable``."""
        return not self._unavailable(lease)

    def keeps(self, lease: Lease) -> bool:
        """See ``Suspension.keeps``."""
        pod = self._pod(lease.id)
        return pod is not None and _is_marked(pod)

    def is_older(self, lease_id: str, age: float) -> bool:
        """Whether what was seen so many seconds ago is older than that what a lease had was moved back."""
        return self._clock() - age < self._restored.get(lease_id, float("-inf"))

    def _unavailable(self, lease: Lease) -> str:
        """Return why nothing of a held lease can be moved away, a clause; empty where it can."""
        if self._settings.checkpoint == "off":
            return "that is switched off (c.PoolSettings.checkpoint)"
        pod = self._pod(lease.id)
        agent = None if pod is None else self._agents.get(_node_of(pod))
        if agent is None or not self._is_there(agent):
            return _NOBODY
        unknown = "the agent of its node does not see its GPU"
        whys = (agent.unmovable.get(part.device.uuid, unknown) for part in lease.slices)
        return next(filter(None, whys), "") if lease.slices else unknown

    async def suspend(self, lease: Lease) -> None:
        """See ``Suspension.suspend``: once the agent has said that it is done, and not before."""
        why, pod = self._unavailable(lease), self._pod(lease.id)
        if why or pod is None:
            raise _kept(why)
        began = self._clock()
        self._parking[lease.id] = began, began + self._within(lease)
        try:
            await self._suspend(lease, pod)
        except BaseException as error:
            # From now on all of it is moved back, if anything was moved.
            self._parking.pop(lease.id, None)
            if isinstance(error, PoolUnreachable):
                raise _kept(error.message[:1].lower() + error.message[1:].rstrip(".")) from error
            raise
        self._parking[lease.id] = began, self._clock() + self._settings.tuning.parked_within

    async def _suspend(self, lease: Lease, pod: Manifest) -> None:
        await self._mark(pod, str(round(time.time())))
        result = await self._done(self._want(MoveVerb.SUSPEND, pod, lease), lease)
        if result.outcome is MoveOutcome.LOST:
            await self._end_lost(lease.id, result.why)
        if result.outcome is not MoveOutcome.DONE:
            # It is restored then also where nothing has changed, which changes nothing: another agent, which
            # is about to end, may have been at it.
            raise _kept(result.why)

    async def restore(self, lease: Lease) -> None:
        """See ``Suspension.restore``."""
        self._parking.pop(lease.id, None)
        pod = self._pod(lease.id)
        if pod is None or not _is_marked(pod):
            return
        try:
            result = await self._done(self._want(MoveVerb.RESTORE, pod, lease), lease)
        except PoolUnreachable as error:
            raise PoolUnreachable(
                f"{error.message} What this kernel keeps on its GPU is in the memory of that machine, and "
                "comes back once it answers; its variables are kept.",
                "Run the cell again. If that does not help, tell the administrator.",
            ) from error
        if result.outcome is MoveOutcome.LOST:
            await self._end_lost(lease.id, result.why)
        if result.outcome is not MoveOutcome.DONE:
            raise PoolUnreachable(
                "This kernel cannot go on yet; its variables are kept. Nothing is moved back, since "
                f"{result.why}.",
                "Ask the administrator what runs on the GPU, and run the cell again.",
            )

    async def _end_lost(self, lease_id: str, why: str) -> None:
        message = _LOST.format(why)
        await self._end_taken(lease_id, PodTaken(EndReason.NOT_RESTORED, message))
        raise LeaseGone(message, "Start the kernel again.", reason=EndReason.NOT_RESTORED.value)

    def _within(self, lease: Lease) -> float:
        """Return for how many seconds an agent may be at a move."""
        return _BESIDE_COPYING + sum(part.device.memory_mib for part in lease.slices) / _MIB_PER_SECOND

    async def _done(self, wanted: _Move, lease: Lease) -> MoveResult:
        """Return what came of a move. Raises ``PoolUnreachable`` where its agent does not answer in time."""
        began, within = self._clock(), self._within(lease)
        while True:
            found, _ = await asyncio.wait({wanted.said}, timeout=_LOOK_EVERY)
            if found:
                return wanted.said.result()
            now, agent = self._clock(), self._agents.get(wanted.node)
            is_away = not (agent is not None and self._is_there(agent)) and now > began + self._holds
            if is_away or now > began + within:
                if wanted.move.verb is MoveVerb.SUSPEND:
                    self._forget(wanted)
                raise PoolUnreachable("The agent of its node has not said that it is done.")

    # -- What is wanted ------------------------------------------------------------

    def reconcile(self, leases: Collection[Lease], read_at: float) -> None:
        """Have all moved back that was moved away of leases that are held, and nothing of others.

        These are all that lived when they were read, not before ``read_at`` (``time.monotonic()``).
        """
        held = {lease.id: lease for lease in leases if lease.state is LeaseState.HELD}
        now = self._clock()
        self._parking = {
            name: (began, until)
            for name, (began, until) in self._parking.items()
            if now < until and (name in held or began >= read_at)
        }
        self._restored = {name: at for name, at in self._restored.items() if name in held or at >= read_at}
        self._agents = {node: each for node, each in self._agents.items() if self._view.has_node(node)}
        for wanted in list(self._moves.values()):
            is_over = wanted.lease_id not in held and wanted.wanted_at < read_at
            if is_over or self._view.own.pod(wanted.move.pod) is None:
                self._forget(wanted, "its lease is not held any more, or its pod has gone")
        for lease_id, lease in held.items():
            pod = self._pod(lease_id)
            if pod is not None and _is_marked(pod) and lease_id not in self._parking:
                self._want(MoveVerb.RESTORE, pod, lease)

    def _want(self, verb: MoveVerb, pod: Manifest, lease: Lease) -> _Move:
        """Have a move made, in place of another one of the same pod."""
        uid = str(pod["metadata"]["uid"])
        known = self._moves.get(uid)
        if known is not None and known.move.verb is verb:
            return known
        if known is not None:
            self._forget(known, "it is to be done otherwise now")
        device = min((part.device.uuid for part in lease.slices), default="")
        limit = _memory_limit(pod)
        move = MemoryMove(secrets.token_hex(8), verb, uid, containers_of(pod), device, limit)
        said: asyncio.Future[MoveResult] = asyncio.get_running_loop().create_future()
        made = self._moves[uid] = _Move(move, _node_of(pod), lease.id, self._clock(), said)
        self._wake()
        return made

    def _forget(self, wanted: _Move, why: str = "") -> None:
        if self._moves.get(wanted.move.pod) is wanted:
            del self._moves[wanted.move.pod]
        if why and not wanted.said.done():
            wanted.said.set_result(MoveResult(wanted.move.id, MoveOutcome.NOT_YET, why))

    # -- What agents say -----------------------------------------------------------

    async def moves(
        self,
        node: str,
        unmovable: Mapping[str, str],
        results: Sequence[MoveResult],
        known: Collection[str],
        seconds: float,
    ) -> tuple[MemoryMove, ...]:
        """See ``NodeAgents.moves``."""
        unmovable = {uuid: _bounded(why) for uuid, why in unmovable.items()}
        self._say_what_it_can(node, unmovable)
        self._agents[node] = _Agent(self._clock(), unmovable)
        for result in results:
            self._take(node, result)
        give_up_at = self._clock() + min(max(seconds, 0.0), _LONGEST_QUESTION, self._holds / 2)
        while True:
            found = tuple(each.move for each in self._moves.values() if each.node == node)
            left = give_up_at - self._clock()
            if left <= 0 or self._stopped or any(each.id not in known for each in found):
                return found
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), left)

    def _take(self, node: str, result: MoveResult) -> None:
        """Take what came of a move that is wanted on this node; pass over anything else."""
        wanted = next(
            (each for each in self._moves.values() if each.move.id == result.id and each.node == node), None
        )
        if wanted is None:
            return
        result = MoveResult(result.id, result.outcome, _bounded(result.why) or "its agent does not say why")
        if wanted.move.verb is MoveVerb.SUSPEND or result.outcome is not MoveOutcome.DONE:
            self._settle(wanted, result)
            return
        # Not done before the cluster knows it, or a service that comes next would have it done again.
        self._do(self._settle_restored(wanted, result))

    async def _settle_restored(self, wanted: _Move, result: MoveResult) -> None:
        pod = self._view.own.pod(wanted.move.pod)
        try:
            if pod is not None:
                await self._mark(pod, None)
        except GpuPoolError as error:  # it is moved back once more, which changes nothing
            self._log.warning("Lease %s: that it goes on is not written down: %s", wanted.lease_id, error)
        self._restored[wanted.lease_id] = self._clock()
        self._settle(wanted, result)

    def _settle(self, wanted: _Move, result: MoveResult) -> None:
        self._forget(wanted)
        told = (
            result.outcome.value,
            "" if result.outcome is MoveOutcome.DONE else f", since {result.why}",
        )
        self._log.info("Lease %s, %s its memory: %s%s", wanted.lease_id, wanted.move.verb.value, *told)
        if not wanted.said.done():
            wanted.said.set_result(result)
        if result.outcome is MoveOutcome.LOST:  # also where nobody waits for it
            taken = PodTaken(EndReason.NOT_RESTORED, _LOST.format(result.why))
            self._do(self._end_quietly(wanted.lease_id, taken))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something after what is being done. The loop itself holds tasks weakly."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_quietly(self, lease_id: str, taken: PodTaken) -> None:
        try:
            await self._end_taken(lease_id, taken)
        except GpuPoolError as error:
            self._log.error("Lease %s could not be ended: %s", lease_id, error)

    def _say_what_it_can(self, node: str, unmovable: Mapping[str, str]) -> None:
        """Log, once until it changes, on which devices of a node kernels are suspended."""
        known = self._agents.get(node)
        if known is not None and known.unmovable == unmovable:
            return
        able = sorted(uuid for uuid, why in unmovable.items() if not why)
        self._log.info("The agent of node %a moves what kernels keep on %d GPUs", node, len(able))
        for uuid, why in sorted(unmovable.items()):
            if why:
                self._log.info("Node %a: nothing is moved off %a, since %s", node, uuid, why)

    def _is_there(self, agent: _Agent) -> bool:
        return self._clock() - agent.at <= self._holds

    def stop_waiting(self) -> None:
        """Let no agent wait any more."""
        self._stopped = True
        self._wake()

    def _wake(self) -> None:
        """Let all agents that wait look what is wanted."""
        woken, self._wanted = self._wanted, asyncio.Event()
        woken.set()

    # -- Pods ------------------------------------------------------------------------

    def _pod(self, lease_id: str) -> Manifest | None:
        """Return a lease's newest pod."""
        pods = self._view.own.of(lease_id)
        return max(pods, key=lambda each: number_of(each["metadata"]["name"]), default=None)

    async def _mark(self, pod: Manifest, since: str | None) -> None:
        """Write on a pod that something of it may be suspended, or with None that all of it runs."""
        metadata = pod["metadata"]
        changes = {"metadata": {"uid": metadata["uid"], "annotations": {SUSPENDED: since}}}
        path = f"{path_of(metadata['namespace'], 'pods')}/{metadata['name']}"
        try:
            changed = await self._writer.change(path, changes)
        except NotAllowed as error:
            raise _kept("the cluster does not let the service write on the pod that it is") from error
        except PoolUnreachable as error:
            raise PoolUnreachable("The cluster's API server does not answer.") from error
        if changed is not None:
            self._view.pods.put(changed)
        elif since is not None:
            raise _kept("its pod has just gone")


def containers_of(pod: Manifest) -> tuple[str, ...]:
    """Return the ids of a pod's containers, without the name of their runtime."""
    statuses = listing(mapping(pod.get("status")).get("containerStatuses"))
    told = (str(each.get("containerID") or "").partition("://")[2] for each in statuses)
    return tuple(filter(None, told))


def _memory_limit(pod: Manifest) -> int | None:
    """Return the MiB of the host's memory that a kernel may have in its pod; None without a limit."""
    for container in listing(mapping(pod.get("spec")).get("containers")):
        limits = mapping(mapping(container.get("resources")).get("limits"))
        if container.get("name") == CONTAINER and "memory" in limits:
            return mib(limits["memory"])
    return None


def _is_marked(pod: Manifest) -> bool:
    return SUSPENDED in mapping(pod["metadata"].get("annotations"))


def _node_of(pod: Manifest) -> str:
    return str(mapping(pod.get("spec")).get("nodeName") or "")


def _bounded(why: str) -> str:
    return escaped(" ".join(why.split())[:_LONGEST_WHY].rstrip(". "))


def _kept(why: str) -> NotAllowed:
    return NotAllowed(
        "The kernel is not parked: it keeps memory on the GPU, or may, and that is not moved away from its "
        f"pod, since {why}.",
        "End the kernel to give the slice back.",
    )
