"""What there is in a pool as it should be, and who may ask for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from gpu_pool.courses import Courses
from gpu_pool.policy import admission, placement, quotas
from gpu_pool.policy.queue_state import Rules
from gpu_pool.policy.sharing import Sharing
from gpu_pool_client import Device, DeviceStatus, GpuPoolError, LeaseState, SliceRequest
from model.known import Known


class Admitting:
    """Devices, leases and rules."""

    def __init__(
        self,
        devices: Sequence[Device],
        rules: Rules,
        settings: Sharing,
        attach_within: float,
        most_waiting: int,
    ) -> None:
        self.universe = list(devices)
        self.present = {device.uuid for device in devices}
        #: Since when administrators have devices drained, in Unix seconds.
        self.drained_at: dict[str, float] = {}
        #: Devices that nothing is granted on, whatever an administrator of the pool says.
        self.closed: set[str] = set()
        #: What others than leases have of a device: thousandths, MiB, contexts.
        self.others: dict[str, tuple[int, int, int]] = {}
        self.rules = rules
        self.courses = Courses()
        self.wall = self.uptime = 0.0
        self.leases: dict[str, Known] = {}
        #: Waiting leases in order of turn.
        self.queue: list[Known] = []
        self._settings = settings
        self._attach_within = attach_within
        self._most_waiting = most_waiting

    # -- What there is -----------------------------------------------------

    @property
    def sharing(self) -> Sharing:
        return self.courses.sharing(self._settings)

    def all_in(self, *states: LeaseState) -> list[Known]:
        """Return the leases in these states, oldest first."""
        return sorted((k for k in self.leases.values() if k.state in states), key=lambda k: k.number)

    @property
    def held(self) -> list[Known]:
        return self.all_in(LeaseState.HELD)

    @property
    def living(self) -> list[Known]:
        return [known for known in self.leases.values() if known.state is not LeaseState.ENDED]

    def statuses(self) -> list[DeviceStatus]:
        """Return all devices that are present or hold something."""
        shut = self.drained_at.keys() | self.closed
        found = [
            DeviceStatus(
                each,
                *self.others.get(each.uuid, (0, 0, 0)),
                leases=0,
                milli=self._total(each),
                drained=each.uuid in shut,
                drained_at=self.drained_at.get(each.uuid),
                hibernates=False,
            )
            for each in self.universe
        ]
        for known in self.held:
            found = placement.deduct(found, known.parts)
        return [each for each in found if each.device.uuid in self.present or each.leases]

    def _total(self, device: Device) -> int:
        return self.rules.device_milli if device.mig_profile is None else device.milli

    def granted_from(self) -> list[DeviceStatus]:
        return [each for each in self._present() if not each.drained]

    def _present(self) -> list[DeviceStatus]:
        return [each for each in self.statuses() if each.device.uuid in self.present]

    def _devices(self) -> list[Device]:
        return [each.device for each in self._present()]

    def accounts(self) -> Iterator[quotas.Account]:
        for each in self.living:
            yield quotas.Account(each.user, each.course, 1, each.milli, each.memory_mib)

    # -- Asking ------------------------------------------------------------

    def refusal(self, request: SliceRequest, user: str, course: str | None) -> type[GpuPoolError] | None:
        """Return the error that a request must meet now, or None."""
        try:
            self._check(request, user, course)
        except GpuPoolError as error:
            return type(error)
        return None

    def counted_as(self, request: SliceRequest) -> SliceRequest:
        """Return what is granted for a request. Raises for what cannot be granted at all."""
        return request

    def _check(self, asked: SliceRequest, user: str, course: str | None) -> None:
        request = self.counted_as(asked)
        admission.check_rules(request, self.rules)
        name = self.sharing.course(course).name
        self.courses.check(course, asked, user, (), datetime.now(timezone.utc))
        admission.check(request, self._devices(), self.rules)
        milli, memory_mib = self._size(request)
        self._check_quotas(quotas.Account(user, name, 1, milli, memory_mib))
        if self.queue or placement.place(request, self.granted_from(), self.rules) is None:
            waiting = sum(each.user == user and not each.home for each in self.queue)
            admission.check_waiting(request, waiting, self._most_waiting)

    def _check_quotas(self, asked: quotas.Account) -> None:
        for scope in quotas.scopes(self.sharing, asked.user, asked.course):
            quotas.check(scope, asked, self.accounts())

    def _size(self, request: SliceRequest) -> tuple[int, int]:
        part = next(placement.candidates(request, self._devices(), self.rules))
        return request.count * part.milli, request.count * part.memory_mib
