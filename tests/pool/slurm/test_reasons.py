"""Why a job waits, in words: each of Slurm's words has a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_pool.slurm.reasons import why_it_waits

#: Its first line says where the words are from.
WORDS = (Path(__file__).parent / "reasons.txt").read_text().splitlines()[1:]


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("QOSMaxGRESPerUser", "You use as many GPUs as its QOS allows a user."),
        ("AssocGrpGRES", "Jobs of your account use as many GPUs as they may together."),
        ("AssocGrpGRESMinutes", "Jobs of your account have used up their GPU time."),
        ("QOSGrpMemLimit", "Jobs of its QOS use as much memory as they may together."),
        ("QOSMaxCpuPerUserLimit", "You use as many processors as its QOS allows a user."),
        ("AssocMaxJobsLimit", "You run as many jobs as your account allows."),
        ("MaxGRESPerAccount", "Your account uses as many GPUs as its QOS allows an account."),
        ("QOSMaxWallDurationPerJobLimit",
         "Its time limit is longer than its QOS allows a job, so that it never starts."),
        ("AssocMaxGRESPerJob",
         "It asks for more GPUs than your account allows a job, so that it never starts."),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
         "The nodes that it could have are down, drained, or kept for partitions with a higher priority."),
        ("SomethingNew", "Slurm says: SomethingNew."),
        ("", ""),
    ],
)  # fmt: skip
def test_a_reason_is_said_in_words(word: str, sentence: str) -> None:
    assert why_it_waits(word) == sentence


def test_every_reason_that_slurm_has_is_said_in_a_sentence() -> None:
    said = {word: why_it_waits(word) for word in WORDS}
    assert len(said) > 200
    assert [word for word, text in said.items() if "Slurm says" in text or "  " in text or word in text] == []
    assert [text for text in said.values() if not text[0].isupper() or not text.endswith(".")] == []
