"""The kinds of values in a course file: each reads what a person wrote, and describes itself to an editor.

Every reader raises ``BadRequest``: what was given and why that is wrong, then what is accepted. Those
of values that the administrator's settings have, too, are ``gpu_pool.policy.course_values``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date
from typing import Annotated, Any, Final, TypeAlias, TypeVar
from zoneinfo import ZoneInfo, available_timezones

from pydantic import PlainValidator, WithJsonSchema

from gpu_pool.courses.hours import WeeklyHours, parse_hours
from gpu_pool.policy.course_values import (
    LEAST_PRIORITY,
    MOST,
    MOST_PRIORITY,
    NEVER,
    given,
    nearest,
    read_duration,
    read_memory,
    read_number,
    read_priority,
    read_request,
    read_share,
    read_text,
    read_when_idle,
    read_whole_number,
    read_yes_or_no,
    read_yield_after,
)
from gpu_pool_client import BadRequest, SliceRequest, WhenIdle

T = TypeVar("T")

_DATE: Final = re.compile(r"2[01][0-9]{2}-[0-9]{2}-[0-9]{2}", re.ASCII)
_ZONE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9_+-]+){0,2}", re.ASCII)
#: As container registries accept them: host, path, tag, digest.
_IMAGE: Final = re.compile(
    r"[a-z0-9](?:[a-z0-9._:/-]{0,198}[a-z0-9])?(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
#: As an import statement has it.
_LONGEST_MODULE: Final = 100
_LONGEST_TEXT: Final = 200
#: CPU cores of one server or kernel.
MOST_CORES: Final = 10_000
#: A duration with its units, as editors check it.
_TIME_PATTERN: Final = r"^ *([0-9]{1,7}(\.[0-9]{1,3})? *(d|h|min|m|s) *)+$"
_OR_NEVER: Final = rf"{_TIME_PATTERN}|^ *[nN][eE][vV][eE][rR] *$"
#: Written in place of a home's size where nothing outlives its pod.
NO_HOME: Final = "none"
#: Where kernels run on Kubernetes: each in a pod of its own, or all in that of their server.
KERNELS: Final = ("pods", "server")


def read_line(value: object) -> str:
    """Read one line of text."""
    text = read_text(value)
    if not text.strip() or len(text) > _LONGEST_TEXT or not text.isprintable():
        raise BadRequest(
            f"{given(text)} is not one line of text.",
            f"Accepted: 1 to {_LONGEST_TEXT} characters on one line.",
        )
    return text.strip()


def read_home(value: object) -> int:
    """Read the size of a home folder; return MiB, 0 for ``none``."""
    return 0 if isinstance(value, str) and value.strip().lower() == NO_HOME else read_memory(value)


def read_cores(value: object) -> float:
    """Read a number of CPU cores."""
    number = read_number(value)
    if not 0.001 <= number <= MOST_CORES:
        raise BadRequest(
            f"{given(value)} is not a valid number of CPU cores.",
            f"Accepted: a number of cores up to {MOST_CORES}, such as 2 or 0.5.",
        )
    return number


def read_time(value: object) -> float:
    """Read a duration; return seconds."""
    return _with_unit(read_duration, value)


def read_time_or_never(value: object) -> float | None:
    """Read after how long idle kernels give way; return seconds, None for ``never``."""
    return _with_unit(read_yield_after, value)


def _with_unit(read: Callable[[object], T], value: object) -> T:
    try:
        return read(value)
    except BadRequest as error:
        # A plain number is read as seconds, which is told of where it is; see ``times``.
        raise BadRequest(error.message, error.remedy.replace(", or a number of seconds", "")) from None


def read_date(value: object) -> date:
    """Read a date."""
    text = read_text(value)
    try:
        if _DATE.fullmatch(text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise BadRequest(f"{given(text)} is not a date.", "Accepted: year-month-day, such as 2026-10-12.")


def read_hours(value: object) -> WeeklyHours:
    """Read hours of the week."""
    return parse_hours(read_text(value))


def read_zone(value: object) -> str:
    """Read the name of a time zone that this machine knows."""
    text = read_text(value)
    try:
        if _ZONE.fullmatch(text):
            return ZoneInfo(text).key
    except (ValueError, OSError, LookupError):
        pass
    similar = nearest(text, (*available_timezones(), ""))
    raise BadRequest(
        f"{given(text)} is not a time zone known to this machine.",
        f"Accepted: an IANA name, such as Europe/Berlin, America/New_York or UTC. {similar}".strip(),
    )


def read_kernels(value: object) -> str:
    """Read where the kernels of a server on Kubernetes run."""
    text = read_text(value)
    if text not in KERNELS:
        raise BadRequest(f"{given(text)} is not known.", f"Accepted: {', '.join(KERNELS)}.")
    return text


def read_image(value: object) -> str:
    """Read the name of a container image."""
    text = read_text(value)
    if not _IMAGE.fullmatch(text) or "//" in text:
        raise BadRequest(
            f"{given(text)} is not the name of an image.",
            "Accepted: a name such as quay.io/jupyter/scipy-notebook:2026-09-01.",
        )
    return text


def read_module(value: object) -> str:
    """Read the name of a Python module."""
    text = read_text(value)
    if len(text) > _LONGEST_MODULE or not all(part.isidentifier() for part in text.split(".")):
        raise BadRequest(
            f"{given(text)} is not the name of a Python module.",
            "Accepted: a name as import has it, such as numpy or matplotlib.pyplot.",
        )
    return text


def _schema(*types: str, **more: Any) -> WithJsonSchema:
    return WithJsonSchema({"type": types[0] if len(types) == 1 else list(types), **more})


# Whatever is written as a number in YAML is one to an editor, so texts may be numbers, too.
Line: TypeAlias = Annotated[str, PlainValidator(read_line), _schema("string", "number")]
Flag: TypeAlias = Annotated[bool, PlainValidator(read_yes_or_no), _schema("boolean")]
Count: TypeAlias = Annotated[
    int, PlainValidator(read_whole_number), _schema("integer", minimum=0, maximum=MOST)
]
Priority: TypeAlias = Annotated[
    int, PlainValidator(read_priority), _schema("integer", minimum=LEAST_PRIORITY, maximum=MOST_PRIORITY)
]
Number: TypeAlias = Annotated[float, PlainValidator(read_number), _schema("number", minimum=0, maximum=MOST)]
Cores: TypeAlias = Annotated[
    float, PlainValidator(read_cores), _schema("number", exclusiveMinimum=0, maximum=MOST_CORES)
]
Seconds: TypeAlias = Annotated[
    float,
    PlainValidator(read_time),
    _schema("string", pattern=_TIME_PATTERN, examples=["90s", "15min", "2h", "1h30min", "3d"]),
]
YieldAfter: TypeAlias = Annotated[
    float | None,
    PlainValidator(read_time_or_never),
    _schema("string", pattern=_OR_NEVER, examples=["60s", "5min", NEVER]),
]
Request: TypeAlias = Annotated[
    SliceRequest,
    PlainValidator(read_request),
    _schema("string", "number", examples=["2%", "1.5GiB", "1", "2x50%", "2%..10%", "10% model=V100"]),
]
Share: TypeAlias = Annotated[
    int, PlainValidator(read_share), _schema("string", "number", examples=["50%", "4"])
]
Memory: TypeAlias = Annotated[int, PlainValidator(read_memory), _schema("string", examples=["16GiB"])]
Home: TypeAlias = Annotated[int, PlainValidator(read_home), _schema("string", examples=["10GiB", NO_HOME])]
Day: TypeAlias = Annotated[date, PlainValidator(read_date), _schema("string", examples=["2026-10-12"])]
Hours: TypeAlias = Annotated[
    WeeklyHours,
    PlainValidator(read_hours),
    _schema("string", examples=["Mon 10:00-12:00", "Mon-Fri 08:00-18:00"]),
]
Zone: TypeAlias = Annotated[
    str, PlainValidator(read_zone), _schema("string", examples=["Europe/Berlin", "America/New_York", "UTC"])
]
Idle: TypeAlias = Annotated[
    WhenIdle, PlainValidator(read_when_idle), _schema("string", enum=[each.value for each in WhenIdle])
]
Kernels: TypeAlias = Annotated[str, PlainValidator(read_kernels), _schema("string", enum=list(KERNELS))]
Image: TypeAlias = Annotated[
    str, PlainValidator(read_image), _schema("string", examples=["quay.io/jupyter/scipy-notebook:latest"])
]
Module: TypeAlias = Annotated[
    str, PlainValidator(read_module), _schema("string", examples=["numpy", "matplotlib.pyplot"])
]
