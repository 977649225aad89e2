"""Slice requests: what a person writes, and the one parser that reads it.

``2%`` and ``0.02`` are a share of one GPU, ``1.5GiB`` and ``655MiB`` an amount
of GPU memory, ``4`` four whole GPUs, ``2x50%`` half of each of two. ``2%..10%`` and
``1GiB..4GiB`` are a guarantee and a limit: what is held for it, and how much memory it
may use while nobody else holds that. Filters follow: ``2% model=V100 memory>=16GiB
driver>=550 index=0,1``. So does for how long it is held at most: ``2% for 20min``.

All arithmetic is on integers: shares in thousandths of a device (*milli*),
memory in MiB. Fifty times 2% is exactly one GPU.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field, replace
from typing import Final

from gpu_pool_client._durations import parse_duration
from gpu_pool_client._errors import BadRequest

#: Thousandths in one whole device.
WHOLE: Final = 1000
#: Longest text that is read at all; everything longer is refused unread.
MAX_TEXT: Final = 256
#: Most devices one request may name.
MAX_COUNT: Final = 1024
#: Most memory one request may name, in MiB: what is written of it can be read again.
MAX_MIB: Final = 999_999_999

ACCEPTED: Final = (
    "Accepted: 2% or 0.02 (a share of one GPU), 1.5GiB or 655MiB (GPU memory), "
    "4 (whole GPUs), 2x50% (the same share of several), 2%..10% or 1GiB..4GiB (at least that, and up to the "
    "second while the memory is free); then filters, if any: "
    "model=V100 memory>=16GiB driver>=550 index=0,1; "
    "and for 20min (it ends then at the latest)."
)

_MIB_PER_UNIT: Final = {"mib": 1, "gib": 1024}
_FLAGS: Final = re.ASCII | re.IGNORECASE
_AMOUNT: Final = re.compile(
    r"(?:(?P<count>[0-9]{1,4})x)?(?P<whole>[0-9]{0,9})(?P<dot>\.(?P<part>[0-9]{1,6}))?(?P<unit>%|mib|gib)?",
    _FLAGS,
)
_MEMORY: Final = re.compile(r"(?P<whole>[0-9]{1,9})(?:\.(?P<part>[0-9]{1,6}))?(?P<unit>mib|gib)", _FLAGS)
_FILTER: Final = re.compile(r"(?P<name>model|memory|driver|index)(?P<op>>=|=)(?P<value>[!-~]+)", _FLAGS)
_MODEL: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", _FLAGS)
_DRIVER: Final = re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,5}){0,3}", re.ASCII)
_INDEXES: Final = re.compile(r"[0-9]{1,4}(?:,[0-9]{1,4}){0,31}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Filters:
    """Which devices a request may be placed on. Empty filters accept every device."""

    #: Part of the device's model name, compared without case; spaces are written ``-``.
    model: str | None = None
    #: Least total memory of the device, in MiB.
    memory_mib: int | None = None
    #: Least driver version, as numbers: ``(550, 54)``.
    driver: tuple[int, ...] | None = None
    #: Allowed device indexes, ascending; empty allows all.
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = []
        if self.model is not None:
            parts.append(f"model={self.model}")
        if self.memory_mib is not None:
            parts.append(f"memory>={format_memory(self.memory_mib)}")
        if self.driver is not None:
            parts.append("driver>=" + ".".join(map(str, self.driver)))
        if self.index:
            parts.append("index=" + ",".join(map(str, self.index)))
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class SliceRequest:
    """How much of how many devices is asked for. Made by :func:`parse_request`.

    Exactly one of ``milli`` (thousandths of each device, 1 to 1000) and
    ``memory_mib`` (MiB on each device) is set: it is what is guaranteed, held and
    charged. Where there is a limit as well, the one of the same kind is set.
    """

    count: int = 1
    milli: int | None = None
    memory_mib: int | None = None
    filters: Filters = field(default_factory=Filters)
    #: For how long it is held at most, in whole seconds; None where nothing is said.
    length: int | None = None
    #: How much of each device's memory it may use while that is free, in thousandths, up to 1000: more than
    #: ``milli``; None where that is all.
    limit_milli: int | None = None
    #: The same in MiB: more than ``memory_mib``.
    limit_mib: int | None = None

    @property
    def has_limit(self) -> bool:
        """Whether it may use more than its guarantee while nobody else holds that."""
        return self.limit_milli is not None or self.limit_mib is not None

    @property
    def guarantee(self) -> SliceRequest:
        """The request without its limit: what is held and charged."""
        return replace(self, limit_milli=None, limit_mib=None)

    def changes_only_limit_of(self, before: SliceRequest) -> bool:
        """Whether it is the request ``before`` but for the limit. A length that is not said stays."""
        length = before.length if self.length is None else self.length
        limits = [(each.limit_milli, each.limit_mib) for each in (self, before)]
        return limits[0] != limits[1] and replace(self.guarantee, length=length) == before.guarantee

    @property
    def whole_devices(self) -> bool:
        """Whether this asks for entire devices."""
        return self.milli == WHOLE

    @property
    def size(self) -> str:
        """The request without its filters and its length: ``2%``, ``2x1.5GiB``, ``4``, ``2%..10%``."""
        if self.milli == WHOLE:
            return str(self.count)
        amount = format_memory(self.memory_mib) if self.memory_mib else format_share(self.milli or 0)
        if self.limit_milli is not None:
            amount += f"..{format_share(self.limit_milli)}"
        elif self.limit_mib is not None:
            amount += f"..{format_memory(self.limit_mib)}"
        return f"{self.count}x{amount}" if self.count > 1 else amount

    @property
    def named(self) -> str:
        """What a sentence calls it: ``2%``, ``a whole GPU``, ``4 whole GPUs``; and what follows."""
        if not self.whole_devices:
            return str(self)
        whole = "a whole GPU" if self.count == 1 else f"{self.count} whole GPUs"
        return _joined(whole, self.filters, self.length)

    @property
    def title(self) -> str:
        """What kernels of it are called: ``GPU 2%``, ``GPU 2%, up to 10%``, ``GPU 75%×2``, ``whole GPU``."""  # noqa: RUF002
        size = "whole GPU" if self.whole_devices else f"GPU {_amount(self.milli, self.memory_mib)}"
        # Without a space, which would sort before the end of the same size of one GPU.
        return f"{size}×{self.count}{self._up_to}" if self.count > 1 else f"{size}{self._up_to}"  # noqa: RUF001

    @property
    def of_gpus(self) -> str:
        """How much of what, without filters: ``2% of a GPU, up to 10%``, ``50% of each of 2 GPUs``."""
        if self.whole_devices:
            return replace(self, filters=Filters(), length=None).named
        part = replace(self.guarantee, count=1).size
        gpus = "a GPU" if self.count == 1 else f"each of {self.count} GPUs"
        return f"{part} of {gpus}{self._up_to}"

    @property
    def limit(self) -> str:
        """Its limit, as pages show it: ``10%``, ``4 GiB``; empty where it has none."""
        return _amount(self.limit_milli, self.limit_mib) if self.has_limit else ""

    @property
    def _up_to(self) -> str:
        return f", up to {self.limit}" if self.has_limit else ""

    def at_most(self, limit: float | None) -> float | None:
        """Return for how many seconds it is held where a limit holds for all; None where nothing ends it."""
        return min((each for each in (self.length, limit) if each is not None), default=None)

    def __str__(self) -> str:
        return _joined(self.size, self.filters, self.length)


def _amount(milli: int | None, mib: int | None) -> str:
    return memory_in_words(mib, exact=True) if mib else format_share(milli or 0)


def _joined(size: str, filters: Filters, length: int | None) -> str:
    said = "" if length is None else f"for {format_length(length)}"
    return " ".join(filter(None, (size, str(filters), said)))


def format_length(seconds: int) -> str:
    """Write a length so that it reads back exactly: 1200 → ``20min``, 93784 → ``1d2h3min4s``.

    Parameters
    ----------
    seconds
        The length, in whole seconds.
    """
    words = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        words += [f"{count}{unit}"] * bool(count)
    return "".join(words)


def format_share(milli: int) -> str:
    """Write a share of a device's compute as a percentage: 20 → ``2%``, 5 → ``0.5%``.

    Parameters
    ----------
    milli
        The share, in thousandths of a device.
    """
    whole, tenth = divmod(milli, 10)
    return f"{whole}.{tenth}%" if tenth else f"{whole}%"


def format_gpus(milli: int) -> str:
    """Say how much of GPUs that is: 20 → ``2% of a GPU``, 1000 → ``a whole GPU``, 4000 → ``4 whole GPUs``.

    Parameters
    ----------
    milli
        Compute in thousandths of a device, of several devices together.
    """
    if milli and milli % WHOLE == 0:
        return SliceRequest(milli // WHOLE, WHOLE).named
    return f"{format_share(milli)} of a GPU"


def format_memory(mib: int) -> str:
    """Write an amount of memory so that it reads back exactly: 1536 → ``1.5GiB``, 655 → ``655MiB``.

    Parameters
    ----------
    mib
        The amount, in MiB.
    """
    whole, rest = divmod(mib * 100, 102400)
    if rest % 1024 or mib < 1024:
        return f"{mib}MiB"
    part = f"{rest // 1024:02d}".rstrip("0")
    return f"{whole}.{part}GiB" if part else f"{whole}GiB"


def memory_in_words(mib: int, *, exact: bool = False) -> str:
    """Write an amount of memory as pages show it: 655 → ``655 MiB``, 1536 → ``1.5 GiB``, 3276 → ``3.2 GiB``.

    Parameters
    ----------
    mib
        The amount, in MiB.
    exact
        Whether all of it is to be said, and not one digit after the point: 3276 → ``3276 MiB``.
    """
    if exact or mib < 1024:
        said = format_memory(mib)
        return f"{said[:-3]} {said[-3:]}"
    return f"{mib / 1024:.1f} GiB".replace(".0 ", " ")


def parse_request(text: str) -> SliceRequest:
    """Read a slice request from what a person wrote.

    Parameters
    ----------
    text
        Such as ``2%``, ``1.5GiB``, ``2x50%``, ``4`` or ``2%..10%``, with filters and ``for 20min`` behind it,
        if any.

    Returns
    -------
    SliceRequest
        The request. ``str`` of it can be read again.

    Raises
    ------
    BadRequest
        It is not a slice request. The remedy names the accepted forms.
    """
    if len(text) > MAX_TEXT:
        raise _refusal(text, f"it has {len(text)} characters; at most {MAX_TEXT} are accepted")
    if not text.isascii():
        raise _refusal(text, "only plain ASCII digits, letters and signs are accepted")
    return _parse(text)


# The same few sizes are asked for again and again.
@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> SliceRequest:
    words = text.split()
    if not words:
        raise _refusal(text, "it is empty")
    word, dots, limit = words[0].partition("..")
    size = SliceRequest(*_parse_size(word, text))
    if dots:
        size = _with_limit(size, limit, text)
    filters, length = _parse_length(words[1:], text)
    request = replace(size, filters=_parse_filters(filters, text), length=length)
    if (length is not None or dots) and len(str(request)) > MAX_TEXT:
        raise _refusal(text, f"written in full it has more than {MAX_TEXT} characters")
    return request


def _refusal(text: str, why: str = "") -> BadRequest:
    shown = ascii(text if len(text) <= 40 else text[:37] + "...")
    return BadRequest(f"{shown} is not a GPU slice{': ' + why if why else ''}.", ACCEPTED)


def _parse_size(word: str, text: str) -> tuple[int, int | None, int | None]:
    """Return (count, milli, memory_mib) of the first word."""
    match = _AMOUNT.fullmatch(word)
    if match is None or not (match["whole"] or match["part"]):
        if re.search(r"[0-9](?:[gm]b?|gi|mi)$", word, _FLAGS):
            raise _refusal(text, "memory is written in GiB or MiB")
        raise _refusal(text)
    unit = (match["unit"] or "").lower()
    count = int(match["count"] or 1)
    if not 1 <= count <= MAX_COUNT:
        raise _refusal(text, f"the number of GPUs is between 1 and {MAX_COUNT}")
    if unit in _MIB_PER_UNIT:
        return count, None, _mib(match["whole"], match["part"], unit, text)
    milli = _exact_milli(match["whole"], match["part"], unit, text)
    if unit == "%" or milli < WHOLE:
        if not 1 <= milli <= WHOLE:
            raise _refusal(text, "a share is between 0.1% and 100%")
        return count, milli, None
    return _whole_devices(match["count"], milli, text), WHOLE, None


def _with_limit(request: SliceRequest, word: str, text: str) -> SliceRequest:
    """Return the request with the limit that is written behind its guarantee."""
    if not word:
        raise _refusal(text, "behind .. its limit follows, as in 2%..10%")
    count, limit_milli, limit_mib = _parse_size(word, text)
    if (request.milli is None) != (limit_milli is None):
        raise _refusal(text, "write both as shares, 2%..10%, or both as memory, 1GiB..4GiB")
    if request.whole_devices:
        raise _refusal(text, "of a whole GPU there is no more to have: leave its limit away")
    if count > 1:
        raise _refusal(text, "its limit is at most a whole GPU; for several GPUs write, say, 2x2%..10%")
    if (limit_milli or limit_mib or 0) <= (request.milli or request.memory_mib or 0):
        raise _refusal(text, "its limit is to be above what it has for certain, as in 2%..10%")
    return replace(request, limit_milli=limit_milli, limit_mib=limit_mib)


def _whole_devices(count: str | None, milli: int, text: str) -> int:
    if milli % WHOLE:
        raise _refusal(text, "a share of one GPU is at most 1; for more write, say, 2x75%")
    if count is not None and milli != WHOLE:
        raise _refusal(text, "write either the number of whole GPUs or NxSHARE")
    total = int(count or 1) * (milli // WHOLE)
    if total > MAX_COUNT:
        raise _refusal(text, f"the number of GPUs is between 1 and {MAX_COUNT}")
    return total


def _exact_milli(whole: str, part: str | None, unit: str, text: str) -> int:
    """``whole.part`` of a GPU (or of a hundredth) in thousandths, or a refusal if finer."""
    digits = 1 if unit == "%" else 3
    part = (part or "").rstrip("0")
    if len(part) > digits:
        raise _refusal(text, "the smallest share is 0.1% (0.001)")
    padded: str = part.ljust(digits, "0")
    return int((whole or "0") + padded)


def _mib(whole: str, part: str | None, unit: str, text: str) -> int:
    """Memory in MiB; a fraction of a MiB is rounded up."""
    part = part or ""
    scale: int = 10 ** len(part)
    mib = -(-(int(whole or 0) * scale + int(part or 0)) * _MIB_PER_UNIT[unit] // scale)
    if not 1 <= mib <= MAX_MIB:
        raise _refusal(text, f"memory is between 1MiB and {MAX_MIB}MiB")
    return mib


def _parse_length(words: list[str], text: str) -> tuple[list[str], int | None]:
    """Return the words without ``for`` and its duration, and that in seconds, rounded up."""
    places = [place for place, word in enumerate(words) if word.lower() == "for"]
    if not places:
        return words, None
    first = places[0]
    if len(places) > 1:
        raise _refusal(text, "its length is given twice")
    if len(words) == first + 1:
        raise _refusal(text, "after for a duration follows, such as 20min, 2h or 1h30min")
    try:
        length = math.ceil(parse_duration(words[first + 1]))
    except BadRequest as error:
        raise _refusal(text, f"{error.message} {error.remedy}".rstrip(".")) from error
    if not length:
        raise _refusal(text, "its length is not longer than zero")
    return words[:first] + words[first + 2 :], length


def _parse_filters(words: list[str], text: str) -> Filters:
    found: dict[str, str] = {}
    for word in words:
        match = _FILTER.fullmatch(word)
        if match is None:
            raise _refusal(text, f"{word[:40]!a} is not a filter")
        name = match["name"].lower()
        if (match["op"] == ">=") != (name in ("memory", "driver")):
            raise _refusal(text, "write model=, memory>=, driver>= and index=")
        if name in found:
            raise _refusal(text, f"the filter {name} is given twice")
        found[name] = match["value"]
    return Filters(
        model=_checked(_MODEL, found.get("model"), text),
        memory_mib=_memory_filter(found.get("memory"), text),
        driver=_numbers(_checked(_DRIVER, found.get("driver"), text), "."),
        index=tuple(sorted(set(_numbers(_checked(_INDEXES, found.get("index"), text), ",") or ()))),
    )


def _checked(pattern: re.Pattern[str], value: str | None, text: str) -> str | None:
    if value is not None and not pattern.fullmatch(value):
        raise _refusal(text, f"the filter value {value[:40]!a} is not understood")
    return value


def _numbers(value: str | None, separator: str) -> tuple[int, ...] | None:
    return None if value is None else tuple(int(number) for number in value.split(separator))


def _memory_filter(value: str | None, text: str) -> int | None:
    if value is None:
        return None
    match = _MEMORY.fullmatch(value)
    if match is None:
        raise _refusal(text, f"the filter value {value[:40]!a} is not an amount of memory")
    return _mib(match["whole"], match["part"], match["unit"].lower(), text)
