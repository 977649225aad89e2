"""What is told of each device: what is granted of it, and what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from gpu_pool.readings import Reading
from gpu_pool_client import WHOLE, DeviceStatus

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_MIB: Final = 1024 * 1024
_LABELS: Final = ("device", "index")
#: What the ledger knows: in which words, and how much it is.
_GRANTED: Final[Mapping[str, tuple[str, Callable[[DeviceStatus], float]]]] = {
    "memory_bytes": ("Memory of the device.", lambda each: each.device.memory_mib * _MIB),
    "memory_held_bytes": ("Memory that is granted.", lambda each: each.held_memory_mib * _MIB),
    "memory_free_bytes": ("Memory that can still be granted.", lambda each: each.free_memory_mib * _MIB),
    "share": ("Compute that may be granted, in GPUs.", lambda each: each.milli / WHOLE),
    "share_held": ("Compute that is granted, in GPUs.", lambda each: each.held_milli / WHOLE),
    "share_free": ("Compute that can still be granted, in GPUs.", lambda each: each.free_milli / WHOLE),
    "leases": ("Leases that hold a slice of it.", lambda each: each.leases),
    "drained": ("1 if nothing more is granted on it.", lambda each: each.drained),
}
#: What the device itself tells; None where it does not.
_DONE: Final[Mapping[str, tuple[str, Callable[[Reading], float | None]]]] = {
    "memory_used_bytes": ("Memory in use, whoever uses it.", lambda each: each.memory_used),
    "utilisation_ratio": ("Part of the last moments in which it computed.", lambda each: each.utilisation),
    "temperature_celsius": ("Temperature of the GPU.", lambda each: each.temperature),
    "power_watts": ("Power that it draws.", lambda each: each.power),
}


def device_numbers(
    statuses: Iterable[DeviceStatus], readings: Mapping[str, Reading | None]
) -> Iterable[Metric]:
    """Yield the gauges of all devices; ``readings`` has real ones alone, and None for the silent."""
    from prometheus_client.core import GaugeMetricFamily

    statuses = list(statuses)
    described = GaugeMetricFamily(
        "gpu_pool_device_info", "What the device is.", labels=[*_LABELS, "model", "simulated"]
    )
    for each in statuses:
        described.add_metric([*_names(each), each.device.model, str(each.device.simulated).lower()], 1)
    yield described
    for name, (words, value_of) in _GRANTED.items():
        family = GaugeMetricFamily(f"gpu_pool_device_{name}", words, labels=_LABELS)
        for each in statuses:
            family.add_metric(_names(each), value_of(each))
        yield family
    yield from _done(
        [(_names(each), readings[each.device.uuid]) for each in statuses if each.device.uuid in readings]
    )


def _done(read: Iterable[tuple[list[str], Reading | None]]) -> Iterable[Metric]:
    """Yield what devices tell; nothing stands for what one does not tell, least of all a 0."""
    from prometheus_client.core import GaugeMetricFamily

    answers = GaugeMetricFamily(
        "gpu_pool_device_answers", "1 if the driver can read the device, 0 if not.", labels=_LABELS
    )
    families = {
        name: GaugeMetricFamily(f"gpu_pool_device_{name}", words, labels=_LABELS)
        for name, (words, _) in _DONE.items()
    }
    for names, reading in read:
        answers.add_metric(names, reading is not None)
        for name, (_, value_of) in _DONE.items():
            value = None if reading is None else value_of(reading)
            if value is not None:
                families[name].add_metric(names, value)
    yield answers
    yield from families.values()


def _names(status: DeviceStatus) -> list[str]:
    return [status.device.uuid, str(status.device.index)]
