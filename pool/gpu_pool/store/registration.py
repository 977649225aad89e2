"""The devices of a pool, as they are registered, drained, broken and used by others: each a transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gpu_pool.policy import admission
from gpu_pool.store.context import StoreContext
from gpu_pool.store.device_table import ForeignUse, SeenFrom
from gpu_pool_client import Device, DeviceStatus
from gpu_pool_client._processes import pid_namespace


def close_device(store: StoreContext, device: str, drained: bool, *, hibernate: bool = False) -> DeviceStatus:
    """Grant nothing more on that device, or grant again; see ``Pool.drain``."""
    with store.db.transaction(store.give_up_at):
        statuses = store.devices.statuses(with_gone=True)
        chosen = admission.find_device(device, [status.device for status in statuses])
        before = next(each for each in statuses if each.device == chosen)
        # Kernels in pods never go to disk; of those without a home, none can be on it.
        anywhere = not store.sharing.in_pods
        now = store.clock.wall()
        store.devices.close(chosen.uuid, drained, now, hibernate=hibernate, anywhere=anywhere)
        said = {"device": chosen.uuid} | ({"hibernate": True} if drained and hibernate else {})
        store.db.audit_buffer.noted("drained" if drained else "undrained", said)
        store.queue.serve()
        # One that is gone is nowhere any more once nothing is left of it.
        gone = replace(before, drained=drained, drained_at=None, hibernates=False)
        return next((each for each in store.devices.statuses(with_gone=True) if each.device == chosen), gone)


def register(
    store: StoreContext,
    devices: Sequence[Device],
    seen: SeenFrom | None = None,
    others: Mapping[str, ForeignUse] | None = None,
) -> None:
    """Make these the pool's devices. Leases on others live on; nothing new is granted there.

    ``seen`` says what this process sees; by default, all that processes of its pid namespace do.
    Of new ones nothing is granted that ``others`` have, see :func:`set_others`. Raises
    ``OtherDevices`` where simulated and real devices would mix.
    """
    if any(device.simulated for device in devices):
        store.db.liveness.use_simulated()
    seen = seen or seen_from()
    with store.db.snapshot():
        if not store.devices.would_change(devices, seen):
            return
        simulated = store.devices.has_simulated()
    with contextlib.ExitStack() as held:
        alone = simulated and held.enter_context(store.db.liveness.nobody_simulates())
        held.enter_context(store.db.transaction(store.give_up_at))
        store.devices.register(devices, seen, nobody_simulates=alone)
        if others is not None:
            store.devices.set_others(others)
        store.queue.serve()


def seen_from(gpus: str = "", others: Collection[str] = (), *, everything: bool = False) -> SeenFrom:
    """Return what this process sees, where ``gpus`` is a digest of the GPUs that there are."""
    return SeenFrom(f"{pid_namespace()} {gpus}".strip(), others, everything)


def usable(store: StoreContext, own: Collection[str], seen: SeenFrom, *, limited: bool) -> frozenset[str]:
    """Return the uuids of the pool's devices that are for a process that sees these, and has ``own``.

    Not ``limited``, it may also have those that were found after it had looked for its own.
    """
    with store.db.snapshot():
        present = store.devices.present()
        found = set() if limited else store.devices.seen_from(seen.where)
    return frozenset((found | set(own)) & present.keys())


def present_devices(store: StoreContext) -> dict[str, Device]:
    """Return the pool's real devices by uuid."""
    with store.db.snapshot():
        found = store.devices.present()
    return {uuid: device for uuid, device in found.items() if not device.simulated}


def drained_devices(store: StoreContext) -> frozenset[str]:
    """Return the uuids of the devices that an administrator has closed."""
    with store.db.snapshot():
        found = store.devices.statuses(with_gone=True)
    return frozenset(each.device.uuid for each in found if each.drained_at is not None)


def set_faults(store: StoreContext, faults: Mapping[str, str]) -> None:
    """Note why nothing new can run on these devices, by uuid, empty where it can."""
    with store.db.snapshot():
        known = store.devices.present()
    if any(uuid in known and known[uuid].fault != fault for uuid, fault in faults.items()):
        with store.db.transaction(store.give_up_at):
            if store.devices.set_faults(faults):
                store.queue.serve()


def has_simulated(store: StoreContext) -> bool:
    """Whether simulated devices are in the pool."""
    with store.db.snapshot():
        return store.devices.has_simulated()


def forget_simulated(store: StoreContext) -> None:
    """Take simulated devices from the pool if no process uses them any more, and no lease.

    What is known of leases that have ended is kept.
    """
    with store.db.liveness.nobody_simulates() as alone:
        if alone:
            with store.db.transaction(store.give_up_at):
                store.devices.forget_simulated()


def set_others(store: StoreContext, others: Mapping[str, ForeignUse]) -> None:
    """Take note of what others than leases have of the devices, by uuid; none of the rest."""
    with store.db.transaction(store.give_up_at):
        if store.devices.set_others(others):
            store.queue.serve()
