"""A picture of waits: an SVG file, written without any plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final
from xml.sax.saxutils import escape

from gpu_pool.simulation.report import RunFigures

#: One colour for each order or way; safe for the colour-blind (Okabe and Ito).
COLOURS: Final = ("#0072b2", "#d55e00", "#cc79a7", "#009e73", "#e69f00", "#56b4e9")
_LEFT, _WIDTH, _BAR, _GAP, _TOP = 90, 560, 12, 14, 70
#: Waits are drawn to a logarithmic scale from one minute.
_MINUTE: Final = 60.0


def waits_plot(title: str, by_order: Mapping[str, RunFigures]) -> str:
    """Draw the 95th percentile of the waits by size, a bar for each order, as the text of an SVG file."""
    sizes = list(next(iter(by_order.values())).by_size)
    longest = max(waits.p95 for each in by_order.values() for waits in each.by_size.values())
    decades = max(1, math.ceil(math.log10(max(longest / _MINUTE, 10.0))))
    group = len(by_order) * _BAR + _GAP
    height = _TOP + len(sizes) * group + 30
    parts = [text(10, 22, title, 15), *_legend(list(by_order)), *_scale(decades, height - 24)]
    for row, size in enumerate(sizes):
        top = _TOP + row * group
        parts.append(text(10, top + group / 2, size, 13))
        for place, each in enumerate(by_order.values()):
            parts.append(_bar(top + place * _BAR, each.by_size[size].p95, decades, place))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 80}" height="{height}" '
        'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
        + "\n".join(parts)
        + "</svg>\n"
    )


def _legend(orders: list[str]) -> list[str]:
    parts = []
    for place, name in enumerate(orders):
        left = _LEFT + place * 140
        parts.append(
            f'<rect x="{left}" y="38" width="12" height="12" fill="{COLOURS[place % len(COLOURS)]}"/>'
        )
        parts.append(text(left + 18, 49, name, 13))
    return parts


def _scale(decades: int, bottom: int) -> list[str]:
    parts = []
    for decade in range(decades + 1):
        left = _LEFT + _WIDTH * decade / decades
        parts.append(f'<path d="M{left:.1f} {_TOP - 6}V{bottom}" stroke="#ccc"/>')
        parts.append(text(left - 10, bottom + 16, f"{10**decade} min", 11))
    return parts


def _bar(top: float, wait: float, decades: int, place: int) -> str:
    width = _WIDTH * max(0.0, math.log10(max(wait / _MINUTE, 1.0))) / decades
    label = text(_LEFT + width + 4, top + 10, f"{wait / _MINUTE:.0f}", 10)
    return (
        f'<rect x="{_LEFT}" y="{top}" width="{max(width, 1):.1f}" height="{_BAR - 2}" '
        f'fill="{COLOURS[place % len(COLOURS)]}"/>{label}'
    )


def text(left: float, top: float, words: str, size: int) -> str:
    """Return words at a place of the picture."""
    return f'<text x="{left:.1f}" y="{top:.1f}" font-size="{size}">{escape(words)}</text>'
