"""Pictures of waits, and of ways to give slices: SVG files, written without any plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

from gpu_pool.simulation.replay import ReplayResult
from gpu_pool.simulation.report import ReplayFigures, RunFigures

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


_WAYS_LEFT, _WAYS_WIDTH, _WAYS_ROW, _WAYS_TOP = 150, 560, 22, 60
_DELAYS_HEIGHT: Final = 220
#: Delays are drawn to a logarithmic scale, from a second to a day.
_TICKS: Final = ((1, "1 s"), (10, "10 s"), (60, "1 min"), (600, "10 min"), (3_600, "1 h"), (86_400, "1 day"))


def replay_plot(title: str, by_way: Mapping[str, tuple[ReplayResult, ReplayFigures]]) -> str:
    """Draw GPU-hours held by each way, and the part of its cells that began within a time; as SVG."""
    figures = {name: each for name, (_, each) in by_way.items()}
    middle = _WAYS_TOP + len(by_way) * _WAYS_ROW + 60
    height = middle + _DELAYS_HEIGHT + 40
    parts = [text(10, 22, title, 15), *_hours(figures), *_axes(middle)]
    for place, (result, _) in enumerate(by_way.values()):
        parts.append(_line(sorted(result.delays), middle, place))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WAYS_LEFT + _WAYS_WIDTH + 80}" height="{height}" '
        'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
        + "\n".join(parts)
        + "</svg>\n"
    )


def _hours(figures: Mapping[str, ReplayFigures]) -> list[str]:
    parts = [text(10, _WAYS_TOP - 14, "GPU-hours held; dark: while cells ran", 13)]
    most = max((each.gpu_hours.held for each in figures.values()), default=0.0) or 1.0
    for place, (name, each) in enumerate(figures.items()):
        top, colour = _WAYS_TOP + place * _WAYS_ROW, COLOURS[place % len(COLOURS)]
        held, used = (_WAYS_WIDTH * hours / most for hours in (each.gpu_hours.held, each.gpu_hours.used))
        parts += [
            text(10, top + 12, name, 13),
            _hours_bar(top, held, f'fill="{colour}" opacity="0.45"'),
            _hours_bar(top, min(used, held), f'fill="{colour}"'),
            text(_WAYS_LEFT + held + 4, top + 12, f"{each.gpu_hours.held:,.0f}", 11),
        ]
    return parts


def _hours_bar(top: float, width: float, look: str) -> str:
    return f'<rect x="{_WAYS_LEFT}" y="{top}" width="{width:.1f}" height="16" {look}/>'


def _axes(top: float) -> list[str]:
    parts = [text(10, top - 14, "Cells that began within this time after they were submitted", 13)]
    for part in (0.5, 0.75, 1.0):
        y = top + _DELAYS_HEIGHT * (1 - part)
        parts += [
            f'<path d="M{_WAYS_LEFT} {y:.1f}H{_WAYS_LEFT + _WAYS_WIDTH}" stroke="#ccc"/>',
            text(100, y + 4, f"{part:.0%}", 11),
        ]
    for seconds, label in _TICKS:
        x = _across(seconds)
        parts += [
            f'<path d="M{x:.1f} {top}V{top + _DELAYS_HEIGHT}" stroke="#ccc"/>',
            text(x - 12, top + _DELAYS_HEIGHT + 16, label, 11),
        ]
    return parts


def _line(delays: Sequence[float], top: float, place: int) -> str:
    """Draw the part of the cells that had begun by each time, as a line of a hundred steps."""
    points = []
    for step in range(101):
        seconds = 86_400.0 ** (step / 100)
        part = sum(delay <= seconds for delay in delays) / max(1, len(delays))
        points.append(f"{_across(seconds):.1f},{top + _DELAYS_HEIGHT * (1 - part):.1f}")
    colour = COLOURS[place % len(COLOURS)]
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _across(seconds: float) -> float:
    return _WAYS_LEFT + _WAYS_WIDTH * math.log(max(1.0, seconds)) / math.log(86_400.0)
