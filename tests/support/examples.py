"""How many examples a law is tried with."""

from __future__ import annotations

from hypothesis import settings

#: What Hypothesis tries where nothing else is said.
_USUAL = 100


def examples(number: int) -> int:
    """Return ``number``, or what part of it there is time for: a fifth in ``make test``."""
    return max(2, number * settings.default.max_examples // _USUAL)
