"""Real devices, as the NVIDIA driver's management library (NVML) tells of them, and what to do if it fails.

Only a GPU's uuid, name and memory are needed; everything else is optional, since cards, drivers and
containers differ in what they answer. A card that cannot be read is left out with a sentence that says why.
All cards are read at once, so that one that does not answer holds up no other. Where only CUDA knows which
of them a process with some environment would see, CUDA is asked.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from gpu_pool.devices import problems, visible
from gpu_pool.devices.inventory import Inventory, context_mib
from gpu_pool.devices.problems import FAILURES
from gpu_pool.devices.visible import CardNames
from gpu_pool.nvml import pynvml
from gpu_pool_client import WHOLE, Device
from gpu_pool_client._devices import CONTEXT_MIB

T = TypeVar("T")

#: Seconds in which the first must have answered: without persistence mode, the driver sets them all up now.
_FIRST_WITHIN: Final = 120.0
#: The others have so many times as long as the slowest took so far, and at least so many seconds.
_TIMES: Final = 3.0
_LEAST: Final = 5.0


def read_all(count: int, read: Callable[[int], T], least: float = _LEAST) -> list[T | None]:
    """Return what ``read`` returns for each index, None where it does not return.

    Whoever is slow while the others are, is waited for. A question that hangs keeps its thread,
    which does not keep the interpreter from exiting. ``least`` is the fewest seconds that the others have
    once one has answered. Raises what ``read`` raises.
    """
    answers: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()

    def ask(index: int) -> None:
        try:
            answers.put((index, read(index), None))
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever asks for all
            answers.put((index, None, error))

    began = time.monotonic()
    for index in range(count):
        threading.Thread(target=ask, args=(index,), name=f"gpu-pool-gpu-{index}", daemon=True).start()
    found: list[T | None] = [None] * count
    give_up_at = began + _FIRST_WITHIN
    for _ in range(count):
        try:
            index, answer, error = answers.get(timeout=max(0.0, give_up_at - time.monotonic()))
        except queue.Empty:
            break
        if error is not None:
            raise error
        found[index] = answer
        took = time.monotonic() - began
        give_up_at = began + took + max(least, _TIMES * took)
    return found


_T = TypeVar("_T")

_BYTES_PER_MIB: Final = 1024 * 1024
#: 64-bit words in a set of NUMA nodes; Linux has at most 1024 nodes.
_NODE_WORDS: Final = 16

#: A compute instance that is part of a GPU instance: 1c.3g.20gb is one third of 3g.20gb.
_PART_OF_INSTANCE: Final = re.compile(r"([0-9]+)c\.([1-9][0-9]*)g\.", re.ASCII)
#: How many of the GPU's parts an instance computes with: 3g.20gb has 3, 1c.3g.20gb has 1.
_PARTS: Final = re.compile(r"([1-9][0-9]*)[cg]\.", re.ASCII)

#: Compute modes in which one process at a time is admitted; the first was dropped by newer drivers.
_EXCLUSIVE: Final = (pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)

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
    #: How CUDA knows it; None where nothing is known of it.
    names: CardNames | None = None
    #: By MIG instance, a name that was used before R470.
    old_names: Mapping[str, str] = field(default_factory=dict)


def find_devices(environ: Mapping[str, str] | None = None) -> Inventory:
    """Ask NVML for every GPU and MIG instance; what fails becomes a problem.

    Those that ``CUDA_VISIBLE_DEVICES`` in ``environ`` (by default that of the process) hides are ``hidden``.
    """
    try:
        pynvml.nvmlInit()
    except FAILURES as error:
        return _nothing(error)
    hangs = False
    try:
        driver: str = pynvml.nvmlSystemGetDriverVersion()
        cards = read_all(pynvml.nvmlDeviceGetCount(), partial(_read_card, driver=driver))
        hangs = None in cards
    except FAILURES as error:
        return _nothing(error)
    finally:
        # It counts its users, so others in this process are not disturbed. Behind a question
        # that hangs, this one might hang, too.
        if not hangs:
            pynvml.nvmlShutdown()
    read = [card or _Card(problems=(problems.silent(f"GPU {index}"),)) for index, card in enumerate(cards)]
    return _choose(read, driver, os.environ if environ is None else environ)


def _nothing(error: Exception) -> Inventory:
    broken = problems.is_broken(error)
    return Inventory((), "NVML", (problems.library_problem(error),), is_broken=broken, by_driver=True)


def _choose(cards: Sequence[_Card], driver: str, environ: Mapping[str, str]) -> Inventory:
    """Return what is for this process, and what of the machine's is not."""
    told = [problem for card in cards for problem in card.problems]
    if not cards:
        return Inventory((), f"NVML, driver {driver}", (_no_gpu(driver, environ),))
    devices = _numbered(cards, _join(cards))
    names = [card.names for card in cards if card.names is not None]
    chosen = _visible(environ, names, all_read=len(names) == len(cards))
    mine = tuple(each for each in devices if chosen.uuids is None or each.uuid in chosen.uuids)
    others = tuple(each for each in devices if each not in mine)
    if chosen.told:
        told.append(chosen.told)
    if mine and others:
        told.append(visible.hidden(environ, len(mine), len(devices)))
    told += [problems.nominal_memory(f"GPU {d.index}", d.memory_mib) for d in mine if d.unified]
    gpus = tuple(each.uuid for each in names)
    limited = chosen.uuids is not None
    source = f"NVML, driver {driver}"
    return Inventory(mine, source, tuple(told), hidden=others, gpus=gpus, by_driver=True, is_limited=limited)


