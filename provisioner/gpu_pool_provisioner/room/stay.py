"""A kernel's stay on its slice: at work, parked and back again, until one of them goes."""

from __future__ import annotations

from gpu_pool_client import Lease, LeaseGone
from gpu_pool_provisioner.patience import NOT_NOW
from gpu_pool_provisioner.room.endings import before
from gpu_pool_provisioner.room.parking import Parking
from gpu_pool_provisioner.room.reception import Reception
from gpu_pool_provisioner.room.running import Run
from gpu_pool_provisioner.room.steward import Steward, taken
from gpu_pool_provisioner.room.tenure import Act, Step
from gpu_pool_provisioner.room.turn import Turn
from gpu_pool_provisioner.room.wires import Wires


class Stay:
    """Holds a kernel that is relayed to the terms of its lease."""

    def __init__(self, run: Run, turn: Turn, front: Wires, reception: Reception) -> None:
        self._run = run
        self._turn = turn
        self._front = front
        self._reception = reception
        self._parking: Parking | None = None

    @property
    def resuming(self) -> bool:
        """Whether something was submitted to the parked kernel, whose slice is asked for again."""
        return self._parking is not None and self._parking.resuming

    def give_up_resuming(self) -> None:
        """Let what was submitted to the parked kernel fail, and leave its slice to others."""
        if self._parking is not None:
            self._parking.give_up()

    async def until_over(self, lease: Lease) -> Step | None:
        """Return once the kernel is over: None if it ended by itself, else what its terms say."""
        steward = Steward(lease, self._run.relay, self._turn)
        while lease.terms.has_limits:
            step: Step | None = await before(self._run.end, steward.time_is_up())
            if step is None:
                return self._run.taken
            if step.act is Act.END and not step.if_idle:
                return step
            self._parking = Parking(self._turn, self._run, self._front, self._reception)
            try:
                if step.act is Act.END:
                    if await before(self._run.end, self._parking.finds_idle()):
                        return step
                    steward.found_at_work()
                    continue
                if not await self._parks(step, self._parking):
                    steward.postpone(self._parking)
                    continue
                resumed = await before(self._run.end, self._parking.until_resumed())
            except LeaseGone as error:
                return await self._taken(error)
            finally:
                self._parking = None
            if resumed is None:
                return self._run.taken
            lease, steward = resumed, Steward(resumed, self._run.relay, self._turn)
        await self._run.end
        return self._run.taken

    async def _parks(self, step: Step, parking: Parking) -> bool:
        """Park the kernel, or complete that where its slice has gone; return whether it is parked."""
        if step.is_parked:
            await parking.complete()
            return True
        return await parking.begin()

    async def _taken(self, error: LeaseGone) -> Step:
        """Say who took a parked kernel's lease, and in which words."""
        try:
            words = (await self._turn.lease()).notice
        except (LeaseGone, *NOT_NOW):
            words = ""
        return taken(error.reason, words)
