"""The dialects that are tables: Volcano, Koordinator, GKE, Aliyun, Bitfusion."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_pool.cluster.dialects import Cluster, Dialect, DialectOptions, choose, usage
from gpu_pool_client import BadRequest, GpuPoolError, NeverFits, NotAllowed, Strength, parse_request
from support.clusters import discovered, gke, koordinator, node, pod, volcano


def there(*nodes: dict[str, Any], **options: Any) -> Dialect:
    dialect = choose(Cluster.read(nodes), DialectOptions(**options)).dialect
    assert dialect is not None
    return dialect


def aliyun(unit: int = 1024, memory: int = 32768, gpus: int = 2) -> dict[str, Any]:
    amounts = {"aliyun.com/gpu-mem": memory // unit * gpus, "aliyun.com/gpu-count": gpus}
    return node(labels=discovered(memory=memory), allocatable=amounts)


BITFUSION = node(allocatable={"bitfusion.io/gpu": 1000})


@pytest.mark.parametrize(
    ("dialect", "text", "limits"),
    [
        (there(volcano()), "2%", {"vgpu-number": "1", "vgpu-memory": "655", "vgpu-cores": "2"}),
        (
            there(volcano(factor=10), volcano_memory_factor=10),
            "2%",
            {"vgpu-number": "1", "vgpu-memory": "65", "vgpu-cores": "2"},
        ),
        (there(volcano()), "1", {"vgpu-number": "1", "vgpu-cores": "100"}),
        (there(koordinator()), "2%", {"gpu.shared": "1", "gpu-core": "2", "gpu-memory": "655Mi"}),
        (there(koordinator()), "2x2%", {"gpu.shared": "2", "gpu-core": "4", "gpu-memory": "1310Mi"}),
        (there(koordinator()), "2", {"gpu": "200"}),
        (there(gke("time-sharing", 20)), "5%", {"gpu": "1"}),
        (there(aliyun()), "10%", {"gpu-mem": "4"}),
        (there(aliyun(1), aliyun_memory_unit=1), "2%", {"gpu-mem": "655"}),
        (there(aliyun(), memory_limiter=True), "10%", {"gpu-mem": "4", "gpu-core.percentage": "10"}),
        (there(BITFUSION), "2.5%", {"gpu-amount": "1", "gpu-percent": "3"}),
        (there(BITFUSION), "2x8000MiB", {"gpu-amount": "2", "gpu-memory": "8000Mi"}),
    ],
)
def test_what_the_container_asks_for(dialect: Dialect, text: str, limits: dict[str, str]) -> None:
    parts = dialect.translate(parse_request(text)).pod
    assert {name.partition("/")[2]: value for name, value in parts.limits.items()} == limits


@pytest.mark.parametrize(
    ("dialect", "text", "error", "words"),
    [
        (there(volcano(81920)), "50%", NotAllowed, "Volcano's device plugin"),
        (there(gke("time-sharing", 20)), "2x5%", NeverFits, "one replica is the most"),
        (there(gke("mps", 20)), "1", NeverFits, "no GPU here can be granted whole"),
        (there(aliyun()), "2%", NeverFits, "units of 1024 MiB"),
        (there(aliyun()), "2", NeverFits, "memory of one GPU"),
        (there(BITFUSION), "2% model=V100", BadRequest, "Leave the filters out"),
        (there(BITFUSION), "100MiB", NeverFits, "CUDA itself"),
        (there(koordinator()), "2% index=0", BadRequest, "chooses the GPU itself"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(
    dialect: Dialect, text: str, error: type[GpuPoolError], words: str
) -> None:
    with pytest.raises(error, match=words):
        dialect.translate(parse_request(text))


@pytest.mark.parametrize(
    ("dialect", "memory", "compute"),
    [
        (there(volcano()), Strength.COOPERATIVE, Strength.COOPERATIVE),
        (there(koordinator()), Strength.NONE, Strength.NONE),
        (there(koordinator(), memory_limiter=True), Strength.COOPERATIVE, Strength.COOPERATIVE),
        (there(gke("time-sharing", 10)), Strength.NONE, Strength.NONE),
        (there(gke("mps", 10)), Strength.COOPERATIVE, Strength.COOPERATIVE),
        (there(aliyun()), Strength.NONE, Strength.NONE),
        (there(aliyun(), memory_limiter=True), Strength.COOPERATIVE, Strength.COOPERATIVE),
        (there(BITFUSION), Strength.COOPERATIVE, Strength.NONE),
    ],
)
def test_what_is_enforced(dialect: Dialect, memory: Strength, compute: Strength) -> None:
    enforcement = dialect.translate(parse_request("10%")).statement.enforcement
    assert (enforcement.memory.strength, enforcement.compute.strength) == (memory, compute)


def test_volcano_names_scheduler_mode_and_queue() -> None:
    parts = there(volcano(), queue="students").translate(parse_request("2%")).pod
    assert parts.scheduler_name == "volcano"
    assert parts.annotations == {"volcano.sh/vgpu-mode": "hami-core", "volcano.sh/queue-name": "students"}


def test_memory_below_volcanos_factor_is_given_up_and_said() -> None:
    dialect = there(volcano(factor=10), volcano_memory_factor=10)
    assert "asked for 655MiB, granted 650MiB" in str(dialect.translate(parse_request("2%")).statement)


def test_koordinator_asks_for_hami_core_where_it_is() -> None:
    labels = there(koordinator(), memory_limiter=True).translate(parse_request("2%")).pod.labels
    assert labels == {"koordinator.sh/gpu-isolation-provider": "HAMi-core"}
    assert there(koordinator()).translate(parse_request("2%")).pod.labels == {}


def test_gke_selects_the_strategy_and_the_number_of_clients() -> None:
    nodes = gke("time-sharing", 10, "a"), gke("time-sharing", 20, "b")
    parts = there(*nodes).translate(parse_request("5%")).pod
    assert parts.node_selector == {
        "cloud.google.com/gke-gpu-sharing-strategy": "time-sharing",
        "cloud.google.com/gke-max-shared-clients-per-gpu": "20",
    }


def test_two_percent_on_gke_is_a_forty_eighth() -> None:
    assert "asked for 655MiB, granted 682MiB" in str(
        there(gke("time-sharing", 48, memory=32768)).translate(parse_request("2%")).statement
    )


def test_bitfusion_names_its_client_and_needs_a_command() -> None:
    parts = there(BITFUSION, bitfusion_client=("centos8", "401")).translate(parse_request("10%")).pod
    assert parts.needs_command
    assert parts.annotations == {
        "auto-management/bitfusion": "all",
        "bitfusion-client/os": "centos8",
        "bitfusion-client/version": "401",
    }


@pytest.mark.parametrize(
    ("dialect", "metadata", "limits", "held"),
    [
        (
            there(volcano()),
            {"annotations": {"volcano.sh/vgpu-ids-new": "GPU-a,NVIDIA,655,2:"}},
            {},
            (20, 655),
        ),
        (
            there(koordinator()),
            {
                "annotations": {
                    "scheduling.koordinator.sh/device-allocated": '{"gpu":[{"minor":1,"resources":'
                    '{"koordinator.sh/gpu-core":"2","koordinator.sh/gpu-memory":"655Mi"}}]}'
                }
            },
            {},
            (20, 655),
        ),
        (there(gke("mps", 20)), {}, {"nvidia.com/gpu": 1}, (50, 768)),
        (
            there(aliyun()),
            {"annotations": {"ALIYUN_COM_GPU_MEM_IDX": "1"}},
            {"aliyun.com/gpu-mem": 8},
            (250, 8192),
        ),
        (there(BITFUSION), {}, {"bitfusion.io/gpu-amount": 1, "bitfusion.io/gpu-percent": 10}, (100, 0)),
    ],
)
def test_what_a_pod_holds(
    dialect: Dialect, metadata: dict[str, Any], limits: dict[str, int], held: tuple[int, int]
) -> None:
    (use,) = usage(dialect, [pod(limits=limits, **metadata)])
    assert (use.milli[0], use.memory_mib[0]) == held
