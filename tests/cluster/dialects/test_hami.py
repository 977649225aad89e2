"""HAMi: MiB and percent, always both; and what its nodes and pods show."""

from __future__ import annotations

import pytest

from gpu_pool.cluster.dialects import Cluster, Dialect, DialectOptions, usage
from gpu_pool.cluster.dialects.hami import Hami
from gpu_pool_client import NeverFits, Strength, parse_request
from support.clusters import hami, named, pod


def cluster(*nodes: object, **options: object) -> Dialect:
    return Hami(Cluster.read(nodes), DialectOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_text", "limits"),
    [
        ("2%", {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "655", "nvidia.com/gpucores": "2"}),
        ("1.5GiB", {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1536", "nvidia.com/gpucores": "5"}),
        ("2x50%", {"nvidia.com/gpu": "2", "nvidia.com/gpumem": "16384", "nvidia.com/gpucores": "50"}),
        ("2", {"nvidia.com/gpu": "2", "nvidia.com/gpumem-percentage": "100", "nvidia.com/gpucores": "100"}),
    ],
)
def test_memory_and_cores_are_always_asked_for(request_text: str, limits: dict[str, str]) -> None:
    translation = cluster(hami(gpus=2)).translate(parse_request(request_text))
    assert translation.pod.limits == limits
    assert translation.pod.scheduler_name == "hami-scheduler"


def test_a_part_of_a_percent_of_compute_is_rounded_up_and_said() -> None:
    statement = cluster(hami(memory=81920)).translate(parse_request("0.5%")).statement
    assert (statement.milli, statement.memory_mib) == (10, 409)
    assert [str(each) for each in statement.rounded] == [
        "compute: asked for 0.5%, granted 1% (HAMi counts whole percents)"
    ]


def test_its_limits_are_held_by_those_who_do_not_evade_them() -> None:
    small, large, whole = (
        cluster(hami()).translate(parse_request(text)).statement for text in ("2%", "10%", "1")
    )
    assert small.enforcement.memory.strength is Strength.COOPERATIVE
    assert (small.nominal, large.nominal) == (("compute",), ())
    assert "regulates nothing below 10%" in small.enforcement.compute.by
    assert "loosely" in large.enforcement.compute.by
    assert whole.enforcement.memory.strength is Strength.HARD


def test_a_slice_in_which_cuda_does_not_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(
        NeverFits, match="2% is 327 MiB on the largest GPU here, and CUDA itself takes about 350"
    ):
        cluster(hami(memory=16384)).translate(parse_request("2%"))


def test_too_few_shares_of_a_gpu_are_said() -> None:
    few, enough = (cluster(hami(count=count)).translate(parse_request("2%")) for count in (10, 50))
    assert "at most 10 pods share a GPU here (deviceSplitCount), fewer than the 50" in str(few.statement)
    assert "deviceSplitCount" not in str(enough.statement)


def test_a_share_is_counted_for_the_smallest_gpu_that_holds_it() -> None:
    dialect = cluster(hami("a", memory=16384, model="T4"), hami("b"))
    on_both, on_one = (dialect.translate(parse_request(text)) for text in ("10%", "2%"))
    assert on_both.pod.limits["nvidia.com/gpumem"] == "1638"
    assert on_both.pod.annotations == {}
    assert on_one.pod.limits["nvidia.com/gpumem"] == "655"
    assert on_one.pod.annotations == {"nvidia.com/use-gputype": "NVIDIA-Tesla-V100-SXM2-32GB"}


def test_gpus_that_no_model_tells_apart_are_named_one_by_one() -> None:
    dialect = cluster(hami("a", 2))
    assert dialect.translate(parse_request("10% index=1")).pod.annotations == {
        "nvidia.com/use-gpuuuid": "GPU-a-1"
    }


def test_filters_that_nothing_meets_are_refused_with_what_there_is() -> None:
    with pytest.raises(NeverFits, match="There are: NVIDIA-Tesla-V100-SXM2-32GB"):
        cluster(hami()).translate(parse_request("10% model=H100"))


def test_more_gpus_than_a_node_has_are_refused() -> None:
    with pytest.raises(NeverFits, match="no node has more than 2"):
        cluster(hami("a", 2), hami("b", 2)).translate(parse_request("3"))


def test_gpus_in_mig_mode_are_not_asked_for_shares() -> None:
    with pytest.raises(NeverFits, match="HAMi's mig mode"):
        cluster(hami(mode="mig")).translate(parse_request("10%"))


def test_a_runtime_class_is_named_where_there_is_one() -> None:
    there = Hami(Cluster.read([hami()], runtime_classes=named("nvidia")))
    assert there.translate(parse_request("10%")).pod.runtime_class == "nvidia"
    assert cluster(hami()).translate(parse_request("10%")).pod.runtime_class is None
    assert cluster(hami(), runtime_class="mine").translate(parse_request("10%")).pod.runtime_class == "mine"


def test_the_policy_is_passed_on() -> None:
    annotations = cluster(hami(), policy="spread").translate(parse_request("10%")).pod.annotations
    assert annotations == {"hami.io/gpu-scheduler-policy": "spread"}


@pytest.mark.parametrize(
    "register",
    [
        "GPU-a,10,32768,100,NVIDIA-V100,0,true:GPU-b,10,16384,100,NVIDIA-T4,0,false:",
        "GPU-a,10,32768,100,NVIDIA-V100,0,true,0,hami-core:GPU-b,10,16384,100,NVIDIA-T4,0,false,1,hami-core:",
        '[{"id":"GPU-a","count":10,"devmem":32768,"type":"NVIDIA-V100","mode":"hami-core","health":true},'
        '{"id":"GPU-b","index":1,"count":10,"devmem":16384,"type":"NVIDIA-T4","mode":"hami-core"}]',
    ],
)
def test_every_spelling_of_the_register_is_read(register: str) -> None:
    node = hami()
    node["metadata"]["annotations"]["hami.io/node-nvidia-register"] = register
    gpus = [
        (gpu.device.uuid, gpu.device.memory_mib, gpu.device.contexts, gpu.drained)
        for gpu in cluster(node).gpus()
    ]
    assert gpus == [("GPU-a", 32768, 10, False), ("GPU-b", 16384, 10, True)]


@pytest.mark.parametrize(
    "register", ["", "nonsense", "[" * 100_000, "[1, null]", "a,b:c", "null", '[{"id": 7}]']
)
def test_a_register_that_cannot_be_read_breaks_nothing(register: str) -> None:
    node = hami()
    node["metadata"]["annotations"]["hami.io/node-nvidia-register"] = register
    assert all(gpu.device.memory_mib == 0 for gpu in cluster(node).gpus())


def test_what_is_held_is_read_per_gpu() -> None:
    allocated = {"hami.io/vgpu-devices-allocated": "GPU-n1-1,NVIDIA,655,2:;GPU-n1-1,NVIDIA,1000,3:;"}
    (node,) = usage(
        cluster(hami(gpus=2)), [pod(annotations=allocated), None, pod("w", on="", annotations=allocated)]
    )
    assert node.exact
    assert [(each.held_milli, each.held_memory_mib) for each in node.gpus] == [(0, 0), (50, 1655)]
    assert node.memory_mib == (1655, 65536)


def test_a_gpu_that_hami_has_cordoned_is_drained() -> None:
    node = hami(gpus=2)
    node["metadata"]["annotations"]["hami.io/device-cordon"] = "GPU-n1-0"
    (use,) = usage(cluster(node), [])
    assert [each.drained for each in use.gpus] == [True, False]
