"""A picture of GPUs in use over a period: what ``gpu-pool report --plot`` writes. SVG, without a library."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

from gpu_pool.policy.usage_report import PeriodParts, UseOverTime, round_up
from gpu_pool.simulation.plot import COLOURS, text

#: Bars of the plot.
BARS: Final = 96
_LEFT, _TOP, _WIDTH, _HEIGHT = 60, 50, 768, 240
_BAR: Final = _WIDTH / BARS
#: The height of what is below where slices could use memory on top of what they were granted, and its bars.
_BELOW, _BURST_TOP, _BURST_HEIGHT = 150, 70, 60
_BURST_COLOUR: Final = "#666"
_MIB_OF_GIB: Final = 1024
#: Groups with a colour of their own, those that held most; the rest is drawn together.
_MOST_GROUPS: Final = len(COLOURS) - 1
_OTHERS: Final = "others"
_LENT: Final = "lent: given back by idle kernels"
_BUSY: Final = "while cells ran, as far as it is known of what has ended"
_LENT_FILL: Final = (
    '<defs><pattern id="lent" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path d="M0 6L6 0" stroke="#888"/></pattern></defs>'
)


def use_plot(title: str, use: UseOverTime, period: PeriodParts) -> str:
    """Draw what was held by each group, above it what was lent, and a line for cells that ran; as SVG.

    Below that, where there was any, the memory that slices could use on top of what they were granted.
    """
    groups = _largest(use)
    totals = use.held_by_all
    top = round_up(max(map(sum, zip(totals, use.lent, strict=True))) / period.seconds)
    scale = _HEIGHT / (top * period.seconds)
    legend = list(_legend(groups, is_lent=any(use.lent), is_busy=any(use.busy)))
    burst = list(_burst(use.burst, period))
    below = _BELOW if burst else 0
    height = _TOP + _HEIGHT + below + 50 + 20 * len(legend)
    parts = [
        _LENT_FILL,
        text(10, 24, title, 15),
        *_scale(top, "GPUs", _TOP, _HEIGHT),
        *_bars(groups, use, scale),
        *_line(use.busy, scale),
        *_times(period),
        *burst,
        f'<g transform="translate(0 {below})">',
        *(line for lines in legend for line in lines),
        "</g>",
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 30}" height="{height}" '
        'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
        + "\n".join(parts)
        + "</svg>\n"
    )


def _largest(use: UseOverTime) -> dict[str, Sequence[float]]:
    """Return the groups that held most, the largest first, and what all others held together."""
    ordered = sorted(use.held, key=lambda key: (-sum(use.held[key]), key))
    found: dict[str, Sequence[float]] = {key or "-": use.held[key] for key in ordered[:_MOST_GROUPS]}
    rest = [use.held[key] for key in ordered[_MOST_GROUPS:]]
    if rest:
        found[_OTHERS] = [sum(part) for part in zip(*rest, strict=True)]
    return found


def _bars(groups: dict[str, Sequence[float]], use: UseOverTime, scale: float) -> Iterator[str]:
    for part in range(BARS):
        y = float(_TOP + _HEIGHT)
        pieces = [(held[part], COLOURS[place]) for place, held in enumerate(groups.values())]
        for seconds, fill in (*pieces, (use.lent[part], "url(#lent)")):
            y -= seconds * scale
            if seconds > 0:
                yield (
                    f'<rect x="{_LEFT + part * _BAR:.1f}" y="{y:.1f}" width="{_BAR:.1f}" '
                    f'height="{seconds * scale:.1f}" fill="{fill}"/>'
                )


def _line(busy: Sequence[float], scale: float) -> Iterator[str]:
    """Draw the line of cells that ran, with a light edge so that it is seen on every colour."""
    if any(busy):
        steps = [
            f"H{_LEFT + part * _BAR:.1f}V{_TOP + _HEIGHT - each * scale:.1f}"
            for part, each in enumerate(busy)
        ]
        path = f"M{_LEFT} {_TOP + _HEIGHT}{''.join(steps)}H{_LEFT + _WIDTH}"
        for colour, width in (("white", 5), ("black", 2)):
            yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _burst(burst: Sequence[float], period: PeriodParts) -> Iterator[str]:
    """Draw, below the plot, the memory on top of what was granted; nothing where there was none."""
    if not any(burst):
        return
    gib = [each / (period.seconds * _MIB_OF_GIB) for each in burst]
    top, first = round_up(max(gib)), _TOP + _HEIGHT + _BURST_TOP
    yield from _scale(top, "GiB that could be used on top of what was granted", first, _BURST_HEIGHT)
    for part, each in enumerate(gib):
        height = each / top * _BURST_HEIGHT
        if height > 0:
            yield (
                f'<rect x="{_LEFT + part * _BAR:.1f}" y="{first + _BURST_HEIGHT - height:.1f}" '
                f'width="{_BAR:.1f}" height="{height:.1f}" fill="{_BURST_COLOUR}"/>'
            )


def _scale(top: float, unit: str, first: int, height: int) -> Iterator[str]:
    for part in (0.0, 0.5, 1.0):
        y = first + height * (1 - part)
        yield f'<path d="M{_LEFT} {y}H{_LEFT + _WIDTH}" stroke="#ccc"/>'
        yield text(10, y + 4, f"{top * part:g}", 12)
    yield text(10, first - 10, unit, 12)


def _times(period: PeriodParts) -> Iterator[str]:
    """Write when the period begins, and each sixth of it, by this machine's clock."""
    length = period.seconds * period.parts
    for sixth in range(7):
        at = period.began + length * sixth / 6
        clock = time.strftime("%d %b %H:%M", time.localtime(at))
        x = _LEFT + _WIDTH * sixth / 6
        yield f'<path d="M{x:.1f} {_TOP + _HEIGHT}v5" stroke="#888"/>'
        yield text(x - 30, _TOP + _HEIGHT + 20, clock, 11)


def _legend(groups: dict[str, Sequence[float]], *, is_lent: bool, is_busy: bool) -> Iterator[tuple[str, str]]:
    named = [*zip(groups, COLOURS, strict=False)]
    if is_lent:
        named.append((_LENT, "url(#lent)"))
    if is_busy:
        named.append((_BUSY, "black"))
    for place, (name, fill) in enumerate(named):
        y = _TOP + _HEIGHT + 40 + 20 * place
        thick = 3 if fill == "black" else 12
        yield (
            f'<rect x="{_LEFT}" y="{y + (12 - thick) / 2}" width="12" height="{thick}" fill="{fill}"/>',
            text(_LEFT + 20, y + 11, name, 13),
        )
