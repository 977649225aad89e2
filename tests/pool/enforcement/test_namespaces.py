"""MPS version 3 and control groups: one namespace and one group for each lease."""

from __future__ import annotations

import os
import pwd
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.enforcement import TierFailed
from gpu_pool.enforcement.mps import ProbeOutcome
from gpu_pool.enforcement.mps_namespaces import CgroupTier
from gpu_pool.enforcement.privileged import Privileged
from gpu_pool.enforcement.privileged.program import SystemPaths
from gpu_pool_client import Device, Lease, Process, Strength
from support import mps_stub
from support.mps_stub import Stub, build_cuda
from support.pools import running

H100 = replace(mps_stub.V100, model="NVIDIA H100 80GB HBM3", memory_mib=81079, driver="615.71.09")
OTHER = replace(mps_stub.OTHER, model="NVIDIA H100 80GB HBM3", memory_mib=81079, driver="615.71.09")


def lease(name: str, milli: int = 20, *devices: Device, user: str = "nobody-of-that-name") -> Lease:
    return mps_stub.lease(name, milli, *(devices or (H100,)), user=user)


A, B = lease("1-aaaaaaaa"), lease("2-bbbbbbbb", 300)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder that stands for the control groups: each has its list of processes."""
    root = tmp_path / "cgroup"
    for folder in (root, root / "gpu-pool"):
        folder.mkdir()
        (folder / "cgroup.controllers").write_text("cpu dmem memory\n")
    make, remove = Path.mkdir, Path.rmdir

    def mkdir(path: Path, *how: object, **more: object) -> None:
        new = not path.exists()
        make(path, *how, **more)  # type: ignore[arg-type]
        if new and path.parent == root / "gpu-pool":
            (path / "cgroup.procs").write_text("")

    def rmdir(path: Path) -> None:
        (path / "cgroup.procs").unlink(missing_ok=True)
        remove(path)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "rmdir", rmdir)
    return root


def make(stub: Stub, runtime: Path, groups: Path, **options: object) -> CgroupTier:
    system = SystemPaths(f"{stub.folder / 'nvidia-smi'}", groups)
    chosen = {"privileged": Privileged(system=system, root=True), "timeout": 30.0, **options}
    return CgroupTier(runtime, **chosen)  # type: ignore[arg-type]


@pytest.fixture
def tier(stub: Stub, runtime: Path, groups: Path) -> CgroupTier:
    return make(stub, runtime, groups)


def group_limits(stub: Stub) -> dict[str, list[str]]:
    """Return the soft and hard limits by the name of the control group."""
    limits = stub.cards()[H100.uuid].get("limits", {})
    return {Path(path).name: values for path, values in limits.items() if Path(path).exists()}


def test_a_prepared_device_has_a_server_that_gives_nothing_by_itself(tier: CgroupTier, stub: Stub) -> None:
    tier.prepare(H100)
    assert [line for line in stub.asked() if "list" not in line] == [
        f"server create gpu_0 --uid={os.geteuid()} --allowed-devices={H100.uuid}",
        "server set gpu_0 --pinned-memory-limit=1M --active-thread-percentage=1",
    ]
    assert stub.mode() == "Exclusive_Process"
    (daemon,) = stub.processes("nvidia-cuda-mps-control")
    assert daemon.cmdline()[-3:] == ["-d", "-p", "3"]
    assert "CUDA_VISIBLE_DEVICES" not in daemon.environ()


def test_one_daemon_has_a_server_for_each_device(tier: CgroupTier, stub: Stub) -> None:
    tier.prepare(H100)
    tier.prepare(OTHER)
    assert len(stub.processes("nvidia-cuda-mps-control")) == 1
    assert len(stub.processes("nvidia-cuda-mps-server")) == 2


def test_leases_of_any_sizes_share_a_device(tier: CgroupTier, stub: Stub, runtime: Path) -> None:
    tier.prepare(H100)
    stub.asked()
    tier.open(A)
    tier.open(B)
    assert [line.split()[2:] for line in stub.asked() if line.startswith("namespace set")] == [
        [name, "--server=gpu_0", f"--pinned-memory-limit={mib}M", f"--active-thread-percentage={percent}"]
        for name, mib, percent in (("lease_1_aaaaaaaa", 1621, 2), ("lease_2_bbbbbbbb", 24323, 30))
    ]
    assert group_limits(stub) == {"1-aaaaaaaa": ["1621", "1621"], "2-bbbbbbbb": ["24323", "24323"]}
    pipe = f"{runtime}/daemon/pipe/gpu_0/lease_1_aaaaaaaa"
    assert tier.describe(A).variables == {"CUDA_MPS_PIPE_DIRECTORY": pipe}
    assert Path(pipe).is_dir()
    assert tier.adapt(H100).one_size is False


def test_a_limit_that_is_said_to_be_set_and_is_not_fails(tier: CgroupTier, stub: Stub) -> None:
    tier.prepare(H100)
    stub.tell(lie=["namespace set"])
    with pytest.raises(TierFailed, match=r"limit namespace lease_1_aaaaaaaa to 1621 MiB and 2%, and says"):
        tier.open(A)


def test_a_control_group_that_is_not_limited_fails(tier: CgroupTier, stub: Stub) -> None:
    tier.prepare(H100)
    stub.cards(lies=True)
    with pytest.raises(TierFailed, match=r"was limited to 1621 MiB, and says: .*hard limit: max"):
        tier.open(A)


@pytest.mark.long
def test_a_server_that_is_accepted_and_ends_is_noticed(stub: Stub, runtime: Path, groups: Path) -> None:
    tier = make(stub, runtime, groups, timeout=8.0)
    stub.tell(lie=["server create"])
    with pytest.raises(TierFailed, match=f"MPS server for {H100.uuid} ended at once"):
        tier.prepare(H100)
    assert (list(runtime.iterdir()), stub.processes(), stub.mode()) == ([], [], "Default")


def test_a_process_joins_the_group_with_what_it_has_started(tier: CgroupTier, groups: Path) -> None:
    tier.prepare(H100)
    tier.open(A)
    forks = "import subprocess; it = subprocess.Popen('cat'); print(it.pid, flush=True); it.wait()"
    joined = groups / "gpu-pool" / "1-aaaaaaaa" / "cgroup.procs"
    with running(forks) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        identity = Process.of(process.pid)
        assert identity is not None
        tier.attach(A, identity)
        # The kernel keeps a list; the file that stands for it keeps the last that was written.
        assert joined.read_text() == f"{child}"
        process.kill()
        process.wait()
    tier.attach(A, identity)  # which has ended: nothing to do


@pytest.mark.long
def test_clients_are_ended_by_mps_before_they_may_be_killed(stub: Stub, runtime: Path, groups: Path) -> None:
    tier = make(stub, runtime, groups, timeout=8.0)
    tier.prepare(H100)
    tier.open(A)
    stub.tell(clients={"gpu_0": [4711, 4712]})
    tier.evict(A, [4711, 1])
    assert "client terminate 4711" in stub.asked()
    stub.tell(clients={"gpu_0": [4712]}, stuck=[4712])
    with pytest.raises(TierFailed, match="did not take process 4712 off"):
        tier.evict(A, [4712])


def test_a_closed_lease_leaves_nothing(tier: CgroupTier, stub: Stub, runtime: Path, groups: Path) -> None:
    tier.prepare(H100)
    tier.open(A)
    stub.asked()
    tier.close(A)
    assert "namespace delete lease_1_aaaaaaaa --server=gpu_0 --force" in stub.asked()
    assert not (groups / "gpu-pool" / "1-aaaaaaaa").exists()
    limits = stub.cards()[H100.uuid]["limits"]
    assert list(limits.values()) == [["0", "max"]]
    tier.stop()
    assert (list(runtime.iterdir()), stub.processes(), stub.mode()) == ([], [], "Default")


def test_a_lease_that_could_not_be_closed_is_closed_when_that_is_tried_again(
    tier: CgroupTier, stub: Stub, groups: Path
) -> None:
    tier.prepare(H100)
    tier.open(A)
    stub.tell(refuse={"namespace delete": "not now"})
    with pytest.raises(TierFailed):
        tier.close(A)
    stub.tell()
    stub.asked()
    tier.close(A)
    assert "namespace delete lease_1_aaaaaaaa --server=gpu_0 --force" in stub.asked()
    assert not (groups / "gpu-pool" / A.id).exists()


def test_a_parked_lease_whose_process_lives_may_use_nothing(
    tier: CgroupTier, stub: Stub, groups: Path
) -> None:
    tier.prepare(H100)
    tier.open(A)
    (groups / "gpu-pool" / "1-aaaaaaaa" / "cgroup.procs").write_text("4711\n")
    tier.close(A)
    assert group_limits(stub) == {"1-aaaaaaaa": ["0", "0"]}
    tier.open(A)
    assert group_limits(stub) == {"1-aaaaaaaa": ["1621", "1621"]}


def test_after_a_crash_exactly_what_is_held_is_enforced(
    tier: CgroupTier, stub: Stub, runtime: Path, groups: Path
) -> None:
    tier.prepare(H100)
    tier.open(A)
    tier.open(B)
    before = {each.pid for each in stub.processes()}
    later = make(stub, runtime, groups)
    later.prepare(H100)
    stub.asked()
    later.recover([A])
    asked = stub.asked()
    assert "namespace delete lease_2_bbbbbbbb --server=gpu_0 --force" in asked
    assert not [line for line in asked if line.startswith("namespace create")]
    assert {each.pid for each in stub.processes()} == before
    assert {path.name for path in (groups / "gpu-pool").iterdir() if path.is_dir()} == {"1-aaaaaaaa"}
    later.close(A)
    later.stop()
    assert (list(runtime.iterdir()), stub.processes(), stub.mode()) == ([], [], "Default")


def test_a_daemon_that_was_killed_is_started_again_and_its_leases_are_told(
    tier: CgroupTier, stub: Stub
) -> None:
    tier.prepare(H100)
    tier.prepare(OTHER)
    tier.open(A)
    assert tier.tend() == {}
    stub.processes("nvidia-cuda-mps-control")[0].send_signal(signal.SIGKILL)
    stub.asked()
    assert list(tier.tend()) == ["1-aaaaaaaa"]
    asked = stub.asked()
    assert [line for line in asked if line.startswith("server create")]
    assert "namespace create lease_1_aaaaaaaa --server=gpu_0" in asked
    assert len(stub.processes("nvidia-cuda-mps-server")) == 2
    assert tier.tend() == {}


def test_an_older_driver_is_refused_in_words(tier: CgroupTier) -> None:
    with pytest.raises(TierFailed, match=r"615.*Turing"):
        tier.prepare(replace(H100, driver="580.95.05"))


def test_without_root_it_is_refused_in_words(stub: Stub, runtime: Path, groups: Path, tmp_path: Path) -> None:
    nobody = Privileged(program=tmp_path / "absent", root=False)
    with pytest.raises(TierFailed, match=r"need root\. Install gpu-pool-privileged"):
        make(stub, runtime, groups, privileged=nobody).prepare(H100)


def test_several_devices_at_once_are_refused_in_words(tier: CgroupTier) -> None:
    both = lease("1-aaaaaaaa", 1000, H100, OTHER)
    with pytest.raises(TierFailed, match=r"2 GPUs were asked for at once.*Ask for one GPU"):
        tier.open(both)
    assert not tier.describe(both).variables


def test_limits_are_hard_where_every_way_around_is_closed(
    stub: Stub, runtime: Path, groups: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make(stub, runtime, groups, hard=[H100.uuid])
    limits = tier.describe(A).enforcement
    assert (limits.memory.strength, limits.compute.strength) == (Strength.HARD,) * 2
    assert f"{limits.compute}" == "hard (MPS, a ceiling of 2%)"
    # Root may open the device to everybody, whoever was tried.
    roots = lease("3-cccccccc", user=pwd.getpwuid(0).pw_name)
    limits = tier.describe(roots).enforcement
    assert (limits.memory.strength, limits.compute.strength) == (Strength.COOPERATIVE,) * 2
    # The daemon's own user may tell it anything.
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{build_cuda(tmp_path)}")
    assert tier.probe(H100) is ProbeOutcome.OPENED
    assert tier.describe(A).enforcement.memory.strength is Strength.COOPERATIVE


@pytest.mark.parametrize(("hard", "strength"), [([], "cooperative"), ([H100.uuid], "hard")])
def test_the_line_says_that_each_process_has_the_limit_and_what_is_attached_has_it_together(
    stub: Stub, runtime: Path, groups: Path, hard: list[str], strength: str
) -> None:
    memory = make(stub, runtime, groups, hard=hard).describe(A).enforcement.memory
    assert f"{memory}" == f"{strength} (MPS, each process, and a control group for what is attached)"
