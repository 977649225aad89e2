"""Which devices a machine has, what one was seen to do, and devices in name only: ``GPU_POOL_DEVICES``."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import Final

from gpu_pool_client import BadRequest, Device


@dataclass(frozen=True, slots=True)
class Inventory:
    """The devices found, where they were found, and what stood in the way."""

    #: In the driver's order; the instances of a partitioned GPU stand in its place.
    devices: tuple[Device, ...]
    #: In words: ``NVML, driver 550.54.14`` or ``simulated (GPU_POOL_DEVICES)``.
    source: str
    #: Sentences for a person, each with what to do about it.
    problems: tuple[str, ...] = ()
    #: Devices of this machine that are not for this process: ``CUDA_VISIBLE_DEVICES`` leaves them out.
    hidden: tuple[Device, ...] = ()
    #: uuids of all GPUs that the driver shows to this process, whether or not they are for it.
    gpus: tuple[str, ...] = ()
    #: Whether the driver is there, and fails for everybody on this machine or in this container.
    is_broken: bool = False
    #: Whether the driver was asked, which may fail later.
    by_driver: bool = False
    #: Whether ``CUDA_VISIBLE_DEVICES`` says which devices are for this process.
    is_limited: bool = False

    @property
    def digest(self) -> str:
        """Which GPUs the driver shows, in a few characters; empty where that is not known."""
        names = "\n".join(sorted(self.gpus))
        return hashlib.sha256(names.encode()).hexdigest()[:16] if names else ""

    def with_unified_memory(self, memory_mib: int) -> Inventory:
        """Return it with so much memory to divide on devices that have none of their own."""
        devices = (replace(each, memory_mib=memory_mib) if each.unified else each for each in self.devices)
        return replace(self, devices=tuple(devices))


#: A context keeps room for the threads of every multiprocessor that it may use. Measured on an
#: H100 with driver 580.159.04, by limiting a process to fewer of them with MPS: 58 MiB with 8
#: multiprocessors, 72 with 12, 145 with 32, 271 with 66, 518 with all 132 and without MPS.
_BASE_MIB: Final = 33
_PER_HUNDRED_MULTIPROCESSORS_MIB: Final = 368

#: CUDA cores in a multiprocessor, by compute capability, from the tables of NVIDIA's CUDA C++
#: Programming Guide; all others have 128.
_CORES: Final = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_USUAL_CORES: Final = 128


def context_mib(cores: int, capability: tuple[int, int]) -> int:
    """Return the MiB of a CUDA context on a card with so many CUDA cores, of that compute capability.

    Cards whose multiprocessors run fewer threads than an H100's may need less.
    """
    multiprocessors = cores // _CORES.get(capability, _USUAL_CORES)
    return _BASE_MIB + -(-multiprocessors * _PER_HUNDRED_MULTIPROCESSORS_MIB // 100)


@dataclass(frozen=True, slots=True)
class Reading:
    """What one device does now. None is what it does not tell."""

    #: In bytes, without what the driver keeps for itself.
    memory_used: int | None = None
    #: The part of the last moments (1/6 s to 1 s, by the card) in which anything computed, 0 to 1.
    utilisation: float | None = None
    #: In degrees Celsius.
    temperature: float | None = None
    #: In watts.
    power: float | None = None


#: The environment variable that names simulated devices.
VARIABLE: Final = "GPU_POOL_DEVICES"
#: Longest text that is read at all.
MAX_TEXT: Final = 2_000
#: Most devices in all.
MAX_DEVICES: Final = 1_024

ACCEPTED: Final = (
    "Accepted: MODEL:COUNT with the memory in the model's name, such as V100-SXM2-32GB:1; "
    "MODEL@MEMORY:COUNT, such as T4@16GiB:2 or K80@11441MiB:1; several, separated by commas."
)

_ENTRY: Final = re.compile(
    r"(?P<model>[a-z0-9][a-z0-9 ._-]{0,63})"
    r"(?:@(?P<amount>[0-9]{1,7})(?P<unit>[gm]ib))?"
    r":(?P<count>[0-9]{1,4})",
    re.ASCII | re.IGNORECASE,
)
_NAMED_MEMORY: Final = re.compile(r"(?<![0-9.])([0-9]{1,4})GB(?![a-z0-9])", re.ASCII | re.IGNORECASE)
_MIB_PER_UNIT: Final = {"mib": 1, "gib": 1024}


def parse_devices(text: str, source: str = VARIABLE) -> tuple[Device, ...]:
    """Read simulated devices, such as ``V100-SXM2-32GB:2,T4@16GiB:1``.

    The same text gives the same devices in every process. Raises
    :class:`~gpu_pool_client.BadRequest`, naming ``source``, where the text was
    written, and the accepted forms.
    """
    try:
        return tuple(_parse(text))
    except _NoDevicesError as error:
        shown = ascii(error.text if len(error.text) <= 60 else error.text[:57] + "...")
        message = f"{shown} in {source} does not name simulated devices: {error.why}."
        raise BadRequest(message, ACCEPTED) from None


class _NoDevicesError(Exception):
    """A text, or one entry of it, names no devices."""

    def __init__(self, text: str, why: str) -> None:
        super().__init__(text, why)
        self.text = text
        self.why = why


def _parse(text: str) -> list[Device]:
    if len(text) > MAX_TEXT:
        raise _NoDevicesError(text, f"it has {len(text)} characters; at most {MAX_TEXT} are accepted")
    devices: list[Device] = []
    for entry in text.split(","):
        model, memory_mib, count = _parse_entry(entry.strip())
        if len(devices) + count > MAX_DEVICES:
            raise _NoDevicesError(text, f"at most {MAX_DEVICES} devices can be simulated")
        first = len(devices)
        devices += [_device(model, memory_mib, index) for index in range(first, first + count)]
    return devices


def _parse_entry(entry: str) -> tuple[str, int, int]:
    """Return (model, memory in MiB, count) of one entry."""
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise _NoDevicesError(entry, "it is not MODEL:COUNT or MODEL@MEMORY:COUNT")
    count = int(match["count"])
    if not count:
        raise _NoDevicesError(entry, "the number of devices is at least 1")
    model = match["model"].strip()
    return model, _memory_mib(model, match["amount"], match["unit"], entry), count


def _memory_mib(model: str, amount: str | None, unit: str | None, entry: str) -> int:
    """Return the memory given, or else the one in the model's name, whose GB are GiB."""
    if amount is None:
        named = _NAMED_MEMORY.search(model)
        if named is None:
            raise _NoDevicesError(entry, "the model's name does not say its memory; add it, as in T4@16GiB:1")
        amount, unit = named[1], "GiB"
    memory_mib = int(amount) * _MIB_PER_UNIT[(unit or "").lower()]
    if not memory_mib:
        raise _NoDevicesError(entry, "a device has some memory")
    return memory_mib


def _device(model: str, memory_mib: int, index: int) -> Device:
    # The index alone tells two devices apart; model and memory make the uuid
    # name another device once the text describes another one at that place.
    uuid = f"SIM-{model.replace(' ', '-')}-{memory_mib}MiB-{index}"
    return Device(uuid=uuid, index=index, model=model, memory_mib=memory_mib, simulated=True)
