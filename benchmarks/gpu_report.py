"""What the GPU benchmarks found, as tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import gpu_density, gpu_training

Row = Mapping[str, Any]


def page(result: Mapping[str, Any]) -> str:
    """Return the whole page: on what it was measured, and two tables."""
    facts = result["facts"]
    title = (
        "Dry run: nothing here was measured on a GPU" if facts["dry_run"] else f"Measured on {facts['card']}"
    )
    parts = [f"# {title}", _table(("", ""), [(name.replace("_", " "), each) for name, each in facts.items()])]
    if not result["finished"]:
        parts.append("**It was cut short: rows are missing.**")
    parts += [
        "## One process alone, by the size of its slice",
        _table(
            (
                "sharing",
                "slice",
                "MiB granted",
                "images/s",
                "to 100%",
                "accuracy",
                "MiB used",
                "of it PyTorch's",
            ),
            [_training(row) for row in gpu_training.summary(result["training"])],
        ),
        f"## Processes at {gpu_density.SIZE} together",
        _table(
            (
                *(
                    "sharing",
                    "processes",
                    "images/s in all",
                    "to one alone",
                    "to time-slicing",
                    "each to one alone",
                ),
                *("slowest to median", "MiB per context", "s to the first operation", "of it import"),
            ),
            [_density(row) for row in gpu_density.summary(result["density"])],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _training(row: Row) -> Sequence[object]:
    if not row["runs"]:
        return (row["sharing"], row["size"], "", row["failed"])
    return (
        *(row["sharing"], row["size"], _number(row["granted_mib"], 0), _number(row["images_per_second"], 0)),
        *(_number(row["ratio"], 2), _number(row["accuracy"], 3)),
        *(_number(row["memory_mib"], 0), _number(row["reserved_mib"], 0)),
    )


def _density(row: Row) -> Sequence[object]:
    if "failed" in row:
        return (row["sharing"], row["processes"], row["failed"])
    return (
        *(row["sharing"], row["processes"], _number(row["total"], 0), _number(row["total_to_alone"], 2)),
        *(
            _number(row["to_turns"], 2),
            _number(row["each_to_alone"], 3),
            _number(row["least"] / row["each"], 2),
        ),
        *(
            _number(row["context_mib"], 0),
            _number(row["start_seconds"], 1),
            _number(row["import_seconds"], 1),
        ),
    )


def _number(value: float | None, digits: int) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *([*row, *[""] * (len(heads) - len(row))] for row in rows)]
    return "\n".join(f"| {' | '.join(_cell(each) for each in line)} |" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "/").split())
