"""Real devices, as the NVIDIA driver's management library (NVML) tells of them, and what to do if it fails.

Only a GPU's uuid, name and memory are needed; everything else is optional,
since cards, drivers and containers differ in what they answer. A card that
cannot be read is left out with a sentence that says why.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import pynvml

from gpu_pool.devices.inventory import Inventory, context_mib
from gpu_pool_client import WHOLE, Device
from gpu_pool_client._values import CONTEXT_MIB

#: What NVML fails with; a function missing from an older driver's library is reported by either.
FAILURES: Final = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)


class NvmlSession:
    """NVML, and the handles of devices. Used by one thread at a time.

    After a failure it is opened anew, ``again_after`` seconds later at the
    earliest: that is slow where a card has fallen off the bus.
    """

    def __init__(self, again_after: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._again_after = again_after
        self._clock = clock
        self._handles: dict[str, Any] = {}
        #: When NVML was last opened; None while it is not.
        self._opened_at: float | None = None
        #: Why it could not be opened, and when that was.
        self._refused: tuple[str, float] | None = None
        self._failed = False

    def open(self) -> str:
        """Have NVML open; return why that cannot be, or nothing."""
        now = self._clock()
        if self._opened_at is not None and self._failed and now - self._opened_at >= self._again_after:
            self.close()
        if self._opened_at is not None:
            return ""
        if self._refused and now - self._refused[1] < self._again_after:
            return self._refused[0]
        try:
            pynvml.nvmlInit()
        except FAILURES as error:
            self._refused = library_problem(error), now
            return self._refused[0]
        self._opened_at, self._refused = now, None
        return ""

    def handle(self, uuid: str) -> Any:
        """Return the handle of a device. Raises one of ``FAILURES``."""
        if uuid not in self._handles:
            self._handles[uuid] = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return self._handles[uuid]

    def failed(self, uuid: str) -> None:
        """Take note that a device did not answer."""
        self._failed = True
        self._handles.pop(uuid, None)

    def close(self) -> None:
        """Let go of NVML; it can be opened again."""
        if self._opened_at is not None:
            with contextlib.suppress(*FAILURES):
                pynvml.nvmlShutdown()
        self._opened_at, self._failed = None, False
        self._handles.clear()


_T = TypeVar("_T")

_BYTES_PER_MIB: Final = 1024 * 1024
#: 64-bit words in a set of NUMA nodes; Linux has at most 1024 nodes.
_NODE_WORDS: Final = 16

#: A compute instance that is part of a GPU instance: 1c.3g.20gb is one third of 3g.20gb.
_PART_OF_INSTANCE: Final = re.compile(r"([0-9]+)c\.([1-9][0-9]*)g\.", re.ASCII)
#: How many of the GPU's parts an instance computes with: 3g.20gb has 3, 1c.3g.20gb has 1.
_PARTS: Final = re.compile(r"([1-9][0-9]*)[cg]\.", re.ASCII)

#: Where something is on the PCI bus: domain, bus, device.
_Address = tuple[int, int, int]
#: Reads the device behind a handle.
_Read = Callable[..., Device]


class _End(NamedTuple):
    """The far end of an NVLink: a GPU, or a switch that joins many."""

    switch: bool
    address: _Address | None


@dataclass(frozen=True, slots=True)
class _Card:
    """What was found in the place of one GPU: itself, its MIG instances, or neither."""

    devices: tuple[Device, ...] = ()
    problems: tuple[str, ...] = ()
    #: None where unknown, and for MIG instances, which have no NVLink.
    address: _Address | None = None
    ends: frozenset[_End] = frozenset()


def find_devices() -> Inventory:
    """Ask NVML for every GPU and MIG instance; what fails becomes a problem."""
    try:
        with _library():
            return _read_machine()
    except FAILURES as error:
        return Inventory((), "NVML", (library_problem(error),))


@contextmanager
def _library() -> Iterator[None]:
    """NVML, ready to be asked; it counts its users, so others in this process are not disturbed."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _read_machine() -> Inventory:
    driver: str = pynvml.nvmlSystemGetDriverVersion()
    cards = [_read_card(index, driver) for index in range(pynvml.nvmlDeviceGetCount())]
    problems = tuple(problem for card in cards for problem in card.problems)
    if not cards:
        problems = (no_gpu_problem(driver),)
    return Inventory(_join(cards), f"NVML, driver {driver}", problems)


