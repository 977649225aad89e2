"""Which devices are there, work, and are for this process: written down as a backend finds them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gpu_pool.devices.inventory import Inventory
from gpu_pool.pool.backend import DevicesFound
from gpu_pool.store import leases, reclaim, registration
from gpu_pool.store.context import StoreContext
from gpu_pool.store.errors import OtherDevices
from gpu_pool_client import Device, DeviceStatus, NeverFits, PoolStatus, SliceRequest


class DeviceRegistry:
    """What a pool has registered. But for its attributes, used in the store's thread."""

    def __init__(self, *, is_owner: bool) -> None:
        self._is_owner = is_owner
        #: What is written down.
        self.noted: DevicesFound | None = None
        #: The real devices that are to take the place of simulated ones, once nobody uses those.
        self.awaited: Sequence[Device] = ()
        #: What whoever looks at the pool should know of it; empty for nothing.
        self.note = ""
        #: Devices that were here before, and of which alone it is asked whether they work.
        self.known: tuple[Device, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """What stood in the way when devices were looked for, in sentences."""
        if self.noted is None:
            return ()
        found = self.noted.inventory
        # The last says how to go on where there is none.
        return found.problems if found.devices else found.problems[:-1]

    def open(self, store: StoreContext, found: DevicesFound) -> None:
        """Register what was found when the store is opened.

        A process that sees no devices (no driver in its container, no variable in its terminal) must not take
        away those that another one registered: real ones never, simulated ones not before nobody uses them.
        """
        if not found.inventory.devices and registration.has_simulated(store):
            reclaim.end_over(store)
            registration.forget_simulated(store)
        self.write_down(store, found)

    def write_down(self, store: StoreContext, found: DevicesFound) -> None:
        """Write down what was found, as far as it is news.

        Whether devices work is compared with what is in the store: others write that, too.
        """
        known, inventory = self.noted, found.inventory
        is_new = known is None or (known.inventory, known.others) != (inventory, found.others)
        # Where others are told apart, what is there is what was found, and nothing else.
        if is_new and (inventory.devices or found.others is not None):
            self._register(store, inventory.devices, found)
        if is_new and self._is_owner:
            self._note_broken(store, inventory)
        if found.faults:
            registration.set_faults(store, found.faults)
        self.noted = found

    def may_be_news(self, found: DevicesFound) -> bool:
        """Whether there may be anything to write down of what was found."""
        # Where several processes decide, another one may have written since that a device fails.
        return found != self.noted or bool(found.faults and not self._is_owner)

    def _note_broken(self, store: StoreContext, inventory: Inventory) -> None:
        """Where the driver fails for a service, nothing new can use the devices that were here before.

        One process of several says so of no device: the driver may fail in its container alone. It is
        granted nothing itself.
        """
        self.known = ()
        if inventory.by_driver and inventory.problems and not inventory.devices:
            here = registration.present_devices(store)
            registration.set_faults(store, dict.fromkeys(here, inventory.problems[0]))
            self.known = tuple(here.values())

    def _register(self, store: StoreContext, devices: Sequence[Device], found: DevicesFound) -> None:
        """Make these the pool's devices; where simulated ones are still in use, do so once they are not."""
        self.awaited, self.note = (), ""
        try:
            _take_over(store, devices, found)
        except OtherDevices as error:
            # Whoever holds the simulated ones must be found and ended, which takes an open pool.
            if self._is_owner or any(device.simulated for device in devices):
                raise
            self.awaited, self.note = devices, str(error)

    def register_awaited(self, store: StoreContext) -> None:
        """Register what is awaited, if anything. Raises ``OtherDevices`` while those before are in use."""
        if self.awaited and self.noted is not None:
            _take_over(store, self.awaited, self.noted)
            self.awaited, self.note = (), ""

    def refuse_awaited(self) -> None:
        """Raise ``OtherDevices`` where other devices are still in use."""
        if self.awaited:
            raise OtherDevices(self.note)

    def usable(self, store: StoreContext) -> frozenset[str] | None:
        """Return the uuids of the devices that are for this process; None for all of the pool."""
        if self.noted is None or self._is_owner or self.awaited:
            return None
        found = self.noted.inventory
        if any(each.simulated for each in found.devices):
            return None
        if not found.devices and (registration.has_simulated(store) or not found.problems):
            return None
        own = frozenset(each.uuid for each in found.devices)
        usable = own and (registration.usable(store, own, self.noted.seen, limited=found.is_limited) or own)
        # Whoever waits for any of them may also have what takes their place meanwhile.
        has_all = not found.is_limited and usable >= registration.present_devices(store).keys()
        return None if has_all else usable

    def status(self, store: StoreContext, url: str, faults: Mapping[str, str]) -> PoolStatus:
        """Return everything as one snapshot, with what is known of devices: ``faults`` by uuid."""
        status, usable = leases.status(store, url), self.usable(store)
        others = set() if usable is None else registration.present_devices(store).keys() - usable
        devices = [
            _with_fault(each, faults.get(each.device.uuid, each.device.fault))
            for each in status.devices
            if each.device.uuid not in others
        ]
        told = dict.fromkeys(each.device.fault for each in devices)
        said = " ".join(filter(None, (self.note, *told, *self._why_none(devices))))
        return replace(status, devices=tuple(devices), note=said)

    def devices_for(self, store: StoreContext, request: SliceRequest) -> Collection[str]:
        """Return the uuids of the devices that a request of this process may have; none mean all.

        Raises ``NeverFits`` where there is none for it, with the reason.
        """
        usable = self.usable(store)
        found = None if self.noted is None else self.noted.inventory
        if usable or found is None or found.devices or not found.problems:
            return usable or ()
        if usable is None and registration.present_devices(store):
            return ()
        *why, way_out = found.problems
        raise NeverFits(f"You asked for {request.named}; this pool has no GPU. {' '.join(why)}", way_out)

    def _why_none(self, devices: Sequence[DeviceStatus]) -> tuple[str, ...]:
        """Say why none of the devices is for this process, where there would be some."""
        found = None if self.noted is None else self.noted.inventory
        there = found is not None and not devices and (found.is_limited or found.is_broken)
        return self.problems if there else ()


def _take_over(store: StoreContext, devices: Sequence[Device], found: DevicesFound) -> None:
    """Register devices, if need be after what is over was ended."""
    try:
        registration.register(store, devices, found.seen, found.others)
    except OtherDevices:
        reclaim.end_over(store)
        registration.register(store, devices, found.seen, found.others)
    if found.others is not None:
        registration.set_others(store, found.others)


def _with_fault(status: DeviceStatus, fault: str) -> DeviceStatus:
    if fault == status.device.fault:
        return status
    return replace(status, device=replace(status.device, fault=fault))
