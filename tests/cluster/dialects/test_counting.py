"""What a cluster rounds up is counted as it is granted."""

from __future__ import annotations

import pytest

from gpu_pool.cluster.dialects import Cluster, DialectOptions, choose, counted_as
from gpu_pool_client import GpuPoolError, parse_request
from support.clusters import everything, plain


def counted(cluster: str, text: str) -> str:
    dialect = choose(*everything()[cluster]).dialect
    assert dialect is not None
    return str(counted_as(parse_request(text), dialect))


@pytest.mark.parametrize(
    ("cluster", "asked", "granted"),
    [
        ("hami", "2%", "2%"),
        ("hami", "2.5%", "3%"),
        # Compute in whole percents: 4% of a GPU are 1310 MiB.
        ("hami", "1000MiB", "1310MiB"),
        # Of a smaller GPU 2% would be too little, so it is counted for the larger one.
        ("hami-mixed", "2%", "2%"),
        ("kai", "2.5%", "3%"),
        ("kai", "99.5%", "1"),
        ("kai", "4GiB", "4251MiB"),
        ("dra-shares", "2.5%", "4%"),
        ("aliyun", "1000MiB", "1GiB"),
        # One instance holds one lease, whatever it asked for.
        ("mig-mixed", "14%", "14%"),
        ("dra-mig", "4GiB", "4GiB"),
        ("bitfusion", "1000MiB", "1000MiB"),
        ("whole", "1", "1"),
        ("kai", "2x2.5%", "2x3%"),
        ("kai-nvfractions", "2%..10%", "2%..10%"),
        ("kai-nvfractions", "2x1GiB..4GiB", "2x1GiB..4GiB"),
        ("kai-nvfractions", "99.5%..100%", "1"),
    ],
)
def test_what_is_granted_is_counted(cluster: str, asked: str, granted: str) -> None:
    assert counted(cluster, asked) == granted


def test_a_replica_counts_as_what_it_is() -> None:
    dialect = choose(Cluster.read([plain("n1", replicas=5)]), DialectOptions()).dialect
    assert dialect is not None
    assert str(counted_as(parse_request("14%"), dialect)) == "20%"
    assert str(counted_as(parse_request("5GiB"), dialect)) == "6553MiB"


@pytest.mark.parametrize("cluster", list(everything()))
def test_what_is_counted_is_asked_for_and_not_rounded_again(cluster: str) -> None:
    dialect = choose(*everything()[cluster]).dialect
    assert dialect is not None
    for text in ("2%", "2.5%", "14%", "99.5%", "1000MiB", "4GiB", "6GiB", "1"):
        try:
            once = counted_as(parse_request(text), dialect)
        except GpuPoolError:
            continue
        assert counted_as(once, dialect) == once
        before, after = (dialect.translate(each).statement for each in (parse_request(text), once))
        assert (after.milli or 0) >= (before.milli or 0)
