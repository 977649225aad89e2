"""Times on the command line, read as everywhere else: ``90s``, ``15min``, ``2h``, or a number."""

from __future__ import annotations

from typing import Any

import click

from gpu_pool_client import BadRequest, parse_duration

#: The longest that may be given: a year, which is longer than any machine is up.
_LONGEST = 365 * 86_400


class Duration(click.ParamType):  # type: ignore[type-arg]  # older versions of Click take none
    """A duration, which the command gets in seconds. What is no time at all is refused in words.

    ``unit`` is what a plain number counts, in seconds.
    """

    name = "duration"

    def __init__(self, unit: float = 1.0) -> None:
        self._unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds that ``value`` means. Called by Click."""
        if not isinstance(value, str):  # a default, in seconds
            return float(value)
        try:
            seconds = parse_duration(value)
        except BadRequest as error:
            remedy = error.remedy if self._unit == 1 else error.remedy.replace("seconds", "minutes")
            self.fail(f"{error.message} {remedy}", param, ctx)
        if value.strip()[-1:].isdigit():
            seconds *= self._unit
        if seconds > _LONGEST:
            self.fail(f"{value[:40]!a} is more than a year. Accepted: up to 365d.", param, ctx)
        return seconds
