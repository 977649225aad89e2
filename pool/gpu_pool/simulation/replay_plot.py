"""A picture of ways to give slices: what each holds, and how long cells wait. SVG, without a library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from gpu_pool.simulation.plot import COLOURS, text
from gpu_pool.simulation.replay import ReplayResult
from gpu_pool.simulation.replay_report import ReplayFigures

_LEFT, _WIDTH, _ROW, _TOP = 150, 560, 22, 60
_HEIGHT: Final = 220
#: Delays are drawn to a logarithmic scale, from a second to a day.
_TICKS: Final = ((1, "1 s"), (10, "10 s"), (60, "1 min"), (600, "10 min"), (3_600, "1 h"), (86_400, "1 day"))


def replay_plot(title: str, by_way: Mapping[str, tuple[ReplayResult, ReplayFigures]]) -> str:
    """Draw GPU-hours held by each way, and the part of its cells that began within a time; as SVG."""
    figures = {name: each for name, (_, each) in by_way.items()}
    middle = _TOP + len(by_way) * _ROW + 60
    height = middle + _HEIGHT + 40
    parts = [text(10, 22, title, 15), *_hours(figures), *_axes(middle)]
    for place, (result, _) in enumerate(by_way.values()):
        parts.append(_line(sorted(result.delays), middle, place))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 80}" height="{height}" '
        'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
        + "\n".join(parts)
        + "</svg>\n"
    )


def _hours(figures: Mapping[str, ReplayFigures]) -> list[str]:
    parts = [text(10, _TOP - 14, "GPU-hours held; dark: while cells ran", 13)]
    most = max((each.gpu_hours.held for each in figures.values()), default=0.0) or 1.0
    for place, (name, each) in enumerate(figures.items()):
        top, colour = _TOP + place * _ROW, COLOURS[place % len(COLOURS)]
        held, used = (_WIDTH * hours / most for hours in (each.gpu_hours.held, each.gpu_hours.used))
        parts += [
            text(10, top + 12, name, 13),
            f'<rect x="{_LEFT}" y="{top}" width="{held:.1f}" height="16" fill="{colour}" opacity="0.45"/>',
            f'<rect x="{_LEFT}" y="{top}" width="{min(used, held):.1f}" height="16" fill="{colour}"/>',
            text(_LEFT + held + 4, top + 12, f"{each.gpu_hours.held:,.0f}", 11),
        ]
    return parts


def _axes(top: float) -> list[str]:
    parts = [text(10, top - 14, "Cells that began within this time after they were submitted", 13)]
    for part in (0.5, 0.75, 1.0):
        y = top + _HEIGHT * (1 - part)
        parts += [
            f'<path d="M{_LEFT} {y:.1f}H{_LEFT + _WIDTH}" stroke="#ccc"/>',
            text(100, y + 4, f"{part:.0%}", 11),
        ]
    for seconds, label in _TICKS:
        x = _across(seconds)
        parts += [
            f'<path d="M{x:.1f} {top}V{top + _HEIGHT}" stroke="#ccc"/>',
            text(x - 12, top + _HEIGHT + 16, label, 11),
        ]
    return parts


def _line(delays: Sequence[float], top: float, place: int) -> str:
    """Draw the part of the cells that had begun by each time, as a line of a hundred steps."""
    points = []
    for step in range(101):
        seconds = 86_400.0 ** (step / 100)
        part = sum(delay <= seconds for delay in delays) / max(1, len(delays))
        points.append(f"{_across(seconds):.1f},{top + _HEIGHT * (1 - part):.1f}")
    colour = COLOURS[place % len(COLOURS)]
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _across(seconds: float) -> float:
    return _LEFT + _WIDTH * math.log(max(1.0, seconds)) / math.log(86_400.0)
