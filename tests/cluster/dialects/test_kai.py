"""KAI: a fraction in hundredths, MiB, or NvFractions; a queue always; nothing enforced by itself."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_pool.cluster.dialects import DialectOptions, Pod, counted_as, usage
from gpu_pool.cluster.dialects.kai import Kai
from gpu_pool_client import BadRequest, NeverFits, NotAllowed, Strength, format_memory, parse_request
from support.clusters import kai, plain, pod


def there(*nodes: dict[str, Any], **options: Any) -> Kai:
    return Kai(kai(*nodes), DialectOptions(**{"queue": "students", **options}))


def ready(name: str = "n1") -> dict[str, Any]:
    """Return a node that is ready for NvFractions."""
    node = plain(name, gpus=2)
    node["status"]["conditions"].append({"type": "gpu-sharing.nvidia.com/Ready", "status": "True"})
    return node


@pytest.mark.parametrize(
    ("text", "annotations"),
    [
        ("2%", {"gpu-fraction": "0.02"}),
        ("50%", {"gpu-fraction": "0.50"}),
        ("2.5%", {"gpu-fraction": "0.03"}),
        ("2x10%", {"gpu-fraction": "0.10", "gpu-fraction-num-devices": "2"}),
        ("1.5GiB", {"gpu-memory": "1536"}),
    ],
)
def test_a_part_is_an_annotation_and_never_a_resource(text: str, annotations: dict[str, str]) -> None:
    parts = there().translate(parse_request(text)).pod
    assert parts.annotations == annotations
    assert parts.limits == {}
    assert parts.labels == {"kai.scheduler/queue": "students"}
    assert parts.scheduler_name == "kai-scheduler"


@pytest.mark.parametrize("text", ["2", "99.5%"])
def test_whole_gpus_are_the_plain_resource_without_annotation(text: str) -> None:
    translation = there().translate(parse_request(text))
    assert list(translation.pod.limits) == ["nvidia.com/gpu"]
    assert translation.pod.annotations == {}
    assert translation.statement.milli == 1000
    assert bool(translation.statement.rounded) == (text == "99.5%")


def test_one_percent_counts_for_nothing_and_is_refused() -> None:
    with pytest.raises(NeverFits, match="treats 1% and less as nothing"):
        there(plain(memory=81920)).translate(parse_request("1%"))


def test_one_and_a_half_percent_becomes_two() -> None:
    statement = there(plain(memory=81920)).translate(parse_request("1.5%")).statement
    assert "asked for 1.5%, granted 2%" in str(statement)


def test_memory_is_rounded_up_to_a_hundredth_of_what_kai_takes_for_the_gpu() -> None:
    statement = there(plain(memory=15360)).translate(parse_request("4096MiB")).statement
    assert (statement.memory_mib, statement.milli) == (4131, 270)
    assert "asked for 4GiB, granted 4131MiB" in str(statement)


@pytest.mark.parametrize("node", [plain(gpus=2), ready()])
def test_a_gpu_is_shared_among_any_number_of_pods(node: dict[str, Any]) -> None:
    held = [pod(f"p{n}", annotations={"gpu-fraction": "0.10"}) for n in range(20)]
    (use,) = usage(there(node), held)
    assert [(gpu.leases, gpu.free_milli, gpu.free_contexts) for gpu in use.gpus] == [(10, 0, None)] * 2


def test_a_whole_gpu_is_no_longer_there_for_others() -> None:
    (use,) = usage(there(), [pod(limits={"nvidia.com/gpu": 1})])
    assert [gpu.free_milli for gpu in use.gpus] == [0, 1000]


def test_by_itself_it_only_counts() -> None:
    statement = there().translate(parse_request("10%")).statement
    assert statement.nominal == ("memory", "compute")
    assert "Neither ResourceQuota nor Kueue nor an autoscaler" in str(statement)


def test_hami_core_limits_memory_and_not_compute() -> None:
    enforcement = there(memory_limiter=True).translate(parse_request("10%")).statement.enforcement
    assert enforcement.memory.strength is Strength.COOPERATIVE
    assert enforcement.compute.strength is Strength.NONE


def test_nvfractions_names_the_container_and_both_amounts() -> None:
    translation = there(ready(), container="kernel").translate(parse_request("2x2%"))
    assert translation.pod.annotations == {
        "nvidia.com/container.kernel.gpu-memory.request": "655Mi",
        "nvidia.com/container.kernel.gpu-memory.limit": "655Mi",
        "gpu-fraction-num-devices": "2",
    }
    assert "NvFractions" in translation.statement.enforcement.memory.by


@pytest.mark.parametrize(
    ("text", "request_", "limit"),
    [
        ("2%..10%", "655Mi", "3276Mi"),
        ("1GiB..4GiB", "1024Mi", "4096Mi"),
        ("1GiB..400GiB", "1024Mi", "32768Mi"),
        ("50%..100%", "16384Mi", "32768Mi"),
    ],
)
def test_nvfractions_has_a_limit_above_the_guarantee(text: str, request_: str, limit: str) -> None:
    dialect = there(ready())
    translation = dialect.translate(parse_request(text))
    key = "nvidia.com/container.notebook.gpu-memory"
    assert translation.pod.annotations == {f"{key}.request": request_, f"{key}.limit": limit}
    alone = dialect.translate(parse_request(text).guarantee).statement
    assert (translation.statement.milli, translation.statement.memory_mib) == (alone.milli, alone.memory_mib)
    assert f"Up to {format_memory(int(limit[:-2]))} on each GPU while that is free" in str(
        translation.statement
    )
    assert counted_as(parse_request(text), dialect) == parse_request(text)


def test_without_nvfractions_there_is_no_limit_above_the_guarantee() -> None:
    with pytest.raises(
        BadRequest, match=r"takes a limit .* with NvFractions.*Ask for 2%: the guarantee alone"
    ):
        there().translate(parse_request("2%..10%"))


def test_only_nodes_that_are_ready_for_nvfractions_are_used() -> None:
    parts = there(ready("a"), plain("b", gpus=2)).translate(parse_request("2%")).pod
    assert parts.node_affinity == ({"key": "kubernetes.io/hostname", "operator": "In", "values": ["a"]},)


def test_a_container_name_that_does_not_fit_into_the_annotation_is_refused() -> None:
    there(ready(), container="c" * 34).translate(parse_request("2%"))
    with pytest.raises(NotAllowed, match="more than 34 characters"):
        there(ready(), container="c" * 35).translate(parse_request("2%"))


def test_nodes_that_do_not_show_memory_cannot_be_asked_for_a_share_by_nvfractions() -> None:
    node = ready()
    del node["metadata"]["labels"]["nvidia.com/gpu.memory"]
    with pytest.raises(NotAllowed, match="do not show how much memory"):
        there(node).translate(parse_request("2%"))


def test_a_queue_must_be_set() -> None:
    with pytest.raises(NotAllowed, match="name one of its queues"):
        Kai(kai()).translate(parse_request("2%"))


@pytest.mark.parametrize(
    ("metadata", "limits", "held"),
    [
        ({"annotations": {"gpu-fraction": "0.02"}}, {}, (20, 655)),
        ({"annotations": {"gpu-fraction": "0.5", "gpu-fraction-num-devices": "2"}}, {}, (1000, 32768)),
        ({"annotations": {"gpu-memory": "16384"}}, {}, (500, 16384)),
        ({"annotations": {"nvidia.com/container.c.gpu-memory.request": "8Gi"}}, {}, (250, 8192)),
        ({}, {"nvidia.com/gpu": 1}, (1000, 32768)),
        ({"annotations": {"gpu-fraction": "inf"}}, {}, (0, 0)),
        ({"annotations": {"gpu-fraction": "-1"}}, {}, (0, 0)),
        ({"namespace": "kai-resource-reservation"}, {"nvidia.com/gpu": 1}, (0, 0)),
    ],
)
def test_what_a_pod_holds(metadata: dict[str, Any], limits: dict[str, int], held: tuple[int, int]) -> None:
    found: Pod = pod(limits=limits, **metadata)
    (use,) = usage(there(plain(gpus=2)), [found])
    assert (use.milli[0], use.memory_mib[0]) == held