def _visible(environ: Mapping[str, str], names: Sequence[CardNames], *, all_read: bool) -> visible.Visible:
    chosen = visible.choose(environ, names, all_read=all_read)
    if not chosen.is_unclear:
        return chosen
    try:
        shown = shown_by_cuda(environ)
    except CudaSilent as silent:
        return visible.Visible(frozenset(), visible.unclear(environ, str(silent)))
    found = {uuid for card in names for uuid in card.devices if uuid_digits(uuid) in shown}
    found |= {uuid for card in names if uuid_digits(card.uuid) in shown for uuid in card.devices}
    return visible.Visible(frozenset(found), "" if found else visible.nothing(environ))


def _no_gpu(driver: str, environ: Mapping[str, str]) -> str:
    given = environ.get("NVIDIA_VISIBLE_DEVICES", "")
    if given in ("void", "none"):
        return problems.not_given(given)
    return problems.no_gpu_problem(driver)


def _numbered(cards: Sequence[_Card], devices: Sequence[Device]) -> list[Device]:
    """Return the devices with CUDA's numbers in the order of the bus, where these are certain."""
    names = [card.names for card in cards]
    if any(each is None or each.mig for each in names):
        return list(devices)
    return [replace(device, cuda_index=device.index) for device in devices]


def _read_card(index: int, driver: str) -> _Card:
    name = f"GPU {index}"
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid, model = (_ask(query, handle) for query in (pynvml.nvmlDeviceGetUUID, pynvml.nvmlDeviceGetName))
        known = CardNames(uuid or "", model or "")
    except FAILURES as error:
        return _Card(problems=(problems.card_problem(name, error),))
    try:
        card = _read_gpu(handle, index, driver, known)
    except FAILURES as error:
        lost = problems.code_of(error) in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_NO_PERMISSION)
        return _Card(problems=(problems.card_problem(name, error),), names=None if lost else known)
    uuids = tuple(device.uuid for device in card.devices)
    return replace(card, names=replace(card.names or known, devices=uuids, old_names=card.old_names))


def _read_gpu(handle: Any, index: int, driver: str, known: CardNames) -> _Card:
    read = partial(_read_device, index=index, driver=driver, numa_node=_numa_node(handle))
    mode = _ask(pynvml.nvmlDeviceGetMigMode, handle)
    if mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
        return replace(_read_instances(handle, index, read), names=replace(known, mig=True))
    admits = _ask(pynvml.nvmlDeviceGetComputeMode, handle)
    if admits == pynvml.NVML_COMPUTEMODE_PROHIBITED:
        return _Card(problems=(problems.prohibited(f"GPU {index}", known.uuid or str(index)),))
    device = replace(read(handle), exclusive=admits in _EXCLUSIVE)
    return _Card((device,), (), _address(pynvml.nvmlDeviceGetPciInfo, handle), _ends(handle))


