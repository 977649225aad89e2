"""What a pod holds: all of its containers that run together, as Kubernetes counts, in every dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpu_pool.cluster.dialects import Dialect, Pod, choose
from gpu_pool.cluster.kept_objects import lean_pod
from support.clusters import everything

GPU = "nvidia.com/gpu"


def container(amount: int, resource: str = GPU, **more: Any) -> dict[str, Any]:
    return {"name": "c", "resources": {"limits": {resource: str(amount)}}, **more}


def sidecar(amount: int, resource: str = GPU) -> dict[str, Any]:
    return container(amount, resource, restartPolicy="Always")


def read(init: list[dict[str, Any]], apps: list[dict[str, Any]], **spec: Any) -> Pod:
    """Return a pod as the service keeps it: reduced, then read."""
    found = {
        "metadata": {"name": "p", "namespace": "n", "annotations": spec.pop("annotations", {})},
        "spec": {"nodeName": "n1", "initContainers": init, "containers": apps, **spec},
        "status": {"phase": "Running"},
    }
    full, kept = Pod.read(found), Pod.read(lean_pod(found))
    assert full == kept
    assert kept is not None
    return kept


@pytest.mark.parametrize(
    ("init", "apps", "held"),
    [
        ([], [1, 1], 2),
        ([sidecar], [1], 2),
        ([sidecar], [0], 1),
        ([container], [1], 1),  # one after the other
        ([container, sidecar], [1], 2),
        ([sidecar, container], [1], 2),
        ([sidecar, sidecar, container], [1], 3),
        ([lambda n: container(3)], [1], 3),
        ([sidecar, lambda n: container(3)], [1], 4),  # while it runs, the sidecar does, too
        ([lambda n: container(3), sidecar], [1], 3),  # the sidecar comes after it
        ([sidecar, lambda n: container(3)], [1, 1, 1, 1], 5),
    ],
)
def test_all_that_run_together_count_and_what_ends_before_does_if_it_is_more(
    init: list[Callable[[int], dict[str, Any]]], apps: list[int], held: int
) -> None:
    assert read([each(1) for each in init], [container(each) for each in apps]).count(GPU) == held


def test_what_a_pod_says_as_a_whole_and_its_overhead_count() -> None:
    assert read([], [container(1)], overhead={GPU: "1"}).count(GPU) == 2
    assert read([], [container(1)], resources={"limits": {GPU: "3"}}).count(GPU) == 3


def test_a_request_without_a_limit_is_as_much_and_nothing_is_less_than_nothing() -> None:
    assert read([], [{"resources": {"requests": {GPU: "2"}}}]).count(GPU) == 2
    assert read([], [container(2), container(-5)]).count(GPU) == 2


def dialect_of(name: str) -> Dialect:
    found = choose(*everything()[name]).dialect
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "resource", "each"),
    [
        ("whole", GPU, 1000),
        ("time-slicing", GPU, 20),
        ("mig-single", GPU, 142),
        ("mig-mixed", "nvidia.com/mig-1g.5gb", 142),
        ("kai", GPU, 1000),
        ("gke", GPU, 20),
        ("aliyun", "aliyun.com/gpu-mem", 32),
    ],
)
def test_every_dialect_that_reads_limits_counts_so(name: str, resource: str, each: int) -> None:
    pod = read([sidecar(1, resource), container(1, resource)], [container(1, resource)])
    assert sum(hold.milli for hold in dialect_of(name).holds(pod)) == pytest.approx(2 * each, abs=1)


def test_bitfusions_parts_are_those_of_each_container() -> None:
    def part(percent: int, **more: Any) -> dict[str, Any]:
        limits = {"bitfusion.io/gpu-amount": "1", "bitfusion.io/gpu-percent": str(percent)}
        return {"resources": {"limits": limits}, **more}

    pod = read([part(30, restartPolicy="Always"), part(100)], [part(10)])
    holds = dialect_of("bitfusion").holds(pod)
    assert sum(hold.milli for hold in holds) == 1300  # while the second runs, beside the first


@pytest.mark.parametrize(
    ("name", "key"),
    [("hami", "hami.io/vgpu-devices-allocated"), ("volcano", "volcano.sh/vgpu-ids-new")],
)
def test_where_the_scheduler_writes_it_down_for_each_container_it_is_counted_so(name: str, key: str) -> None:
    one, half = "GPU-a,NVIDIA,1000,10:", "GPU-a,NVIDIA,16000,50:"
    together = {key: f"{one};{half};{one};"}  # a sidecar, one that ends before, the notebook
    pod = read([sidecar(1), container(1)], [container(1)], annotations=together)
    held = dialect_of(name).holds(pod)
    assert (sum(each.milli for each in held), sum(each.memory_mib for each in held)) == (600, 17000)
    # Older releases write down the containers alone that run.
    pod = read([sidecar(0)], [container(1)], annotations={key: f"{one};"})
    assert [(each.milli, each.memory_mib) for each in dialect_of(name).holds(pod)] == [(100, 1000)]
    # Each that shares a GPU counts as one that does.
    pod = read([], [container(1), container(1)], annotations={key: f"{one};{one};"})
    assert [(each.milli, each.memory_mib) for each in dialect_of(name).holds(pod)] == [(200, 2000), (0, 0)]
