"""The tiers of one machine's devices, and the leases that are enforced by them now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Final

from traitlets.log import get_logger

from gpu_pool.enforcement.tiers import Accounting, Tier, TierFailed, TierStatement
from gpu_pool_client import Device, Enforcement, Lease, Limit, Process, Strength

#: From the weakest to the firmest.
_STRENGTHS: Final = (Strength.NONE, Strength.COOPERATIVE, Strength.HARD)
_COUNTED: Final = Accounting()


class Isolation:
    """Which tier enforces slices of which device.

    ``candidates`` returns the tiers to try for a device, the preferred first;
    with the last of them it works or not at all. :meth:`state` and
    :meth:`must_open` may be called by any thread, everything else by one.
    """

    #: Whether leases are enforced in pods that the pool starts, on other machines than this one.
    in_pods: ClassVar[bool] = False

    def __init__(self, candidates: Callable[[Device], Sequence[Tier]]) -> None:
        self._candidates = candidates
        self._tiers: dict[str, Tier] = {}
        self._open: dict[str, Lease] = {}
        self._probed: set[str] = set()
        #: Why a preferred tier is not used, in sentences.
        self.problems: list[str] = []

    def adapt(self, devices: Iterable[Device]) -> tuple[Device, ...]:
        """Choose a tier for each device, make it ready, and return the devices as placement is to see them.

        Raises ``TierFailed`` where no tier works.
        """
        return tuple(self._choose(device).adapt(device) for device in devices)

    def _choose(self, device: Device) -> Tier:
        *preferred, last = self._candidates(device)
        tier = next((each for each in preferred if self._works(each, device)), last)
        if tier is last:
            last.prepare(device)
        self._tiers[device.uuid] = tier
        return tier

    def _works(self, tier: Tier, device: Device) -> bool:
        try:
            tier.prepare(device)
        except TierFailed as failure:
            self.problems.append(f"{device.label}: {tier.name} is not used. {failure}")
            return False
        return True

    def tier(self, device: Device) -> Tier:
        """Return the tier of a device; that of one which has gone only counts."""
        return self._tiers.get(device.uuid, _COUNTED)

    @property
    def acts(self) -> bool:
        """Whether any tier has effects."""
        return any(map(_acts, self._tiers.values()))

    def state(self, lease: Lease) -> Lease:
        """Return a held lease with the variables that enforce it, and the truth about its limits."""
        statements = [tier.describe(self._part(lease, tier)) for tier in self._tiers_of(lease)]
        variables = {name: value for each in statements for name, value in each.variables.items()}
        return replace(lease, variables=variables, enforcement=_weakest(statements))

    def must_open(self, lease: Lease) -> bool:
        """Whether something is to be done before a held lease is handed out."""
        # One that was parked and resumed has its id still, and may have another size.
        known = self._open.get(lease.id)
        return (known is None or known.held_at != lease.held_at) and any(map(_acts, self._tiers_of(lease)))

    def enforce(self, lease: Lease, held: Iterable[Lease]) -> None:
        """Enforce one more lease, once all that are not ``held`` any more are closed.

        Raises ``TierFailed``.
        """
        self.settle(held)
        for part in lease.slices:
            self._probe(part.device)
        for tier in self._tiers_of(lease):
            tier.open(self._part(lease, tier))
        self._open[lease.id] = lease

    def settle(self, held: Iterable[Lease]) -> None:
        """Enforce no more what is not held any more."""
        now = {lease.id: lease.held_at for lease in held}
        for lease in [each for each in self._open.values() if now.get(each.id) != each.held_at]:
            del self._open[lease.id]
            for tier in self._tiers_of(lease):
                self._close(tier, lease)

    def _probe(self, device: Device) -> None:
        """Find out, once and before anybody uses a device, whether its limits hold."""
        in_use = any(
            part.device.uuid == device.uuid for lease in self._open.values() for part in lease.slices
        )
        if device.uuid not in self._probed and not in_use:
            outcome = self.tier(device).probe(device)
            self._probed.add(device.uuid)
            get_logger().info("%s: whether its limits can be evaded: %s", device.label, outcome)

    def tend(self) -> dict[str, str]:
        """Mend what has broken meanwhile; return what holders are to read, by lease id."""
        told: dict[str, str] = {}
        for tier in _distinct(self._tiers.values()):
            try:
                told |= tier.tend()
            except TierFailed as failure:  # noqa: PERF203 - it is tried again; others are looked after
                get_logger().warning("%s does not work: %s", tier.name, failure)
        return told

    def _close(self, tier: Tier, lease: Lease) -> None:
        try:
            tier.close(self._part(lease, tier))
        except TierFailed as failure:  # the lease is over; whoever opens the next hears what is wrong
            get_logger().warning("Lease %s was not closed by %s: %s", lease.id, tier.name, failure)

    def attach(self, lease: Lease, process: Process) -> None:
        """Hold a process of the lease, and whatever it starts, to its limits."""
        for tier in self._tiers_of(lease):
            tier.attach(lease, process)

    def evict(self, lease: Lease, pids: Sequence[int]) -> None:
        """Take processes of the lease off its devices safely, before they are killed."""
        for tier in self._tiers_of(lease):
            tier.evict(lease, pids)

    def recover(self, held: Sequence[Lease]) -> None:
        """After a crash or a restart of this process: enforce exactly these leases."""
        for tier in filter(_acts, _distinct(self._tiers.values())):
            tier.recover([lease for lease in held if tier in self._tiers_of(lease)])
        self._open = {lease.id: lease for lease in held if any(map(_acts, self._tiers_of(lease)))}

    def stop(self) -> None:
        """Leave the devices as they were found, those apart on which leases live on."""
        busy = {id(tier) for lease in self._open.values() for tier in self._tiers_of(lease)}
        for tier in _distinct(self._tiers.values()):
            if id(tier) not in busy:
                self._stop(tier)

    def _stop(self, tier: Tier) -> None:
        try:
            tier.stop()
        except TierFailed as failure:
            get_logger().warning("%s could not be stopped: %s", tier.name, failure)

    def _part(self, lease: Lease, tier: Tier) -> Lease:
        """Return the lease with those of its slices that the tier enforces."""
        parts = tuple(part for part in lease.slices if self.tier(part.device) is tier)
        return lease if parts == lease.slices else replace(lease, slices=parts)

    def _tiers_of(self, lease: Lease) -> list[Tier]:
        return _distinct(self.tier(part.device) for part in lease.slices)


def _distinct(tiers: Iterable[Tier]) -> list[Tier]:
    """Return each tier once: one object may serve several devices."""
    return list({id(tier): tier for tier in tiers}.values())


def _acts(tier: Tier) -> bool:
    """Whether the tier has effects, and is not only described."""
    return type(tier).open is not Tier.open


def _weakest(statements: Sequence[TierStatement]) -> Enforcement:
    """Return what holds on all devices of a lease."""
    if not statements:
        return Enforcement()

    def strength(limit: Limit) -> int:
        return _STRENGTHS.index(limit.strength)

    return Enforcement(
        memory=min((each.enforcement.memory for each in statements), key=strength),
        compute=min((each.enforcement.compute for each in statements), key=strength),
    )