def _read_instances(gpu: Any, index: int, read: _Read) -> _Card:
    """Read the instances of a GPU in MIG mode: CUDA offers these, and not the GPU itself."""
    count = pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
    places = [_read_instance(gpu, index, number, partial(read, parts=count)) for number in range(count)]
    devices = tuple(device for place in places for device in place.devices)
    told = tuple(problem for place in places for problem in place.problems)
    if not devices and not told:
        told = (problems.no_instance_problem(index),)
    old_names = {uuid: name for place in places for uuid, name in place.old_names.items()}
    return _Card(devices, told, old_names=old_names)


def _read_instance(gpu: Any, index: int, number: int, read: _Read) -> _Card:
    try:
        handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
        device = read(handle)
    except pynvml.NVMLError_NotFound:
        return _Card()  # numbers go up to the most instances there can be; this one is not made
    except FAILURES as error:
        return _Card(problems=(problems.card_problem(f"MIG instance {number} of GPU {index}", error),))
    parent = _ask(pynvml.nvmlDeviceGetUUID, gpu)
    part = _ask(pynvml.nvmlDeviceGetGpuInstanceId, handle)
    compute = _ask(pynvml.nvmlDeviceGetComputeInstanceId, handle)
    known = None not in (parent, part, compute)
    return _Card((device,), old_names={device.uuid: f"MIG-{parent}/{part}/{compute}"} if known else {})


def _read_device(handle: Any, index: int, driver: str, numa_node: int | None, parts: int = 1) -> Device:
    """Read a GPU, or an instance of one that can be divided into so many parts."""
    # An instance's name is its GPU's name, " MIG ", and its profile's name.
    model, mig, profile = pynvml.nvmlDeviceGetName(handle).partition(" MIG ")
    memory_mib, unified = _memory(handle)
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
        unified=unified,
    )


def _memory(handle: Any) -> tuple[int, bool]:
    """Return the memory in MiB, and whether it is the machine's: such a GPU has none to tell of."""
    try:
        return _memory_mib(handle), False
    except pynvml.NVMLError_NotSupported:
        # As CUDA does there.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _BYTES_PER_MIB, True


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


def _join(cards: Sequence[_Card]) -> tuple[Device, ...]:
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


#: Prints the uuid of each device that CUDA shows, as 32 hexadecimal digits, or how it fails. A process of
#: its own, since CUDA reads its environment once, and must not be initialised in a Jupyter server.
_CUDA_PROGRAM: Final = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        sys.exit(f"{name} failed with error {code}")
call("cuInit", 0)
count = ctypes.c_int()
call("cuDeviceGetCount", ctypes.byref(count))
for place in range(count.value):
    uuid = (ctypes.c_ubyte * 16)()
    name = "cuDeviceGetUuid_v2" if hasattr(cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    call(name, uuid, place)
    print(bytes(uuid).hex())
"""
#: Seconds: without persistence mode the driver takes long to set up many GPUs.
_CUDA_WITHIN: Final = 120.0
_NO_DEVICE: Final = "cuInit failed with error 100"


class CudaSilent(Exception):
    """CUDA did not say which GPUs it shows; the argument says why."""


def shown_by_cuda(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that CUDA shows with this environment, in its order, by the digits of their uuids.

    Raises ``CudaSilent``.
    """
    command = [sys.executable, "-I", "-S", "-c", _CUDA_PROGRAM]
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=_CUDA_WITHIN, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CudaSilent(f"{type(error).__name__}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        if last == _NO_DEVICE:
            return ()
        raise CudaSilent(last[:200])
    return tuple(done.stdout.split())


def uuid_digits(uuid: str) -> str:
    """Return the digits of a uuid as NVML writes it: ``GPU-8a56a4bc-...``."""
    return uuid.partition("-")[2].replace("-", "").lower()
