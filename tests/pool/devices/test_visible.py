"""Which GPUs ``CUDA_VISIBLE_DEVICES`` leaves to a process, as CUDA reads it."""

from __future__ import annotations

import pytest

from gpu_pool.devices.visible import CardNames, Visible, choose

A, B, C = "GPU-8932f937-d72c", "GPU-46163a3b-0000", "GPU-46163aff-0001"
FIRST, SECOND = "MIG-41b36db5-df8d", "MIG-6a4f3eb1-e61a"
SAME = [CardNames(uuid, "A100", (uuid,)) for uuid in (A, B, C)]
DIVIDED = [
    *SAME[:1],
    CardNames(B, "A100", (FIRST, SECOND), {FIRST: f"MIG-{B}/1/0", SECOND: f"MIG-{B}/2/0"}, mig=True),
]
MIXED = [SAME[0], CardNames(B, "T400", (B,)), *SAME[2:]]


def left(text: str | None, cards: list[CardNames], **environ: str) -> Visible:
    return choose(environ if text is None else {"CUDA_VISIBLE_DEVICES": text, **environ}, cards)


@pytest.mark.parametrize(
    ("text", "uuids"),
    [
        ("0", {A}),
        ("2,0", {A, C}),
        (" 1 , 2 ", {B, C}),
        ("+1", {B}),
        ("1gpu2,2ampere", {B, C}),
        ("0,7,1", {A}),
        ("0,-1,1", {A}),
        ("-1", set()),
        ("", set()),
        ("  ", set()),
        ("NoDevFiles", set()),
        ("void", set()),
        ("none", set()),
        ("1,1", set()),
        ("0,1,0", set()),
        ("0,0,5", set()),
        (A, {A}),
        ("GPU-89", {A}),
        ("GPU-46163a3", {B}),
        ("GPU-46163a", set()),
        (f"{C},GPU-8", {A, C}),
        (f"{A},GPU-none,{B}", {A}),
        (f"{A},1", {A}),
        (f"0,{B}", {A}),
        (f"{A},GPU-89", set()),
        (",0", set()),
        ("0,", {A}),
        ("99999999999999999999", set()),
        ("\u0661", set()),
    ],
)
def test_a_list_is_read_as_cuda_reads_it(text: str, uuids: set[str]) -> None:
    found = left(text, SAME)
    assert found.uuids == uuids
    assert not found.is_unclear
    assert found.told or uuids


@pytest.mark.parametrize(
    ("text", "uuids"),
    [
        (FIRST, {FIRST}),
        (f"{FIRST},{SECOND}", {FIRST, SECOND}),
        ("MIG-41", {FIRST}),
        ("MIG-", set()),
        (f"MIG-{B}/2/0", {SECOND}),
        (f"MIG-{B}/3/0", set()),
        (f"{A},MIG-6a", {A, SECOND}),
        (B, {FIRST, SECOND}),
        (A, {A}),
    ],
)
def test_mig_instances_are_named_by_uuid_and_by_the_names_of_older_drivers(
    text: str, uuids: set[str]
) -> None:
    assert left(text, DIVIDED).uuids == uuids


def test_without_the_variable_everything_is_left() -> None:
    assert left(None, SAME) == Visible()
    assert left(None, MIXED, CUDA_DEVICE_ORDER="FASTEST_FIRST") == Visible()


def test_numbers_are_the_drivers_where_the_order_is_or_all_are_equally_fast() -> None:
    assert left("1", MIXED).is_unclear
    assert left("1", MIXED, CUDA_DEVICE_ORDER="FASTEST_FIRST").is_unclear
    assert left("1", MIXED, CUDA_DEVICE_ORDER="PCI_BUS_ID").uuids == {B}
    assert left("1", SAME, CUDA_DEVICE_ORDER="FASTEST_FIRST").uuids == {B}
    assert left("1", DIVIDED, CUDA_DEVICE_ORDER="PCI_BUS_ID").is_unclear, "CUDA numbers some instances"
    assert choose({"CUDA_VISIBLE_DEVICES": "1"}, SAME, all_read=False).is_unclear, "another may be counted"
    assert left(C, MIXED).uuids == {C}, "a uuid is clear"


def test_what_is_wrong_with_a_list_is_told() -> None:
    assert left("0,7", SAME).told == (
        "CUDA_VISIBLE_DEVICES is 0,7: there is no GPU 7 (there are 0 to 2), and CUDA reads no further."
    )
    assert left("", SAME).told.startswith("CUDA_VISIBLE_DEVICES is set, and empty: that hides all GPUs.")
    assert "Slurm has given this job no GPU" in left("NoDevFiles", SAME).told
    assert "names a GPU twice" in left("1,1", SAME).told
    assert "GPU-46163a is the beginning of several" in left("GPU-46163a", SAME).told
    assert left("\x1b[31m", SAME).told.isprintable()
    assert len(left("x" * 5000, SAME).told) < 500
