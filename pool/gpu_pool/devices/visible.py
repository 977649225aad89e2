"""Which GPUs ``CUDA_VISIBLE_DEVICES`` leaves to a process, as CUDA reads it: a pure function.

A batch system, a container or a user says with it which GPUs of a machine are theirs, and the
others are somebody else's. CUDA reads a list up to the first entry that names nothing, and shows
nothing where two entries name the same GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

#: The variable that names GPUs, and the one that says in which order they are numbered.
VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = "CUDA_DEVICE_ORDER"
#: The order that is the driver's own, too. Any other begins with the GPU that CUDA thinks the fastest.
PCI_ORDER: Final = "PCI_BUS_ID"

#: A number at the beginning is all that CUDA reads of an entry.
_NUMBER: Final = re.compile(r"\+?([0-9]{1,9})", re.ASCII)
#: Slurm's word for none.
_SLURM: Final = "nodevfiles"
#: What it says that a node has: ``gpu:v100:2`` or ``shard:200(S:0-1)``.
_GRES: Final = re.compile(r"\b(gpu|shard|mps):(?:([^:(),]+):)?([0-9]+)(?:\([^)]*\))?", re.ASCII)
_MOST_SHOWN: Final = 100


@dataclass(frozen=True, slots=True)
class CardNames:
    """By which names CUDA knows one GPU, and the devices in its place."""

    #: Its own; empty where it does not tell.
    uuid: str
    model: str
    #: The uuids of the devices in its place: itself, or its MIG instances.
    devices: tuple[str, ...] = ()
    #: Older names of MIG instances (``MIG-GPU-<uuid>/<gpu instance>/<compute instance>``), by their uuids.
    old_names: Mapping[str, str] = field(default_factory=dict)
    #: Whether it is divided into instances, of which CUDA numbers some.
    mig: bool = False


@dataclass(frozen=True, slots=True)
class Visible:
    """What is left to a process."""

    #: uuids of devices; None for all.
    uuids: frozenset[str] | None = None
    #: What is to be said about it, in sentences; often empty.
    told: str = ""
    #: Whether only CUDA itself knows which GPUs are meant.
    is_unclear: bool = False


#: What an entry names, and the devices in its place.
_Named: TypeAlias = tuple[str, frozenset[str]]


class _EndsError(Exception):
    """An entry names nothing; the argument says why."""


def choose(environ: Mapping[str, str], cards: Sequence[CardNames], *, all_read: bool = True) -> Visible:
    """Return which devices a process with this environment may use.

    ``cards`` are all GPUs in the driver's order; ``all_read`` unless there are more, of which nothing is
    known.
    """
    text = environ.get(VARIABLE)
    if text is None:
        return Visible()
    if not text.strip():
        return Visible(frozenset(), f"{VARIABLE} is set, and empty: that hides all GPUs. {_unset()}")
    if text.strip().lower() == _SLURM:
        return Visible(
            frozenset(),
            f"{VARIABLE} is {text.strip()}: Slurm has given this job no GPU. Ask for some, such as "
            "--gpus=1 or --gres=gpu:1.",
        )
    entries = [entry.strip() for entry in text.split(",")]
    by_number = not entries[0].startswith(("GPU-", "MIG-"))
    if by_number and _is_unclear(environ, cards, all_read):
        return Visible(is_unclear=True)
    return _read(text, entries, cards, by_number=by_number)


def _is_unclear(environ: Mapping[str, str], cards: Sequence[CardNames], all_read: bool) -> bool:
    """Whether it is not known which GPU has which of CUDA's numbers."""
    differ = len({card.model for card in cards}) > 1 and environ.get(ORDER) != PCI_ORDER
    return differ or not all_read or any(card.mig for card in cards)


