"""The tiers of one machine's devices, and the leases that are enforced by them now.

Which tier is used for a device follows from the settings, and from who owns the devices. Tiers are found
through the entry points of installed packages, ours as any other's.

Programs find the devices of a slice by uuid, or by CUDA's numbers where the pool is set to that. A number is
right only for who sees the same GPUs as the pool, in the same order. So it is given to processes of the
pool's own pid namespace alone: what runs in a container, or asks over HTTP, may have been given some of the
machine's GPUs, which are numbered from 0 there.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gpu_pool import plugins
from gpu_pool.devices.visible import ORDER, PCI_ORDER, VARIABLE
from gpu_pool.enforcement.mps import programs
from gpu_pool.enforcement.tiers import Accounting, Tier, TierContext, TierFailed, TierStatement, WholeInstance
from gpu_pool.plugins import PluginBroken
from gpu_pool.settings import PoolSettings
from gpu_pool_client import BadRequest, Device, Enforcement, Lease, Limit, Process, Strength
from gpu_pool_client import _procfs as procfs
from gpu_pool_client._log import get_logger

#: From the weakest to the firmest.
_STRENGTHS: Final = (Strength.NONE, Strength.COOPERATIVE, Strength.HARD)
_COUNTED: Final = Accounting()
#: The group of entry points that names tiers: those of this package, and of any other that is installed.
TIERS: Final = "gpu_pool.tiers"
#: What a setting says to have the firmest that needs no preparation by the administrator.
AUTO: Final = "auto"


class Isolation:
    """Which tier enforces slices of which device.

    ``candidates`` returns the tiers to try for a device, the preferred first;
    with the last of them it works or not at all. ``otherwise`` is the tier of devices that
    :meth:`adapt` was not told of, such as those that have gone. :meth:`state` and
    :meth:`must_open` may be called by any thread, everything else by one.
    """

    def __init__(self, candidates: Callable[[Device], Sequence[Tier]], otherwise: Tier = _COUNTED) -> None:
        self._candidates = candidates
        self._otherwise = otherwise
        self._tiers: dict[str, Tier] = {}
        self._open: dict[str, Lease] = {}
        #: What could not be closed: the leases, as they were held, each with its tier.
        self._unclosed: list[tuple[Tier, Lease]] = []
        self._probed: set[str] = set()
        #: Whether any tier has effects.
        self.acts = False
        #: Why a preferred tier is not used, in sentences.
        self.problems: list[str] = []

    def adapt(self, devices: Iterable[Device]) -> tuple[Device, ...]:
        """Choose a tier for each device, make it ready, and return the devices as placement is to see them.

        Raises ``TierFailed`` where no tier works.
        """
        return tuple(_one_at_a_time(self._choose(device).adapt(device)) for device in devices)

    def _choose(self, device: Device) -> Tier:
        *preferred, last = self._candidates(device)
        tier = next((each for each in preferred if self._works(each, device)), last)
        if tier is last:
            last.prepare(device)
        self._tiers[device.uuid] = tier
        self.acts = any(map(_acts, self._tiers.values()))
        return tier

    def _works(self, tier: Tier, device: Device) -> bool:
        try:
            tier.prepare(device)
        except TierFailed as failure:
            self.problems.append(f"{device.label}: {tier.name} is not used. {failure}")
            return False
        return True

    def tier(self, device: Device) -> Tier:
        """Return the tier of a device."""
        return self._tiers.get(device.uuid, self._otherwise)

    def state(self, lease: Lease) -> Lease:
        """Return a held lease with the variables that enforce it, and the truth about its limits."""
        statements = [tier.describe(part) for tier, part in self._parts(lease)]
        variables = {name: value for each in statements for name, value in each.variables.items()}
        enforcement = statements[0].enforcement if len(statements) == 1 else _weakest(statements)
        if not variables and enforcement == lease.enforcement:  # as it is where nothing is enforced
            return lease
        return replace(lease, variables=variables, enforcement=enforcement)

    def must_open(self, lease: Lease) -> bool:
        """Whether something is to be done before a held lease is handed out."""
        # One that was parked and resumed has its id still, and may have another size.
        known = self._open.get(lease.id)
        is_new = known is None or known.held_at != lease.held_at
        return is_new and any(_acts(tier) for tier, _ in self._parts(lease))

    def opened(self) -> tuple[Lease, ...]:
        """Return the leases that are enforced now, as they were when they were opened."""
        return tuple(self._open.values())

    def enforce(self, lease: Lease, held: Iterable[Lease], among: Iterable[Lease]) -> None:
        """Enforce one more lease, unless it is already, once what is not held any more is closed.

        See :meth:`settle` for ``held`` and ``among``. Raises ``TierFailed``.
        """
        if not self.must_open(lease):
            return
        self._close_again()
        self.settle(held, among)
        for part in lease.slices:
            self._probe(part.device)
        parts = self._parts(lease)
        for tier, its_part in parts:
            tier.open(its_part)
        self._open[lease.id] = lease
        # Opened again, it is not to be closed for what it was before.
        opened = [tier for tier, _ in parts]
        self._unclosed = [
            (tier, each) for tier, each in self._unclosed if each.id != lease.id or tier not in opened
        ]

    def settle(self, held: Iterable[Lease], among: Iterable[Lease]) -> None:
        """Enforce no more what is not held any more.

        ``among`` are those that were :meth:`opened` before ``held`` was read: what was opened since is
        left alone.
        """
        now = {lease.id: lease.held_at for lease in held}
        for lease in [each for each in among if now.get(each.id) != each.held_at]:
            if self._open.get(lease.id) is not lease:
                continue
            del self._open[lease.id]
            for tier, its_part in self._parts(lease):
                self._close(tier, its_part)

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
        """Mend what has broken meanwhile, and close what could not be closed.

        Returns what holders are to read, by lease id.
        """
        told: dict[str, str] = {}
        for tier in _distinct(self._tiers.values()):
            try:
                told |= tier.tend()
            except TierFailed as failure:  # noqa: PERF203 - it is tried again; others are looked after
                get_logger().warning("%s does not work: %s", tier.name, failure)
        self._close_again()
        return told

    def _close_again(self) -> None:
        unclosed, self._unclosed = self._unclosed, []
        for tier, lease in unclosed:
            self._close(tier, lease)

    def _close(self, tier: Tier, lease: Lease) -> None:
        try:
            tier.close(lease)
        except TierFailed as failure:  # the lease is over; whoever opens the next hears what is wrong
            get_logger().warning("Lease %s was not closed by %s: %s", lease.id, tier.name, failure)
            self._unclosed.append((tier, lease))

    def attach(self, lease: Lease, process: Process) -> None:
        """Hold a process of the lease, and whatever it starts, to its limits."""
        for tier, _ in self._parts(lease):
            tier.attach(lease, process)

    def evict(self, lease: Lease, pids: Sequence[int]) -> None:
        """Take processes of the lease off its devices safely, before they are killed."""
        for tier, _ in self._parts(lease):
            tier.evict(lease, pids)

    def recover(self, held: Sequence[Lease]) -> None:
        """After a crash or a restart of this process: enforce exactly these leases."""
        for tier in filter(_acts, _distinct(self._tiers.values())):
            tier.recover([lease for lease in held if any(each is tier for each, _ in self._parts(lease))])
        self._open = {lease.id: lease for lease in held if any(_acts(tier) for tier, _ in self._parts(lease))}
        self._unclosed = []

    def stop(self) -> None:
        """Leave the devices as they were found, those apart on which leases live on."""
        busy = {id(tier) for lease in self._open.values() for tier, _ in self._parts(lease)}
        for tier in _distinct(self._tiers.values()):
            if id(tier) not in busy:
                self._stop(tier)

    def _stop(self, tier: Tier) -> None:
        try:
            tier.stop()
        except TierFailed as failure:
            get_logger().warning("%s could not be stopped: %s", tier.name, failure)

    def _parts(self, lease: Lease) -> list[tuple[Tier, Lease]]:
        """Return each tier that enforces the lease, with the lease as it has those of its slices alone."""
        tiers = [self._tiers.get(part.device.uuid, self._otherwise) for part in lease.slices]
        if len(tiers) == 1:
            return [(tiers[0], lease)]
        parts: list[tuple[Tier, Lease]] = []
        for tier in _distinct(tiers):
            of_tier = (part for part, its in zip(lease.slices, tiers, strict=True) if its is tier)
            parts.append((tier, replace(lease, slices=tuple(of_tier))))
        return parts


def _one_at_a_time(device: Device) -> Device:
    """Return a device whose compute mode admits one process with one place for a process.

    By MPS any number of processes share it: the pool's own, or one that somebody else has started.
    """
    if not device.exclusive:
        return device
    if device.contexts is not None or any(map(programs.is_believed, programs.mps_processes())):
        return replace(device, exclusive=False)
    return replace(device, contexts=1)


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


def find_tier(name: str) -> type[Tier]:
    """Return the tier that the settings name. Raises ``BadRequest`` for one that cannot be used."""
    if name == AUTO:
        return Accounting
    try:
        found: type[Tier] = plugins.load(TIERS, name, Tier)
    except PluginBroken as broken:
        raise BadRequest(
            f"c.PoolSettings.tier is {name[:40]!a}, and that cannot be used: {broken}.",
            f"Accepted: {AUTO}, {', '.join(sorted(plugins.offers(TIERS)))}.",
        ) from broken
    return found


def unowned(settings: PoolSettings) -> Isolation:
    """Return the isolation of a pool that any of its user's processes may open: nobody owns the devices.

    Raises ``BadRequest`` where the settings ask for a tier that needs an owner.
    """
    kind = find_tier(settings.tier)
    if kind.needs_owner:
        raise BadRequest(
            f"c.PoolSettings.tier is {settings.tier!r}, which one process must do for all.",
            'Run "gpu-pool serve", and set GPU_POOL_URL=unix: for everybody who uses this machine\'s GPUs.',
        )
    return _isolation(kind.make(TierContext(settings)))


def owned(settings: PoolSettings) -> Isolation:
    """Return the isolation of a pool whose devices this process owns, for several users if it is root."""
    several = os.geteuid() == 0
    prober = _uid_of(settings.probe_user) if several else None
    context = TierContext(settings, several_users=several, probe_uid=prober)
    return _isolation(find_tier(settings.tier).make(context))


def _isolation(chosen: Tier) -> Isolation:
    counted, instances = Accounting(), WholeInstance()

    def candidates(device: Device) -> Sequence[Tier]:
        if device.mig_profile is not None:
            return (instances,)
        # Nothing stands behind a simulated device that could be enforced.
        return (counted if device.simulated else chosen,)

    return Isolation(candidates)


def _uid_of(user: str) -> int:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise BadRequest(
            f"c.PoolSettings.probe_user is {user[:64]!a}, and there is no such user.",
            "Name a user of this machine who may do no more than a student.",
        ) from None


#: What a setting says to have numbers.
INDEX: Final = "index"


def with_indices(lease: Lease, isolation: Isolation) -> Lease:
    """Return a lease whose processes find its devices by number, if all have one; otherwise as it is."""
    if not lease.slices or not _sees_the_same(lease.process or lease.holder.process):
        return lease
    if any(why_uuid(part.device, isolation.tier(part.device)) for part in lease.slices):
        return lease
    numbers = ",".join(str(part.device.cuda_index) for part in lease.slices)
    named: Mapping[str, str] = {VARIABLE: numbers, ORDER: PCI_ORDER}
    return replace(lease, variables={**lease.variables, **named})


def why_uuid(device: Device, tier: Tier | type[Tier]) -> str:
    """Say why programs must find a device by its uuid; empty where its number will do."""
    if device.mig_profile is not None:
        return "CUDA has no numbers for MIG instances"
    if tier.needs_uuids:
        return "MPS numbers anew what its daemon sees"
    if device.cuda_index is None:
        return "its number is not certain, since a GPU of this machine is in MIG mode, or cannot be read"
    return ""


def _sees_the_same(process: Process | None) -> bool:
    return (
        process is not None
        and process.namespace == Process.current().namespace
        and len(procfs.status(process.pid, b"NSpid")) == 1
    )
