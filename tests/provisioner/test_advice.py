from __future__ import annotations

from typing import Any

import pytest

from gpu_pool_client import EndReason, TimedOut
from gpu_pool_provisioner.advice import for_dialog, kernels_that_fit, slice_lost, slice_of, with_advice

DEVICE_MIB = 32768


def specs(*sizes: str, language: str = "python", provisioner: str = "gpu-pool") -> dict[str, Any]:
    return {
        f"{language}-{size}": {
            "spec": {
                "display_name": size,
                "language": language,
                "metadata": {
                    "kernel_provisioner": {"provisioner_name": provisioner, "config": {"slice": size}}
                },
            }
        }
        for size in sizes
    }


@pytest.mark.parametrize(
    ("installed", "largest", "fitting"),
    [
        (["2%", "10%", "50%", "1"], "46%", ["10%", "2%"]),
        (["2%", "10%"], "1%", []),
        (["2%"], None, []),
        (["50%"], "50%", ["50%"]),
        (["2x2%", "2%"], "50%", ["2%"]),
        (["1.5GiB", "2%", "16GiB"], "10%", ["1.5GiB", "2%"]),
        (["4GiB"], "12%", []),
        (["2% model=A100", "nonsense", ""], "50%", []),
    ],
)
def test_which_kernels_would_start(installed: list[str], largest: str | None, fitting: list[str]) -> None:
    found = kernels_that_fit(specs(*installed), "python", largest, device_mib=DEVICE_MIB)
    assert found == fitting


def test_only_gpu_kernels_of_the_same_language_are_named() -> None:
    installed = specs("2%", language="R") | specs("10%", provisioner="local-provisioner")
    installed["plain"] = {"spec": {"display_name": "Python 3", "language": "python", "metadata": {}}}
    assert kernels_that_fit(installed, "python", "50%", device_mib=DEVICE_MIB) == []


def test_a_size_written_as_a_number_is_read() -> None:
    stanza = {"provisioner_name": "gpu-pool", "config": {"slice": 0.02}}
    assert str(slice_of({"metadata": {"kernel_provisioner": stanza}})) == "2%"


def test_the_advice_reads_as_sentences() -> None:
    error = TimedOut("No GPU slice of 50% is free now.", "Try again later.", largest_now="12%")
    advised = with_advice(error, ["Python 3 (GPU 10%)", "Python 3 (GPU 2%)"], "your tutor")
    assert str(for_dialog(advised)).splitlines() == [
        "No GPU slice of 50 percent is free now.",
        'Try again later. These kernels would start now: "Python 3 (GPU 10 percent)"',
        'or "Python 3 (GPU 2 percent)". If you need more, ask your tutor.',
    ]
    assert advised.largest_now == "12%"


def test_one_kernel_is_named_alone_and_never_more_than_three() -> None:
    error = TimedOut("Full.")
    assert str(with_advice(error, ["A"], "")) == 'Full. This kernel would start now: "A".'
    assert '"A", "B" or "C".' in str(with_advice(error, ["A", "B", "C", "D"], ""))


def test_with_nothing_to_add_the_words_stay() -> None:
    assert str(with_advice(TimedOut("Full.", "Wait."), [], "")) == "Full. Wait."


def test_a_lost_slice_says_why_and_what_to_do() -> None:
    error = slice_lost("2%", EndReason.REVOKED)
    assert "2%" in str(error)
    assert "revoked" in str(error)
    assert "start it again" in error.remedy
    assert error.reason == "revoked"
