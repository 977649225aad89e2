"""Suspending and restoring the processes of a lease, all of them or none.

The driver is asked by a :class:`.DriverWorker`, in a process of its own; here it is decided what to ask for,
and what to do about what it says. Every step is recorded before it is taken (:mod:`.records`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gpu_pool.enforcement.checkpoint.driver_worker import DriverAnswer, DriverWorkers, in_words
from gpu_pool.enforcement.checkpoint.eligibility import (
    CheckpointProbe,
    HostMemory,
    available_mib,
    budget_mib,
    facts_of,
    why_kept,
)
from gpu_pool.enforcement.checkpoint.program import NO_FREE_MEMORY
from gpu_pool.enforcement.checkpoint.records import Record, Records, SuspensionClaim
from gpu_pool.settings import PoolSettings
from gpu_pool_client import Device, LeaseState, Process
from gpu_pool_client._log import get_logger
from gpu_pool_client._processes import owner_of

#: MiB that the driver copies at least in each second.
_MIB_PER_SECOND: Final = 250
#: How often processes are tried to be brought back: once more than the driver may hang.
_TRIES: Final = 2
#: Seconds between two tries where no process can be started that would ask the driver.
_ASK_EVERY: Final = 0.5


class NotSuspended(Exception):
    """Nothing was suspended, and nothing has changed: the processes run, with all they had."""


class NotRestored(Exception):
    """The processes are still suspended, unharmed. Restoring them can be tried again."""


class NotAsked(NotRestored):
    """The driver could not be asked: nothing has been done to the processes, nor found out of them."""


class Broken(Exception):
    """Processes are in a state from which they cannot be brought back. The caller must end them.

    ``pids`` are theirs; the other processes of the lease run.
    """

    def __init__(self, pids: Collection[int], reason: str) -> None:
        self.pids = frozenset(pids)
        names = ", ".join(str(pid) for pid in sorted(self.pids))
        super().__init__(f"Process {names} could not be brought back to its GPU: {reason}")


def folder_beside(store: Path) -> Path:
    """Return the folder in which it is recorded what was suspended of the pool with this store."""
    return store.with_name(store.name + ".suspended")


class Checkpoint:
    """Moves the device memory of leases to host memory and back.

    All its methods block, for as long as copying takes; call them in a worker
    thread. What is suspended is recorded in ``folder``, which all processes
    share that open the same pool; it is made when it is needed. Each device has
    a :class:`.DriverWorker`, which :meth:`close` ends.
    """

    def __init__(self, folder: Path, settings: PoolSettings) -> None:
        self._records = Records(folder)
        self._workers = DriverWorkers(settings.tuning.driver_idle)
        self._probe = CheckpointProbe(settings, self._workers)
        self._settings = settings
        self._tuning = settings.tuning

    def close(self) -> None:
        """End what asks the driver, once it has done what it is asked for."""
        self._workers.stop()

    def unavailable(self, device: Device, tier: str) -> str:
        """Return why processes on this device, enforced by this tier, cannot be suspended; empty if they may.

        The first time that all else allows it, the driver is asked, which takes a second.
        """
        if self._settings.checkpoint == "off":
            return "moving device memory to host memory is switched off (c.PoolSettings.checkpoint)"
        return next((each.why for each in self._probe.hindrances(device, tier) if each.decisive), "")

    def suspend(self, lease_id: str, pids: Collection[int], device: str, most_mib: int | None = None) -> int:
        """Move what these processes of a lease hold on devices to host memory.

        ``pids`` are all of the lease's processes that have a device open, and
        ``device`` is the UUID of one of its devices. ``most_mib`` is the host memory that
        they may have, where something limits it that is not seen here. Returns the host memory
        in MiB that is counted for them: as much as they held. Raises
        :class:`NotSuspended` if they keep it, and :class:`Broken` if some
        cannot go on. May be repeated.
        """
        try:
            with self._records.claim(lease_id) as claim:
                if claim is None:
                    raise NotSuspended("It is being suspended or restored by another process.")
                return self._suspended(claim, pids, device, most_mib)
        except OSError as error:
            raise NotSuspended(f"What is suspended cannot be recorded: {error}.") from error

    def _suspended(
        self, claim: SuspensionClaim, pids: Collection[int], device: str, most_mib: int | None
    ) -> int:
        known = claim.record
        if known is not None:
            if known.complete and set(pids) <= set(known.living()):
                return known.host_mib
            self._undo(claim, "an earlier attempt was cut off")
        record = Record(_own(pids), self._measured(pids, device), Process.current(), time.time())
        self._reserve(claim, record, most_mib)
        lock_ms = self._tuning.driver_lock_ms
        arguments = ("--lock-ms", lock_ms, *sorted(pids))
        limit = self._limit(record) + math.ceil(len(pids) * lock_ms / 1000)
        worker = self._workers.of(record.device)
        answer = worker.ask("suspend", *arguments, limit=limit, keep_open=[claim.file])
        if answer.code != 0:
            why = in_words(answer.problem)
            self._undo(claim, why)
            raise NotSuspended(f"Its device memory was not moved: {why}.")
        try:
            with self._records.counted():
                claim.write(replace(record, complete=True))
        except OSError as error:
            self._undo(claim, str(error))
            raise
        return record.host_mib

    def _reserve(self, claim: SuspensionClaim, record: Record, most_mib: int | None) -> None:
        """Count the host memory that a lease needs; refuse it if that is too much."""
        with self._records.counted() as others:
            available = available_mib([process.pid for process in record.processes])
            # What others are about to take is not missing yet.
            available -= sum(other.host_mib for other in others if not other.complete)
            available = available if most_mib is None else min(available, most_mib)
            if why := self._host_memory(others).why_refused(record.host_mib, available):
                get_logger().warning("Lease %s is not parked: it %s.", claim.path.name, why)
                raise NotSuspended(f"It {why}.")
            claim.write(record)

    def _host_memory(self, records: Collection[Record]) -> HostMemory:
        taken = sum(record.host_mib for record in records)
        return HostMemory(len(records), taken, budget_mib(self._settings.checkpoint_host_mib))

    def restore(self, lease_id: str) -> None:
        """Move what a lease's processes held back to their devices; nothing to do if none is suspended.

        Raises :class:`NotRestored` if there is not enough free memory for it yet, and
        :class:`Broken` if some cannot go on. May be repeated.
        """
        if lease_id not in self._records.leases():
            return
        with self._records.claim(lease_id, self._tuning.driver_within) as claim:
            if claim is None:
                raise NotRestored(
                    "It is being suspended or restored by another process, or was by another version."
                )
            if claim.record is not None:
                self._bring_back(claim)

    def host_memory(self) -> HostMemory:
        """Return how much host memory suspended processes take, and may."""
        if not self._records.leases():
            return self._host_memory(())
        with self._records.counted() as records:
            return self._host_memory(records)

    def suspended(self) -> list[str]:
        """Return the ids of the leases that are suspended, or were when something was cut off."""
        return self._records.leases()

    def recover(self, states: Mapping[str, LeaseState]) -> dict[str, Broken]:
        """Mend what was cut off, given the states of all leases that :meth:`suspended` named before.

        The processes of a held lease are brought back to their devices; those of one
        that is parked, or waits to be resumed, are left suspended. Returns, by lease,
        those that the caller must end: they cannot be brought back, or their lease
        has ended. To be called when a pool is opened.
        """
        found = {lease_id: self._recovered(lease_id, state) for lease_id, state in states.items()}
        return {lease_id: broken for lease_id, broken in found.items() if broken is not None}

    def _recovered(self, lease_id: str, state: LeaseState) -> Broken | None:
        with self._records.claim(lease_id) as claim:
            if claim is None or claim.record is None:  # at work now, or never begun
                return None
            living = claim.record.living()
            if not living:
                claim.remove()
            elif state is LeaseState.ENDED:
                return Broken(living, "its lease has ended")
            elif state is LeaseState.HELD and not self._is_being_parked(claim.record):
                return self._held_again(claim)
        return None

    def _is_being_parked(self, record: Record) -> bool:
        """Whether somebody has just suspended a lease, and lives to say so to the store."""
        return (
            time.time() - record.since < self._tuning.parked_within and record.owner.is_alive() is not False
        )

    def _held_again(self, claim: SuspensionClaim) -> Broken | None:
        try:
            self._bring_back(claim)
        except Broken as broken:
            return broken
        except NotRestored as error:
            get_logger().warning("Lease %s stays suspended: %s", claim.path.name, error)
        return None

    def _measured(self, pids: Collection[int], device: str) -> Mapping[str, int]:
        """Return what the processes hold, in MiB by GPU; refuse what cannot be measured, or moved."""
        answer = self._workers.of(device).ask("measure", *sorted(pids), limit=self._tuning.driver_within)
        found: Mapping[str, Any] = next((line for line in answer.lines if "used" in line), {})
        used: Mapping[str, int] = found.get("used", {})
        if not used:
            # In a container the driver may name the processes otherwise than we do.
            why = answer.problem or "NVML sees none of its processes"
            raise NotSuspended(f"What it holds on its GPU cannot be measured: {why}.")
        facts = [facts_of(pid, found["computing"]) for pid in sorted(pids)]
        if why := why_kept(facts, insisted=self._settings.checkpoint == "on"):
            raise NotSuspended(f"Its device memory was not moved: {why}.")
        return used

    def _undo(self, claim: SuspensionClaim, why: str) -> None:
        """Bring back what was suspended of a lease. Its slice is still its own, so there is memory for it."""
        give_up_at = time.monotonic() + self._tuning.driver_within
        while True:
            try:
                return self._bring_back(claim)
            except NotAsked as error:
                if time.monotonic() >= give_up_at:
                    raise NotSuspended(f"{why}; then {error}") from error
            except NotRestored as error:
                assert claim.record is not None, "there was something to bring back"
                raise Broken(claim.record.living(), f"{why}; then {error}") from error
            time.sleep(_ASK_EVERY)

    def _bring_back(self, claim: SuspensionClaim) -> None:
        """Let all processes of a record run again, whatever state they are in, and remove it."""
        record = claim.record
        assert record is not None, "called for a record"
        if any(process.is_alive() is None for process in record.processes):
            raise NotRestored("It cannot be seen from this container.")
        worker = self._workers.of(record.device)
        free = [f"--free={uuid}={mib}" for uuid, mib in record.devices.items()]
        answer = DriverAnswer(0, (), "")
        for _ in range(_TRIES):
            if not record.living():
                break
            arguments = (*free, f"--wait={self._tuning.memory_free_within}", *record.living())
            limit = self._limit(record) + self._tuning.memory_free_within
            answer = worker.ask("restore", *arguments, limit=limit, keep_open=[claim.file])
            if answer.code == NO_FREE_MEMORY:
                raise NotRestored(f"There is not enough free memory for it on its GPU: {answer.problem}.")
            if not _stuck(record, answer):
                break
            worker.stop()  # what CUDA has in its process may be broken, too
        if not answer.has_begun:  # nothing is known of them, which may be well
            raise NotAsked(f"The driver could not be asked: {answer.problem}.")
        if stuck := _stuck(record, answer):
            raise Broken(stuck, in_words(answer.problem) or "the driver does not say why")
        claim.remove()

    def _limit(self, record: Record) -> int:
        return self._tuning.driver_within + record.host_mib // _MIB_PER_SECOND


def _own(pids: Collection[int]) -> tuple[Process, ...]:
    """Identify processes that this user may suspend."""
    if not pids:
        raise NotSuspended("None of its processes uses a GPU.")
    found = [(Process.of(pid), owner_of(pid)) for pid in sorted(pids)]
    processes = tuple(process for process, owner in found if process is not None and owner is not None)
    if len(processes) < len(pids):
        raise NotSuspended("One of its processes has just ended.")
    foreign = [process.pid for process, owner in found if process and os.geteuid() not in (0, owner)]
    if foreign:
        raise NotSuspended(f"Process {foreign[0]} belongs to another user.")
    return processes


def _stuck(record: Record, answer: DriverAnswer) -> list[int]:
    states = answer.states()
    return [pid for pid in record.living() if states.get(pid) != "running"]
