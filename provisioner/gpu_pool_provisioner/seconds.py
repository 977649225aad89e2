"""A setting that is a number of seconds."""

from __future__ import annotations

from typing import Any

from traitlets import Float, TraitError


class Seconds(Float[float, float]):
    """A float between two bounds, which only a number between them is: not NaN, and no text.

    A kernelspec's wrong value fails the kernel's start, so the refusal is
    written for JupyterLab's dialog, which does not wrap lines.
    """

    def validate(self, obj: Any, value: Any) -> float:  # noqa: ARG002 - traitlets gives it
        """Return ``value`` as a float. Raises ``TraitError``. Called at every assignment."""
        if isinstance(value, (int, float)) and self.min <= value <= self.max:
            return float(value)
        raise TraitError(
            f"{self.name} is {value!r:.20}; it must be a number of seconds from {self.min} to {self.max}.\n"
            "It is set in the kernel's kernel.json or the server's configuration."
        )
