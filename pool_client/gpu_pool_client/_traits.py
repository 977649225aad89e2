"""Kinds of settings in Jupyter's configuration that traitlets does not have."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from traitlets import Float, TraitError

from gpu_pool_client._durations import parse_duration
from gpu_pool_client._errors import BadRequest


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
        super().__init__(default, **settings)
        self._where = where

    def validate(self, obj: Any, value: Any) -> float:  # noqa: ARG002 - traitlets gives it
        """Return ``value`` in seconds. Raises ``TraitError``. Called at every assignment."""
        seconds = float("nan")
        if isinstance(value, str):
            with suppress(BadRequest):
                seconds = parse_duration(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            seconds = float(value)
        if self.min <= seconds <= self.max:  # which NaN is not
            return seconds
        most = f"to {self.max}" if self.max < float("inf") else "on"
        # JupyterLab's dialog, where a kernelspec's wrong value is told, does not wrap lines.
        raise TraitError(
            f"{self.name} is {value!r:.20}; it must be a number of seconds from {self.min} {most},\n"
            f"or a duration such as 90s, 15min or 2h. {self._where}".rstrip()
        )

    def from_string(self, s: str) -> Any:
        """Leave a value from the command line as it is written, for :meth:`validate`."""
        return s