def _read_card(index: int, driver: str) -> _Card:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        read = partial(_read_device, index=index, driver=driver, numa_node=_numa_node(handle))
        mode = _ask(pynvml.nvmlDeviceGetMigMode, handle)
        if mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
            return _read_instances(handle, index, read)
        return _Card((read(handle),), (), _address(pynvml.nvmlDeviceGetPciInfo, handle), _ends(handle))
    except FAILURES as error:
        return _Card(problems=(card_problem(f"GPU {index}", error),))


def _read_instances(gpu: Any, index: int, read: _Read) -> _Card:
    """Read the instances of a GPU in MIG mode: CUDA offers these, and not the GPU itself."""
    count = pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
    places = [_read_instance(gpu, index, number, partial(read, parts=count)) for number in range(count)]
    devices = tuple(device for place in places for device in place.devices)
    problems = tuple(problem for place in places for problem in place.problems)
    if not devices and not problems:
        problems = (no_instance_problem(index),)
    return _Card(devices, problems)


def _read_instance(gpu: Any, index: int, number: int, read: _Read) -> _Card:
    try:
        return _Card((read(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)),))
    except pynvml.NVMLError_NotFound:
        return _Card()  # numbers go up to the most instances there can be; this one is not made
    except FAILURES as error:
        return _Card(problems=(card_problem(f"MIG instance {number} of GPU {index}", error),))


