"""Kinds of settings in Jupyter's configuration that traitlets does not have."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from traitlets import Enum, Float, Integer, TraitError

from gpu_pool_client._durations import LONGEST, parse_duration
from gpu_pool_client._errors import BadRequest


class WholeNumber(Integer[int, int]):
    """A whole number between two bounds; never a boolean."""

    def validate(self, obj: Any, value: Any) -> int:  # noqa: ARG002 - traitlets gives it
        """Return ``value``. Raises ``TraitError``. Called at every assignment."""
        if isinstance(value, int) and not isinstance(value, bool) and self.min <= value <= self.max:
            return value
        raise TraitError(f"{self.name} is {_shown(value)}; it must be a whole number {_range(self)}.")


class Number(Float[float, float]):
    """A number between two bounds; never a boolean or NaN."""

    def validate(self, obj: Any, value: Any) -> float:  # noqa: ARG002 - traitlets gives it
        """Return ``value``. Raises ``TraitError``. Called at every assignment."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and self.min <= value <= self.max:  # which NaN is not
            return float(value)
        raise TraitError(f"{self.name} is {_shown(value)}; it must be a number {_range(self)}.")


class Switch(Enum[str]):
    """``auto``, ``on`` or ``off``, by default ``auto``; ``True`` is on, and ``False`` is off."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(("auto", "on", "off"), "auto", **settings)

    def validate(self, obj: Any, value: Any) -> str:
        """Return one of the three words. Raises ``TraitError``. Called at every assignment."""
        if isinstance(value, bool):
            value = "on" if value else "off"
        return super().validate(obj, value)


def _shown(value: object) -> str:
    """Repeat a value; of a whole number that is too long to be written, only that."""
    try:
        return f"{value!r:.20}"
    except ValueError:
        return "a number of thousands of digits"


def _range(trait: Integer[int, int] | Float[float, float]) -> str:
    return f"from {trait.min} to {trait.max}"


class Seconds(Float[float, float]):
    """Seconds between two bounds, written as a number or as a duration such as ``15min``; never NaN.

    Parameters
    ----------
    default:
        The value where nothing is set, in seconds.
    where:
        A sentence that says where the setting is set. It ends the refusal.
    settings:
        ``min`` and ``max`` in seconds, and whatever else a trait takes.
    """

    def __init__(self, default: float, *, where: str = "", **settings: Any) -> None:
        super().__init__(default, **{"min": 0.0, "max": LONGEST, **settings})
        self._where = where

    def validate(self, obj: Any, value: Any) -> float:  # noqa: ARG002 - traitlets gives it
        """Return ``value`` in seconds. Raises ``TraitError``. Called at every assignment."""
        seconds: float = float("nan")
        if isinstance(value, str):
            with suppress(BadRequest):
                seconds = parse_duration(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            seconds = value
        if self.min <= seconds <= self.max:  # which NaN is not
            return float(seconds)
        most = f"to {self.max}" if self.max < LONGEST else "on, at most ten years"
        # JupyterLab's dialog, where a kernelspec's wrong value is told, does not wrap lines.
        raise TraitError(
            f"{self.name} is {_shown(value)}; it must be a number of seconds from {self.min} {most},\n"
            f"or a duration such as 90s, 15min or 2h. {self._where}".rstrip()
        )

    def from_string(self, s: str) -> Any:
        """Leave a value from the command line as it is written, for :meth:`validate`."""
        return s
