"""What is known of GPUs that nodes do not show at the moment."""

from __future__ import annotations

from typing import Any

from gpu_pool.cluster.dialects import Cluster, choose
from gpu_pool.cluster.dialects.choosing import away, completed, next_end, remembered
from support.clusters import dra, listed, named, node, plain

BEFORE = Cluster.read([plain("n1", gpus=2), plain("n2")])
PATIENCE = 180.0


def silent(name: str, **spec: Any) -> dict[str, Any]:
    """Return a node whose device plugin is being replaced."""
    found = plain(name, **spec)
    found["status"]["allocatable"]["nvidia.com/gpu"] = "0"
    return found


def uuids(cluster: Cluster) -> list[str]:
    dialect = choose(cluster).dialect
    return [] if dialect is None else sorted(gpu.device.uuid for gpu in dialect.gpus())


def test_a_node_that_shows_no_gpus_counts_as_it_was_for_a_while() -> None:
    known = remembered({}, BEFORE, {"n1", "n2"}, 0.0, PATIENCE)
    assert (away(known), next_end(known, PATIENCE)) == (frozenset(), None)
    assert completed(BEFORE, known) is BEFORE
    now = Cluster.read([silent("n1"), plain("n2")])
    assert len(uuids(now)) < len(uuids(BEFORE))
    known = remembered(known, now, {"n2"}, 10.0, PATIENCE)
    assert (away(known), next_end(known, PATIENCE)) == ({"n1"}, 190.0)
    assert uuids(completed(now, known)) == uuids(BEFORE)
    # Since when does not change by looking again.
    known = remembered(known, now, {"n2"}, 189.0, PATIENCE)
    assert next_end(known, PATIENCE) == 190.0
    known = remembered(known, now, {"n2"}, 190.0, PATIENCE)
    assert away(known) == frozenset()
    assert completed(now, known) is now


def test_all_of_them_may_be_away_at_once() -> None:
    known = remembered({}, BEFORE, {"n1", "n2"}, 0.0, PATIENCE)
    now = Cluster.read([silent("n1"), silent("n2")])
    assert choose(now).dialect is None
    known = remembered(known, now, set(), 10.0, PATIENCE)
    assert uuids(completed(now, known)) == uuids(BEFORE)


def test_what_comes_back_is_as_it_is_now() -> None:
    known = remembered({}, BEFORE, {"n1", "n2"}, 0.0, PATIENCE)
    known = remembered(known, Cluster.read([silent("n1"), plain("n2")]), {"n2"}, 10.0, PATIENCE)
    smaller = Cluster.read([plain("n1", gpus=1), plain("n2")])
    known = remembered(known, smaller, {"n1", "n2"}, 20.0, PATIENCE)
    assert completed(smaller, known) is smaller
    # And away anew, it is known for as long again.
    known = remembered(known, Cluster.read([silent("n1"), plain("n2")]), {"n2"}, 100.0, PATIENCE)
    assert next_end(known, PATIENCE) == 280.0


def test_a_node_that_is_gone_or_never_had_gpus_is_not_made_up() -> None:
    known = remembered({}, BEFORE, {"n1", "n2"}, 0.0, PATIENCE)
    now = Cluster.read([plain("n2"), node("cpu-1")])
    known = remembered(known, now, {"n2"}, 1.0, PATIENCE)
    assert known.keys() == {"n2"}
    assert completed(now, known) is now


def test_whether_a_node_takes_pods_is_as_it_is_now() -> None:
    known = remembered({}, BEFORE, {"n1", "n2"}, 0.0, PATIENCE)
    now = Cluster.read([silent("n1") | {"spec": {"unschedulable": True}}, plain("n2")])
    made = completed(now, remembered(known, now, {"n2"}, 1.0, PATIENCE)).node("n1")
    assert (made.cordoned, made.taints) == (True, ())


def test_without_a_grace_period_nothing_is_remembered() -> None:
    known = remembered({}, BEFORE, {"n1", "n2"}, 0.0, 0.0)
    now = Cluster.read([silent("n1"), silent("n2")])
    assert remembered(known, now, set(), 1.0, 0.0) == {}


def test_the_slices_of_a_driver_that_is_away_count_as_they_were() -> None:
    before = dra(listed("gpu-0", default="32768Mi"))
    known = remembered({}, before, {"n1"}, 0.0, PATIENCE)
    now = Cluster.read([node()], device_classes=named("gpu.nvidia.com", "mig.nvidia.com"))
    assert uuids(now) == []
    assert (
        uuids(completed(now, remembered(known, now, set(), 1.0, PATIENCE))) == uuids(before) == ["GPU-gpu-0"]
    )
