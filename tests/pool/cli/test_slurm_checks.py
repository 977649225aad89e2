"""Limits as sacctmgr prints them, and what is beyond them."""

from __future__ import annotations

import pytest

from gpu_pool.cli.slurm_checks import read_associations, read_duration, read_qos


@pytest.mark.parametrize(
    ("text", "seconds"), [("", None), ("00:30:00", 1800), ("1-12:00:05", 129_605), ("UNLIMITED", None)]
)
def test_a_time_is_read_as_sacctmgr_writes_it(text: str, seconds: float | None) -> None:
    assert read_duration(text) == seconds


@pytest.mark.parametrize(
    ("gres", "seconds", "told"),
    [
        ("gpu:v100:2", None, ["needs gres/gpu=2, and the QOS one allows 1 (MaxTRESPerUser)"]),
        ("gpu:t4:1", 1800.0, []),
        ("gpu:1", None, []),
        ("shard:t4:50", None, []),
        ("shard:t4:51", None, ["needs gres/shard=51, and the QOS one allows 50 (MaxTRESPerJob)"]),
        ("gpu:a100:1", None, ["needs gres/gpu:a100=1, and the QOS one allows 0 (MaxTRESPerJob)"]),
        ("gpu:t4:1", 1801.0, ["has a time limit of 30min1s, and the QOS one allows 30min (MaxWall)"]),
    ],
)
def test_what_is_beyond_a_qos_is_told(gres: str, seconds: float | None, told: list[str]) -> None:
    printed = "normal|||\none|gres/gpu=1,gres/shard=60|gres/gpu=2,gres/gpu:a100=0,gres/shard=50|00:30:00\n"
    found = read_qos(printed)
    assert list(found["one"].excesses(gres, seconds)) == told
    assert list(found["normal"].excesses(gres, seconds)) == []


def test_the_account_of_a_user_is_read_with_its_limits() -> None:
    found = read_associations("teaching|cpu=4,gres/gpu=2|1-00:00:00|normal,one|one\nroot|||normal|\n")
    assert (found["teaching"].qos, found["teaching"].default_qos) == (("normal", "one"), "one")
    assert list(found["teaching"].limits.excesses("gpu:3", 90_000)) == [
        "needs gres/gpu=3, and the account teaching allows 2 (MaxTRESPerJob)",
        "has a time limit of 1d1h, and the account teaching allows 1d (MaxWall)",
    ]
    assert list(found["root"].limits.excesses("gpu:3", 90_000)) == []
