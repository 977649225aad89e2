"""The documentation's plots, drawn from the rows that ``--json`` writes; no display is needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Row = Mapping[str, Any]
#: Safe for the colour-blind (Okabe and Ito): ours, and what it is set against.
OURS, OTHERS = "#0072b2", "#b0b0b0"
#: Of several that are ours.
SEVERAL = (OURS, "#e69f00", "#009e73")
#: When the memory of kernels is measured that go to disk.
STAGES = ("before", "awake", "asleep", "awake again")
#: Figures that are further apart than this are drawn logarithmically.
_WIDE = 5


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Write the plots for which there are rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in PLOTS.items():
        wanted = [row for row in rows if row["name"] in plot.of]
        if wanted:
            figure = plot.draw(wanted)
            figure.savefig(folder / f"bench-{name}.png", dpi=110, bbox_inches="tight")
            plt.close(figure)


def growth(rows: Sequence[Row]) -> Any:
    """Draw each curve: our figure by the number of leases."""
    return _curves(rows, "leases held")


def decisions(rows: Sequence[Row]) -> Any:
    """Draw each curve: our figure by the number of those who wait."""
    return _curves(rows, "leases waiting")


def _curves(rows: Sequence[Row], sizes: str) -> Any:
    curves = [row for row in rows if row["points"]]
    figure, axes = plt.subplots(1, len(curves), figsize=(3.4 * len(curves), 3.0), squeeze=False)
    for row, each in zip(curves, axes[0], strict=True):
        each.plot(*zip(*row["points"], strict=True), "o-", color=OURS)
        each.set(xscale="log", xlabel=sizes, ylabel=row["unit"])
        figures = [figure for _, figure in row["points"]]
        if max(figures) < _WIDE * min(figures):
            each.set_ylim(bottom=0)
        else:
            each.set_yscale("log")
        each.set_title(row["what"].partition(" at ")[0].partition(" of ")[0].partition(",")[0], fontsize=10)
        each.grid(alpha=0.3)
    figure.tight_layout()
    return figure


def scale(rows: Sequence[Row]) -> Any:
    """Draw each curve: our figure by the number of kernels."""
    curves = [row for row in rows if row["points"]]
    figure, axes = plt.subplots(1, len(curves), figsize=(3.6 * len(curves), 3.0), squeeze=False)
    for row, each in zip(curves, axes[0], strict=True):
        each.plot(*zip(*row["points"], strict=True), color=OURS)
        each.set(xlabel="kernels", ylabel=row["unit"], ylim=(0, None))
        each.set_title(row["what"].partition(" (")[0].partition(" with ")[0], fontsize=10)
        each.grid(alpha=0.3)
    figure.tight_layout()
    return figure


def sleeping(rows: Sequence[Row]) -> Any:
    """Draw the memory of kernels and their server, and what the host has less of, at each stage."""
    curves = [row for row in rows if row["points"]]
    figure, axes = plt.subplots(figsize=(7.5, 3.4))
    width = 0.8 / len(curves)
    for number, (row, colour) in enumerate(zip(curves, SEVERAL, strict=False)):
        places = [stage + (number - (len(curves) - 1) / 2) * width for stage, _ in row["points"]]
        values = [value for _, value in row["points"]]
        drawn = axes.bar(places, values, width, color=colour, label=row["what"].partition(":")[0])
        axes.bar_label(drawn, fmt="{:,.0f}", padding=2, fontsize=8)
    axes.set_xticks(range(len(STAGES)), STAGES)
    axes.set_ylabel(curves[0]["unit"])
    axes.margins(y=0.12)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False)
    return figure


def rates(rows: Sequence[Row]) -> Any:
    """Draw grants per second, ours beside each yardstick."""
    return _pairs([row for row in rows if row["unit"].endswith("/s")], "a second (logarithmic)", log=True)


def waits(rows: Sequence[Row]) -> Any:
    """Draw simulated waits, ours beside each baseline."""
    return _pairs(list(rows), "minutes (logarithmic)", log=True)


def ratios(rows: Sequence[Row]) -> Any:
    """Draw what kernels and their relays cost, as ratios to going without the pool."""
    shown = [row for row in rows if row["yardstick"] is not None]
    figure, axes = plt.subplots(figsize=(7.5, 0.5 * len(shown) + 0.8))
    _bars(axes, [row["what"] for row in shown], [row["ratio"] for row in shown], OURS, 0.6)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("ratio; 1 is as without the pool")
    return figure


def _pairs(rows: Sequence[Row], unit: str, *, log: bool) -> Any:
    figure, axes = plt.subplots(figsize=(7.5, 0.55 * len(rows) + 1.0))
    names = [row["what"] for row in rows]
    _bars(axes, names, [row["ours"] for row in rows], OURS, 0.38, -0.2, "ours")
    _bars(axes, names, [row["yardstick"] for row in rows], OTHERS, 0.38, 0.2, "the other")
    axes.set_xlabel(unit)
    if log:
        axes.set_xscale("symlog" if any(not row["ours"] for row in rows) else "log")
    axes.legend(loc="lower right")
    return figure


def _bars(
    axes: Axes,
    names: Sequence[str],
    values: Sequence[float],
    colour: str,
    height: float,
    shift: float = 0.0,
    label: str | None = None,
) -> None:
    places = [number + shift for number in range(len(names))]
    drawn = axes.barh(places, values, height, color=colour, label=label)
    axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.margins(x=0.12)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()


class Plot:
    """A plot, and the benchmarks whose rows it shows."""

    def __init__(self, draw: Callable[[Sequence[Row]], Any], *of: str) -> None:
        self.draw, self.of = draw, of


#: By the name of the file.
PLOTS = {
    "kernels": Plot(ratios, "kernels", "room", "pods"),
    "grants": Plot(rates, "stores", "peers"),
    "growth": Plot(growth, "growth"),
    "decisions": Plot(decisions, "decisions"),
    "hibernation": Plot(sleeping, "hibernation"),
    "cluster": Plot(scale, "cluster"),
    "queues": Plot(waits, "queues"),
}

if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text())["rows"], Path(sys.argv[2]))