def _read_device(handle: Any, index: int, driver: str, numa_node: int | None, parts: int = 1) -> Device:
    """Read a GPU, or an instance of one that can be divided into so many parts."""
    # An instance's name is its GPU's name, " MIG ", and its profile's name.
    model, mig, profile = pynvml.nvmlDeviceGetName(handle).partition(" MIG ")
    memory_mib = _memory_mib(handle)
    computes = _PARTS.match(profile)
    part = _PART_OF_INSTANCE.match(profile)
    if part:  # it shares the instance's memory with the other parts: count its own share alone
        memory_mib = memory_mib * int(part[1]) // int(part[2])
    return Device(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        index=index,
        model=model,
        memory_mib=memory_mib,
        driver=driver,
        milli=min(WHOLE, int(computes[1]) * WHOLE // max(1, parts)) if computes else WHOLE,
        mig_profile=profile if mig else None,
        numa_node=numa_node,
        context_mib=_context_mib(handle),
    )


def _memory_mib(handle: Any) -> int:
    """Return the memory that CUDA offers to programs, in MiB: what slices are shares of.

    This asks version 2 of NVML's memory query, which tells how much of the
    physical total the driver keeps for itself (some 550 MiB of an H100). CUDA's
    total is without it, so a pool that counted it would grant what is not
    there. Drivers before R510 have version 1 only, and their total was without
    it already.
    """
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    if memory is None:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // _BYTES_PER_MIB
    return int(memory.total - memory.reserved) // _BYTES_PER_MIB


def _context_mib(handle: Any) -> int:
    """Return what a CUDA context takes; what is usual where the driver does not tell the card's size."""
    cores = _ask(pynvml.nvmlDeviceGetNumGpuCores, handle)
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    if cores is None or capability is None:
        return CONTEXT_MIB
    return context_mib(cores, tuple(capability))


def _numa_node(handle: Any) -> int | None:
    """Return the NUMA node beside the GPU, None if unknown; some firmware then names every node.

    ``nvmlDeviceGetNumaNodeId`` answers another question: which node the GPU's
    own memory is, on the few machines where it is one.
    """
    scope = pynvml.NVML_AFFINITY_SCOPE_NODE
    words = _ask(pynvml.nvmlDeviceGetMemoryAffinity, handle, _NODE_WORDS, scope)
    nodes = sum(word << 64 * place for place, word in enumerate(words or ()))
    return nodes.bit_length() - 1 if nodes.bit_count() == 1 else None


def _address(query: Callable[..., Any], *arguments: object) -> _Address | None:
    place = _ask(query, *arguments)
    return None if place is None else (place.domain, place.bus, place.device)


def _ends(handle: Any) -> frozenset[_End]:
    """Return where this GPU's active NVLinks end, as far as it is told."""
    links = range(pynvml.NVML_NVLINK_MAX_LINKS)
    active = [link for link in links if _ask(pynvml.nvmlDeviceGetNvLinkState, handle, link)]
    ends = {_end(handle, link) for link in active}
    return frozenset(end for end in ends if end.address is not None)


def _end(handle: Any, link: int) -> _End:
    kind = _ask(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    address = _address(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
    return _End(kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH, address)


def _join(cards: list[_Card]) -> tuple[Device, ...]:
    """Return all devices, each whole GPU with the uuids of those it has an NVLink to."""
    devices: list[Device] = []
    for card in cards:
        others = [other for other in cards if other is not card and _linked(card, other)]
        nvlink = tuple(device.uuid for other in others for device in other.devices)
        devices += [replace(device, nvlink=nvlink) for device in card.devices]
    return tuple(devices)


def _linked(one: _Card, other: _Card) -> bool:
    """Tell whether an NVLink joins two GPUs, directly or through a switch."""
    direct = _End(False, other.address) in one.ends or _End(False, one.address) in other.ends
    return direct or any(end.switch for end in one.ends & other.ends)


def _ask(query: Callable[..., _T], *arguments: object) -> _T | None:
    """Return the answer to an optional question, None where this card or driver has none."""
    try:
        return query(*arguments)
    except FAILURES:
        return None


_LIBRARY: Final = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "No NVIDIA driver was found here: its library libnvidia-ml.so.1 is missing. "
        "If this machine has an NVIDIA GPU, install its driver; "
        "in a container, have it started with access to the GPUs (docker run --gpus all)."
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "The NVIDIA driver is installed, but not loaded. "
        "Load it (sudo modprobe nvidia) or restart the machine; sudo dmesg says why it did not load."
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "The NVIDIA driver that runs and its library have different versions, "
        "as happens when the driver was updated. Restart the machine."
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "This user may not use the NVIDIA driver. "
        "Ask the administrator for read and write access to /dev/nvidiactl and the other /dev/nvidia files."
    ),
}

_CARD: Final = {
    pynvml.NVML_ERROR_GPU_IS_LOST: (
        "it does not answer any more (it has fallen off the bus). "
        "Restart the machine; if it happens again, have the card, its power and its cooling checked."
    ),
    pynvml.NVML_ERROR_RESET_REQUIRED: "it needs a reset. Restart the machine.",
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "this user may not use it. Ask the administrator for read and write access to its /dev/nvidia file."
    ),
    pynvml.NVML_ERROR_NOT_SUPPORTED: "it does not report its name or its memory, so it cannot be divided.",
}


def library_problem(error: Exception) -> str:
    """Say why NVML could not be used at all."""
    known = _LIBRARY.get(getattr(error, "value", None))
    return known or f"The NVIDIA driver's library failed ({error}). Run nvidia-smi and see what it says."


def card_problem(card: str, error: Exception) -> str:
    """Say why ``card``, such as ``GPU 3``, is left out while others are listed."""
    known = _CARD.get(getattr(error, "value", None))
    return f"{card} is left out: {known or f'{error}. Run nvidia-smi and see what it says.'}"


def no_gpu_problem(driver: str) -> str:
    """Say that the driver works and lists nothing."""
    return (
        f"The NVIDIA driver {driver} works, but it has no GPU. "
        "Check with lspci that the machine has one; "
        "in a container, have it started with access to the GPUs (docker run --gpus all)."
    )


def no_instance_problem(index: int) -> str:
    """Say that a GPU in MIG mode has not been divided into instances."""
    return (
        f"GPU {index} is in MIG mode and has no MIG instance, so nothing can run on it. "
        f"Make some (sudo nvidia-smi mig -i {index} -cgi 1g.5gb -C), "
        f"or end MIG mode (sudo nvidia-smi -i {index} -mig 0)."
    )
