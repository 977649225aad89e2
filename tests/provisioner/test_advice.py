from __future__ import annotations

from typing import Any

import pytest

from gpu_pool_client import BadRequest, EndReason, TimedOut, parse_request
from gpu_pool_provisioner.advice import for_dialog, kernels_that_fit, slice_of, with_advice
from gpu_pool_provisioner.session.texts import slice_lost
from gpu_pool_provisioner.settings import printable

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


@pytest.mark.parametrize("broken", [None, "text", ["2%"], 5])
def test_what_others_wrote_into_their_kernelspecs_breaks_nothing(broken: object) -> None:
    for spec in (
        {"metadata": broken},
        {"metadata": {"kernel_provisioner": broken}},
        {"metadata": {"kernel_provisioner": {"provisioner_name": "gpu-pool", "config": broken}}},
    ):
        installed = {"broken": {"spec": {"language": "python", **spec}}} | specs("2%")
        assert kernels_that_fit(installed, "python", "50%", device_mib=DEVICE_MIB) == ["2%"]


@pytest.mark.parametrize("size", [None, True, ["2%"], {}])
def test_what_is_no_size_asks_for_nothing(size: object) -> None:
    stanza = {"provisioner_name": "gpu-pool", "config": {"slice": size}}
    assert slice_of({"metadata": {"kernel_provisioner": stanza}}) is None


def test_a_kernel_without_a_name_for_people_has_the_name_of_its_folder() -> None:
    (entry,) = specs("2%").values()
    del entry["spec"]["display_name"]
    assert kernels_that_fit({"mine": entry}, "python", "50%", device_mib=DEVICE_MIB) == ["mine"]


def test_names_are_short_and_can_be_printed() -> None:
    assert printable("GPU\n\ud800\x1b[2J 2% ü") == "GPU   [2J 2% ü"
    (entry,) = specs("2%").values()
    entry["spec"]["display_name"] = "\ud800" + "x" * 10**6
    (name,) = kernels_that_fit({"mine": entry}, "python", "50%", device_mib=DEVICE_MIB)
    assert name == " " + "x" * 199
    entry["spec"]["display_name"] = "Python 3 (GPU  2%)"
    assert kernels_that_fit({"mine": entry}, "python", "50%", device_mib=DEVICE_MIB) == ["Python 3 (GPU 2%)"]


def test_the_forms_of_a_slice_stay_readable_in_the_dialog() -> None:
    with pytest.raises(BadRequest) as refused:
        parse_request("2%%")
    words = str(for_dialog(refused.value))
    assert "%" not in words
    assert " ".join(words.split()).endswith("Where this says percent, write the percent sign.")


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
