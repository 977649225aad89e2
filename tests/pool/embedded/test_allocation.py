"""What a Slurm job was given, as its environment and its node's description have it: without Slurm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpu_pool.embedded.allocation import (
    Allocation,
    SlurmSilent,
    check_fits,
    main,
    others_use,
    shards_per_gpu,
    shares_of,
)
from gpu_pool.store import files
from gpu_pool.store.device_table import ForeignUse
from gpu_pool_client import Device, NeverFits, parse_request

JOB = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
V100 = [Device(uuid=f"GPU-{n}", index=n, model="Tesla V100-SXM2-32GB", memory_mib=32768) for n in range(2)]
T4 = Device(uuid="GPU-t", index=2, model="Tesla T4", memory_mib=15360)
GRES = "gpu:v100:2,shard:v100:200"


def allocation(**more: str) -> Allocation:
    found = Allocation.of({**JOB, **more})
    assert found is not None
    return found


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7"},
        {**JOB, "SLURM_JOB_ID": "7; reboot"},
        {**JOB, "SLURMD_NODENAME": "n1\nn2"},
        {**JOB, "SLURMD_NODENAME": "--help all"},
    ],
)
def test_what_is_no_job_on_a_node_has_no_allocation(environ: Mapping[str, str]) -> None:
    assert Allocation.of(environ) is None


def test_in_a_shell_of_salloc_all_nodes_are_others() -> None:
    job = Allocation.of({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"})
    assert job == Allocation("7", "", has_others=True)


def test_a_job_of_several_nodes_has_others_unless_its_step_is_on_them_too() -> None:
    assert not allocation(SLURM_JOB_NUM_NODES="1").has_others
    assert allocation(SLURM_JOB_NUM_NODES="2").has_others
    assert allocation(SLURM_JOB_NUM_NODES="2", SLURM_STEP_NUM_NODES="1").has_others
    assert not allocation(SLURM_JOB_NUM_NODES="2", SLURM_STEP_NUM_NODES="2").has_others


def test_steps_tell_their_own_gpus() -> None:
    assert allocation(SLURM_JOB_GPUS="0,1").gpus == "0,1"
    assert allocation(SLURM_JOB_GPUS="0,1", SLURM_STEP_GPUS="1").gpus == "1"
    assert allocation(SLURM_SHARDS_ON_NODE="40").shards == 40
    assert allocation(SLURM_SHARDS_ON_NODE="many").shards is None


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        (GRES, {"v100": 100}),
        ("gpu:2,shard:200", {"": 100}),
        ("gpu:v100:2(S:0-1),shard:200(S:0-1)", {"": 100}),
        ("gpu:v100:2,gpu:t4:1,shard:v100:200,shard:t4:16,craynetwork:3", {"v100": 100, "t4": 16}),
        ("gpu:v100:2", {}),
        ("(null)", {}),
        ("shard:200", {}),
    ],
)
def test_how_many_shards_a_gpu_has(gres: str, found: Mapping[str, int]) -> None:
    assert shards_per_gpu(gres) == found


def test_a_share_is_that_of_the_shards() -> None:
    assert allocation(SLURM_SHARDS_ON_NODE="40").shares(V100[:1], GRES) == {"GPU-0": 400}
    assert allocation().shares(V100, GRES) == {"GPU-0": 1000, "GPU-1": 1000}


def test_of_several_gpus_each_has_what_the_others_cannot_have() -> None:
    assert allocation(SLURM_SHARDS_ON_NODE="120").shares(V100, GRES) == {"GPU-0": 200, "GPU-1": 200}
    assert allocation(SLURM_SHARDS_ON_NODE="200").shares(V100, GRES) == {"GPU-0": 1000, "GPU-1": 1000}
    assert allocation(SLURM_SHARDS_ON_NODE="60").shares(V100, GRES) == {"GPU-0": 0, "GPU-1": 0}


def test_types_are_told_apart_by_the_models_names() -> None:
    mixed = "gpu:v100:2,gpu:t4:1,shard:v100:200,shard:t4:16"
    assert allocation(SLURM_SHARDS_ON_NODE="8").shares([T4], mixed) == {"GPU-t": 500}
    unknown = Device(uuid="GPU-x", index=0, model="NVIDIA H100", memory_mib=81920)
    assert allocation(SLURM_SHARDS_ON_NODE="8").shares([unknown], mixed) == {"GPU-x": 80}


def test_a_node_without_shards_says_nothing_of_them() -> None:
    with pytest.raises(SlurmSilent, match="gpu:v100:2"):
        allocation(SLURM_SHARDS_ON_NODE="8").shares(V100, "gpu:v100:2")


def test_the_rest_of_a_gpu_is_others() -> None:
    assert others_use(V100[:1], {"GPU-0": 400}) == {"GPU-0": ForeignUse(600, 32768 * 600 // 1000)}
    assert others_use(V100, {"GPU-0": 1000, "GPU-1": 1000}) is None


def test_what_fits_the_rules_of_the_pool_is_left_to_them() -> None:
    shares, job = {"GPU-0": 400}, Allocation("7", "n1", shards=40)
    for size in ("40%", "13107MiB", "2x10%"):
        check_fits(parse_request(size), V100[:1], shares, job)
    for size in ("41%", "13500MiB", "1"):
        with pytest.raises(NeverFits, match=r"Slurm job 7 was given 40% of a GPU"):
            check_fits(parse_request(size), V100[:1], shares, job)


def test_a_part_by_mps_counts_where_the_node_has_such_parts() -> None:
    job = Allocation.of({**JOB, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40"})
    assert job is not None
    assert job.shares(V100[:1], "gpu:v100:2,mps:v100:200") == {"GPU-0": 400}
    # Our own limits set that variable for kernels, too.
    assert job.shares(V100[:1], "gpu:v100:2") == {"GPU-0": 1000}


def test_where_slurm_is_silent_parts_by_mps_are_whole_and_shards_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mps = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40"}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shares_of(allocation(**mps), V100[:1]) == {"GPU-0": 1000}
    with pytest.raises(SlurmSilent, match="scontrol cannot be run"):
        shares_of(allocation(SLURM_SHARDS_ON_NODE="40"), V100[:1])
    for name, value in {**JOB, **mps, "GPU_POOL_DEVICES": "T4@16GiB:1"}.items():
        monkeypatch.setenv(name, value)
    main()
    monkeypatch.setenv("SLURM_SHARDS_ON_NODE", "40")
    main()
    by_mps, by_shards = map(json.loads, capsys.readouterr().out.splitlines())
    assert (list(by_mps["shares"].values()), by_mps["problem"]) == ([1000], "")
    assert by_shards["devices"] == []
    assert "Slurm does not say how many shards a GPU has" in by_shards["problem"]


def test_the_store_is_on_a_local_disk(tmp_path: Path) -> None:
    network, local = tmp_path / "network", tmp_path / "local"
    network.mkdir()
    local.mkdir()
    mounts = [("/", "ext4"), (str(network), "lustre")]
    assert files.first_local([tmp_path / "absent", network, local], mounts) == local
    assert files.first_local([network], mounts) is None


def test_a_step_with_other_gpus_has_another_store(tmp_path: Path) -> None:
    environ = {"TMPDIR": str(tmp_path)}
    names = {
        allocation(**more).store(environ)
        for more in ({}, {"SLURM_STEP_GPUS": "0"}, {"SLURM_STEP_GPUS": "0", "SLURM_SHARDS_ON_NODE": "40"})
    }
    assert len(names) == 3
    assert all(each.name == "store.db" and each.parent.parent == tmp_path for each in names)
