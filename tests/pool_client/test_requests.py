"""The slice request parser: what it reads, what it prints, what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_pool_client import ACCEPTED, BadRequest, Filters, SliceRequest, format_gpus, parse_request
from gpu_pool_client._requests import MAX_MIB


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("2%", SliceRequest(milli=20)),
        ("0.02", SliceRequest(milli=20)),
        (".02", SliceRequest(milli=20)),
        ("2.5%", SliceRequest(milli=25)),
        ("0.1%", SliceRequest(milli=1)),
        ("100%", SliceRequest(milli=1000)),
        ("1.000", SliceRequest(milli=1000)),
        ("4", SliceRequest(count=4, milli=1000)),
        ("2x1", SliceRequest(count=2, milli=1000)),
        ("2x50%", SliceRequest(count=2, milli=500)),
        ("2X0.5", SliceRequest(count=2, milli=500)),
        ("655MiB", SliceRequest(memory_mib=655)),
        ("1.5GiB", SliceRequest(memory_mib=1536)),
        ("2x1.5gib", SliceRequest(count=2, memory_mib=1536)),
        ("0.0001MiB", SliceRequest(memory_mib=1)),
        ("1.1GiB", SliceRequest(memory_mib=1127)),
        (
            " 2%  index=1,0,1 driver>=550.54 memory>=16GiB model=V100 ",
            SliceRequest(milli=20, filters=Filters("V100", 16384, (550, 54), (0, 1))),
        ),
        ("2% for 20min", SliceRequest(milli=20, length=1200)),
        ("2 FOR 1h30min model=V100", SliceRequest(2, 1000, filters=Filters("V100"), length=5400)),
        ("1GiB index=0 for 0.5s", SliceRequest(memory_mib=1024, filters=Filters(index=(0,)), length=1)),
        ("1 for 90", SliceRequest(milli=1000, length=90)),
        ("1 for 3650d", SliceRequest(milli=1000, length=315_360_000)),
        ("2%..10%", SliceRequest(milli=20, limit_milli=100)),
        (".02...1", SliceRequest(milli=20, limit_milli=100)),
        ("0.02..10%", SliceRequest(milli=20, limit_milli=100)),
        ("2%..1", SliceRequest(milli=20, limit_milli=1000)),
        ("99.9%..100%", SliceRequest(milli=999, limit_milli=1000)),
        ("1GiB..4GiB", SliceRequest(memory_mib=1024, limit_mib=4096)),
        ("655mib..1.5GIB", SliceRequest(memory_mib=655, limit_mib=1536)),
        ("2x2%..10%", SliceRequest(2, 20, limit_milli=100)),
        (
            "2%..10% model=V100 for 20min",
            SliceRequest(milli=20, filters=Filters("V100"), length=1200, limit_milli=100),
        ),
    ],
)
def test_it_reads(text: str, request_: SliceRequest) -> None:
    assert parse_request(text) == request_


NONSENSE = """0 0% 0.0 0x50% -1 -1% +1 101% 1000% 1.5 nan inf 1e9 1e-2 2%% %2 2%x2 x50% 2x 2x4 2x2x2
    1_0 0x10 0b1 1.5GB 16G 655M 0.0001 0.05% 1.23% 0MiB 0.0GiB 1025 1025x2% 99999999999 . % MiB GiB
    2%,3% --help ;ls $(ls) 2%; .. ... 2%.. ..2% 2%..10%..20% 2%.10% 2%...10% 1..1 2%..nan 2%..-1%"""
WITH_SPACES = ["", " ", "\n", "two percent", "2 %", "655 MiB", "2% 3%", "2%\0"]
NOT_ASCII = ["\u0662%", "\uff12%", "2\u066a", "2%\u00a0", "\u00bd"]


@pytest.mark.parametrize("text", [*NONSENSE.split(), *WITH_SPACES, *NOT_ASCII, "2%" + "0" * 300])
def test_it_refuses_nonsense_with_a_sentence_that_lists_the_accepted_forms(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_request(text)
    assert str(caught.value).endswith(ACCEPTED)


@pytest.mark.parametrize(
    "filters",
    [
        "model",
        "model=",
        "model>=V100",
        "model=a=b",
        "model=../x",
        "memory=16GiB",
        "memory>=16",
        "memory>=16GB",
        "driver=550",
        "driver>=x",
        "driver>=1.2.3.4.5",
        "index>=0",
        "index=",
        "index=0,,1",
        "index=-1",
        "index=0 index=1",
        "colour=red",
        "index=" + ",".join("0" * 40),
    ],
)
def test_it_refuses_filters_it_does_not_know(filters: str) -> None:
    with pytest.raises(BadRequest, match=r"filter|write model="):
        parse_request(f"2% {filters}")


def test_ten_megabytes_are_refused_unread_and_not_repeated() -> None:
    with pytest.raises(BadRequest) as caught:
        parse_request("2% " * 3_500_000)
    assert len(str(caught.value)) < 500


filters = st.builds(
    Filters,
    model=st.none() | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    memory_mib=st.none() | st.integers(1, 10_000_000),
    driver=st.none() | st.lists(st.integers(0, 99999), min_size=1, max_size=4).map(tuple),
    index=st.sets(st.integers(0, 9999), max_size=8).map(lambda found: tuple(sorted(found))),
)
common = {
    "count": st.integers(1, 1024),
    "filters": filters,
    "length": st.none() | st.integers(1, 3650 * 86_400),
}
certain = st.builds(SliceRequest, milli=st.integers(1, 1000), **common) | st.builds(
    SliceRequest, memory_mib=st.integers(1, 10_000_000), **common
)


def _with_limit(request: SliceRequest) -> st.SearchStrategy[SliceRequest]:
    if request.memory_mib:
        return st.integers(request.memory_mib + 1, MAX_MIB).map(lambda mib: replace(request, limit_mib=mib))
    if request.whole_devices:
        return st.just(request)
    return st.integers((request.milli or 0) + 1, 1000).map(lambda most: replace(request, limit_milli=most))


requests = certain | certain.flatmap(_with_limit)


@given(requests)
def test_what_it_prints_it_reads_back(request_: SliceRequest) -> None:
    assert parse_request(str(request_)) == request_


@given(
    st.text(max_size=300)
    | st.text("0123456789.%xXgGmMiIbB =><,-+e", max_size=30)
    | st.text("12dhmins. ", max_size=20).map("2% for {}".format)
    | st.text("019.%xGMiB", max_size=20).map("2%..{}".format)
    | st.text("019.%xGMiB", max_size=20).map("1GiB..{}".format)
)
def test_any_text_is_either_read_back_or_refused_in_words(text: str) -> None:
    try:
        request_ = parse_request(text)
    except BadRequest as refusal:
        assert ACCEPTED in str(refusal)  # noqa: PT017 - both outcomes are right
    else:
        assert parse_request(str(request_)) == request_


@given(requests)
def test_a_guarantee_is_the_request_without_its_limit(request_: SliceRequest) -> None:
    assert not request_.guarantee.has_limit
    assert parse_request(str(request_.guarantee)) == request_.guarantee
    written, guaranteed = str(request_), str(request_.guarantee)
    assert (written == guaranteed) is not request_.has_limit
    assert written.startswith(request_.guarantee.size)


@given(st.integers(1, 1000))
def test_shares_are_exact(milli: int) -> None:
    assert parse_request(f"{milli // 10}.{milli % 10}%") == parse_request(f"{milli / 1000:.3f}")


@pytest.mark.parametrize(
    ("text", "named", "of_gpus"),
    [
        ("1", "a whole GPU", "a whole GPU"),
        ("100%", "a whole GPU", "a whole GPU"),
        ("4 model=V100", "4 whole GPUs model=V100", "4 whole GPUs"),
        ("2%", "2%", "2% of a GPU"),
        ("2% model=V100", "2% model=V100", "2% of a GPU"),
        ("4 for 2h model=V100", "4 whole GPUs model=V100 for 2h", "4 whole GPUs"),
        ("2% for 5400s", "2% for 1h30min", "2% of a GPU"),
        ("1.5GiB", "1.5GiB", "1.5GiB of a GPU"),
        ("2x50%", "2x50%", "50% of each of 2 GPUs"),
        ("2%..10% for 2h", "2%..10% for 2h", "2% of a GPU, up to 10%"),
        ("2x1GiB..1.5GiB", "2x1GiB..1.5GiB", "1GiB of each of 2 GPUs, up to 1.5 GiB"),
    ],
)
def test_a_request_in_a_sentence(text: str, named: str, of_gpus: str) -> None:
    request = parse_request(text)
    assert (request.named, request.of_gpus) == (named, of_gpus)


def test_an_amount_in_a_sentence() -> None:
    assert [format_gpus(milli) for milli in (0, 20, 1000, 1500, 4000)] == [
        "0% of a GPU",
        "2% of a GPU",
        "a whole GPU",
        "150% of a GPU",
        "4 whole GPUs",
    ]
