"""The ratios and tables that the GPU benchmarks make of what they measured; needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import gpu_density, gpu_report, gpu_training

Row = dict[str, Any]


def trained(size: str, speed: float, sharing: str = "time-slicing") -> Row:
    row = {"images_per_second": speed, "accuracy": 0.97, "reserved_mib": 60, "memory_mib": 600}
    return {"sharing": sharing, "size": size, "granted_mib": 1631, **row}


def together(count: int, total: float, sharing: str = "time-slicing") -> Row:
    row = {"context_mib": 500, "start_seconds": 4.0, "import_seconds": 3.0, "started_at_once": count}
    each = total / count
    return {"sharing": sharing, "processes": count, "total": total, "each": each, "least": each, **row}


def test_speeds_are_ratios_of_medians_to_the_whole_gpu_shared_in_the_same_way() -> None:
    rows = [trained("100%", 100.0), trained("2%", 80.0), trained("100%", 300.0), trained("2%", 120.0)]
    rows += [trained("100%", 50.0, "MPS"), trained("2%", 10.0, "MPS")]
    found = {(row["sharing"], row["size"]): row["ratio"] for row in gpu_training.summary(rows)}
    assert found[("time-slicing", "2%")] == pytest.approx(0.5)
    assert found[("MPS", "2%")] == pytest.approx(0.2)


def test_a_training_that_failed_counts_in_no_median_and_is_told() -> None:
    rows = [trained("100%", 100.0), {"sharing": "time-slicing", "size": "2%", "failed": "OutOfMemoryError"}]
    whole, small = gpu_training.summary(rows)
    assert (whole["ratio"], whole["runs"]) == (1.0, 1)
    assert (small["ratio"], small["runs"], small["failed"]) == (None, 0, "OutOfMemoryError")


def test_many_are_compared_with_one_alone_and_with_time_slicing() -> None:
    rows = [together(1, 100.0), together(4, 120.0), together(4, 240.0, "MPS")]
    last = gpu_density.summary(rows)[-1]
    assert last["total_to_alone"] == pytest.approx(2.4)
    assert last["each_to_alone"] == pytest.approx(0.6)
    assert last["to_turns"] == pytest.approx(2.0)


def test_the_page_names_the_card_and_keeps_what_failed_and_what_is_missing() -> None:
    facts = {"dry_run": False, "card": "NVIDIA H100 80GB HBM3", "driver": "580.159.04"}
    failed = {"sharing": "MPS", "processes": 8, "failed": "Ended: status 1. a | b\nc"}
    page = gpu_report.page(
        {"facts": facts, "training": [trained("100%", 9.0)], "density": [failed], "finished": False}
    )
    assert page.startswith("# Measured on NVIDIA H100 80GB HBM3\n")
    assert "| driver | 580.159.04 |" in page
    assert "| MPS | 8 | Ended: status 1. a / b c |" in page
    assert "cut short" in page
    tables = [block.splitlines() for block in page.split("\n\n") if block.startswith("|")]
    assert all(len({line.count("|") for line in lines}) == 1 for lines in tables)