def _read(text: str, entries: Sequence[str], cards: Sequence[CardNames], *, by_number: bool) -> Visible:
    found: dict[str, frozenset[str]] = {}
    told = ""
    for entry in entries:
        try:
            name, devices = _numbered(entry, cards) if by_number else _named(entry, cards)
        except _EndsError as ends:
            told = f"{_shown(text)}: {ends}, and CUDA reads no further."
            break
        if name in found:
            twice = f"{_shown(text)}: it names a GPU twice, and CUDA then shows none. Name it once."
            return Visible(frozenset(), twice)
        found[name] = devices
    uuids = frozenset[str]().union(*found.values())
    if not uuids:
        told = f"{told or f'{_shown(text)}.'} That hides all GPUs. {_unset()}"
    return Visible(uuids, told)


def _numbered(entry: str, cards: Sequence[CardNames]) -> _Named:
    """Return the GPU of that number. Raises ``_EndsError``."""
    number = _NUMBER.match(entry)
    if number is None:
        raise _EndsError(f"{_short(entry)} names no GPU")
    place = int(number[1])
    if place >= len(cards):
        there_are = "there is one, 0" if len(cards) == 1 else f"there are 0 to {len(cards) - 1}"
        raise _EndsError(f"there is no GPU {place} ({there_are})" if cards else "there is no GPU")
    return str(place), frozenset(cards[place].devices)


def _named(entry: str, cards: Sequence[CardNames]) -> _Named:
    """Return the GPU, or the MIG instance, whose uuid begins with what is written. Raises ``_EndsError``."""
    names: dict[str, frozenset[str]] = {}
    if entry.startswith("GPU-"):
        names = {card.uuid: frozenset(card.devices) for card in cards if card.uuid}
    elif entry.startswith("MIG-"):
        names = {uuid: frozenset((uuid,)) for card in cards if card.mig for uuid in card.devices}
        for uuid in (uuid for card in cards for uuid, old in card.old_names.items() if old == entry):
            return uuid, names[uuid]
    found = [entry] if entry in names else [name for name in names if name.startswith(entry)]
    if len(found) != 1:
        raise _EndsError(f"{_short(entry)} {'is the beginning of several' if found else 'names no GPU here'}")
    return found[0], names[found[0]]


def hidden(environ: Mapping[str, str], left: int, count: int) -> str:
    """Say that some of the machine's devices are not this process's."""
    return (
        f"{_shown(environ.get(VARIABLE, ''))}: of the {count} GPUs of this machine, this process and its "
        f"kernels have {'one' if left == 1 else left}."
    )


def nothing(environ: Mapping[str, str]) -> str:
    """Say that CUDA shows nothing with this environment."""
    return f"{_shown(environ.get(VARIABLE, ''))}. That hides all GPUs. {_unset()}"


def unclear(environ: Mapping[str, str], why: str) -> str:
    """Say that it cannot be known which GPUs are meant, so that none is used."""
    return (
        f"{_shown(environ.get(VARIABLE, ''))}: which GPUs have these numbers cannot be told here, so none is "
        f"used. CUDA numbers the fastest GPU first, and does not say which that is ({why}). Set "
        f"{ORDER}={PCI_ORDER}, or name the GPUs by uuid (nvidia-smi -L)."
    )


def _unset() -> str:
    return "Unset it, or name the GPUs that this process may use, before Jupyter or gpu-pool is started."


def _shown(text: str) -> str:
    return f"{VARIABLE} is {_short(text)}"


def _short(text: str) -> str:
    return ascii(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")[1:-1] or "empty"


def counts_in(gres: str) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return how many GPUs a node of Slurm's has, and in how many parts they are, by their types.

    ``gres`` is as Slurm writes it: ``gpu:v100:2,shard:v100:200``; a site has ``mps`` in place of shards, or
    neither. Where it tells no types, they are empty.
    """
    counts: dict[str, dict[str, int]] = {"gpu": {}, "shard": {}, "mps": {}}
    for name, kind, count in _GRES.findall(gres):
        counts[name][kind] = counts[name].get(kind, 0) + int(count)
    return counts["gpu"], counts["shard"] or counts["mps"]
