"""Classic MPS: what the daemons are told, and what the leases are."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.enforcement import TierFailed
from gpu_pool.enforcement.mps import MpsTier
from gpu_pool.enforcement.privileged import Privileged
from gpu_pool.enforcement.privileged.program import SystemPaths
from gpu_pool_client import Device, Lease, Process, Strength
from support.mps_stub import OTHER, V100, Stub, lease

ONE_SIZE_655 = [
    "set_default_device_pinned_mem_limit 0 649M",
    "get_default_device_pinned_mem_limit 0",
    "set_default_active_thread_percentage 2",
    "get_default_active_thread_percentage",
]


@pytest.fixture
def tier(stub: Stub, runtime: Path) -> MpsTier:
    return make(stub, runtime)


def make(stub: Stub, runtime: Path, **options: object) -> MpsTier:
    smi = SystemPaths(nvidia_smi=f"{stub.folder / 'nvidia-smi'}")
    chosen = {"privileged": Privileged(system=smi, root=True), "timeout": 30.0, **options}
    return MpsTier(runtime, **chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "driver", "contexts"),
    [
        ("Tesla V100-SXM2-32GB", "550.54.14", 48),
        ("Tesla V100-SXM2-32GB", "580.95.05", 48),
        ("NVIDIA H100 80GB HBM3", "590.44.01", 60),
        ("NVIDIA GeForce GTX 1660", "590.44.01", 60),
        ("NVIDIA TITAN V", "570.1", 48),
        ("Tesla P100-PCIE-16GB", "580.95.05", 16),
        ("NVIDIA GeForce GTX 1080 Ti", "580.95.05", 16),
        ("Tesla K80", "470.1", 16),
        ("Quadro GP100", "470.1", 16),
        ("NVIDIA TITAN Xp", "470.1", 16),
        ("Quadro GV100", "470.1", 48),
        ("NVIDIA RTX PRO 6000 Blackwell", "615.71.09", 60),
        ("NVIDIA A100-SXM4-40GB", "", 48),
    ],
)
def test_context_slots_follow_the_card_and_the_driver(
    tier: MpsTier, model: str, driver: str, contexts: int
) -> None:
    adapted = tier.adapt(replace(V100, model=model, driver=driver))
    assert (adapted.contexts, adapted.one_size) == (contexts, contexts > 16)


def test_slices_of_several_sizes_are_a_choice(stub: Stub, runtime: Path) -> None:
    assert make(stub, runtime, one_size=False).adapt(V100).one_size is False


def test_a_prepared_device_has_a_daemon_that_admits_nobody(tier: MpsTier, stub: Stub, runtime: Path) -> None:
    tier.prepare(V100)
    asked = stub.asked()
    assert asked[0:2] == ["get_server_list", f"start_server -uid {os.geteuid()}"]
    assert "set_default_device_pinned_mem_limit 0 1M" in asked
    assert "set_default_active_thread_percentage 1" in asked
    (daemon,) = stub.processes("nvidia-cuda-mps-control")
    environ = daemon.environ()
    assert environ["CUDA_VISIBLE_DEVICES"] == V100.uuid
    assert environ["CUDA_MPS_PIPE_DIRECTORY"] == f"{runtime}/{V100.uuid}/pipe"
    assert len(stub.processes("nvidia-cuda-mps-server")) == 1
    assert stub.mode() == "Exclusive_Process"


def test_its_daemon_knows_no_secrets_of_the_pool(
    tier: MpsTier, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "secret")
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
    tier.prepare(V100)
    # The server may run as another user, who can read this.
    for process in stub.processes():
        assert not {"JUPYTERHUB_API_TOKEN", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"} & process.environ().keys()


def test_its_folders_are_private_where_its_clients_are_of_its_own_user(
    tier: MpsTier, stub: Stub, runtime: Path
) -> None:
    tier.prepare(V100)
    folder = runtime / V100.uuid
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "pipe", folder / "log")] == [0o700] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root serves other users")
def test_clients_of_other_users_reach_the_pipes_and_nothing_else(stub: Stub, runtime: Path) -> None:
    make(stub, runtime, multiuser=True).prepare(V100)
    folder = runtime / V100.uuid
    modes = [path.stat().st_mode & 0o777 for path in (folder, folder / "pipe", folder / "log")]
    assert modes == [0o711, 0o711, 0o700]
    assert "start_server -uid 0" in stub.asked()
    assert "-multiuser-server" in stub.processes("nvidia-cuda-mps-control")[0].cmdline()


def test_an_open_lease_has_its_size_as_the_limit_of_daemon_and_server(tier: MpsTier, stub: Stub) -> None:
    tier.prepare(V100)
    stub.asked()
    tier.open(lease("a"))
    (server,) = (each.pid for each in stub.processes("nvidia-cuda-mps-server"))
    assert stub.asked() == [
        *ONE_SIZE_655,
        "get_server_list",
        f"set_device_pinned_mem_limit {server} 0 649M",
        f"get_device_pinned_mem_limit {server} 0",
        f"set_active_thread_percentage {server} 2",
        f"get_active_thread_percentage {server}",
    ]


def test_its_processes_are_told_where_the_daemon_is_and_what_they_have(tier: MpsTier, runtime: Path) -> None:
    assert tier.describe(lease("a")).variables == {
        "CUDA_MPS_PIPE_DIRECTORY": f"{runtime}/{V100.uuid}/pipe",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=649M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "2",
    }
    assert list(tier.describe(lease("a", 1000)).variables) == ["CUDA_MPS_PIPE_DIRECTORY"]


def test_hard_is_said_only_of_devices_that_a_probe_found_closed(stub: Stub, runtime: Path) -> None:
    def strengths(device: Device, **options: object) -> tuple[Strength, Strength]:
        said = make(stub, runtime, **options).describe(lease("a", 20, device)).enforcement
        return said.memory.strength, said.compute.strength

    assert strengths(V100) == (Strength.COOPERATIVE,) * 2
    assert strengths(V100, hard=[V100.uuid]) == (Strength.HARD,) * 2
    assert strengths(V100, hard=[OTHER.uuid]) == (Strength.COOPERATIVE,) * 2
    assert strengths(V100, hard=[V100.uuid], one_size=False) == (Strength.COOPERATIVE,) * 2
    pascal = replace(V100, model="Tesla P100-PCIE-16GB")
    assert strengths(pascal, hard=[V100.uuid]) == (Strength.NONE,) * 2


def test_no_limit_is_hard_for_root_whoever_was_tried(
    stub: Stub, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make(stub, runtime, hard=[V100.uuid])

    def said(held: Lease) -> str:
        found = tier.describe(held).enforcement
        return f"{found.memory}; {found.compute}"

    cooperative = "cooperative (MPS, each process); cooperative (MPS, a ceiling of 2%)"
    assert said(lease("a", user=pwd.getpwuid(0).pw_name)) == cooperative
    attached = replace(lease("a"), process=Process.current())
    for owner, strength in ((12345, "hard"), (None, "hard"), (0, "cooperative")):
        monkeypatch.setattr("gpu_pool.enforcement.mps.probe.owner_of", lambda _pid, owner=owner: owner)
        assert said(attached) == cooperative.replace("cooperative", strength)
    # Whoever has its number in a container is not known from here.
    contained = replace(attached, process=replace(Process.current(), namespace="pid:[1]"))
    assert said(contained) == cooperative.replace("cooperative", "hard")


def test_the_line_says_that_each_process_has_the_limit(tier: MpsTier) -> None:
    held = lease("a", 25)
    line = replace(held, enforcement=tier.describe(held).enforcement).describe_limits()
    assert line == (
        "memory: 812 MiB, cooperative (MPS, each process); compute: 2.5%, cooperative (MPS, a ceiling of 2%)"
    )


def test_a_device_has_one_size_until_it_is_empty(tier: MpsTier, stub: Stub) -> None:
    tier.prepare(V100)
    tier.open(lease("a"))
    tier.open(lease("b"))
    with pytest.raises(TierFailed, match="slices of 649 MiB now.*one size: 3249 MiB must wait"):
        tier.open(lease("c", 100))
    tier.close(lease("a"))
    stub.asked()
    tier.close(lease("b"))
    assert "set_default_device_pinned_mem_limit 0 1M" in stub.asked()
    tier.open(lease("c", 100))
    assert "set_default_device_pinned_mem_limit 0 3249M" in stub.asked()


def test_without_one_size_the_daemon_has_no_limits_of_its_own(stub: Stub, runtime: Path) -> None:
    tier = make(stub, runtime, one_size=False)
    tier.prepare(V100)
    tier.open(lease("a"))
    tier.open(lease("b", 100))
    limits = {line for line in stub.asked() if line.startswith("set_default")}
    assert limits == {
        "set_default_device_pinned_mem_limit 0 32494M",
        "set_default_active_thread_percentage 100",
    }


def test_one_more_of_the_same_size_takes_no_questions(tier: MpsTier, stub: Stub) -> None:
    tier.prepare(V100)
    tier.open(lease("a"))
    stub.asked()
    tier.open(lease("b"))
    assert stub.asked() == []


def test_cards_older_than_volta_have_mps_without_limits(tier: MpsTier, stub: Stub) -> None:
    pascal = replace(V100, model="Tesla P100-PCIE-16GB")
    tier.prepare(pascal)
    tier.open(lease("a", 20, pascal))
    tier.open(lease("b", 500, pascal))
    assert not [line for line in stub.asked() if line.startswith("set_")]


def test_whole_gib_are_recognised_in_the_answer(tier: MpsTier) -> None:
    device = replace(V100, memory_mib=4096)
    tier.prepare(device)
    tier.open(lease("a", 500, device))  # 2048M, which is shown as 2G


@pytest.mark.parametrize(
    "lied_about",
    [
        "set_default_device_pinned_mem_limit",
        "set_default_active_thread_percentage",
        "set_device_pinned_mem_limit",
        "set_active_thread_percentage",
    ],
)
def test_a_limit_that_is_said_to_be_set_and_is_not_fails(tier: MpsTier, stub: Stub, lied_about: str) -> None:
    tier.prepare(V100)
    stub.tell(lie=[lied_about])
    with pytest.raises(TierFailed, match="was told to limit processes to .* and says that the limit is"):
        tier.open(lease("a"))
    stub.tell()
    tier.open(lease("b", 100))  # the one that failed holds nothing


def test_several_devices_at_once_are_refused_in_words(tier: MpsTier) -> None:
    both = lease("a", 1000, V100, OTHER)
    with pytest.raises(TierFailed, match=r"2 GPUs were asked for at once.*Ask for one GPU"):
        tier.open(both)
    assert not tier.describe(both).variables


def test_each_device_has_a_daemon_of_its_own(tier: MpsTier, stub: Stub) -> None:
    tier.prepare(V100)
    tier.prepare(OTHER)
    visible = {each.environ()["CUDA_VISIBLE_DEVICES"] for each in stub.processes("nvidia-cuda-mps-control")}
    assert visible == {V100.uuid, OTHER.uuid}


def test_another_unix_user_is_refused_in_words(stub: Stub, runtime: Path) -> None:
    tier = make(stub, runtime)
    other = "nobody" if os.geteuid() == 0 else "root"
    with pytest.raises(TierFailed, match=f"one Unix user here .*, and {other} is another"):
        tier.open(lease("a", user=other))


def test_clients_are_ended_by_mps_before_they_may_be_killed(tier: MpsTier, stub: Stub) -> None:
    tier.prepare(V100)
    tier.open(lease("a"))
    stub.tell(clients={"*": [4711, 4712]})
    stub.asked()
    tier.evict(lease("a"), [4711, 1])
    (server,) = (each.pid for each in stub.processes("nvidia-cuda-mps-server"))
    assert stub.asked() == ["get_server_list", f"get_client_list {server}", f"terminate_client {server} 4711"]


@pytest.mark.long
def test_a_client_that_does_not_leave_is_said(stub: Stub, runtime: Path) -> None:
    tier = make(stub, runtime, timeout=8.0)
    tier.prepare(V100)
    stub.tell(clients={"*": [4711]}, stuck=[4711])
    with pytest.raises(TierFailed, match=r"did not take process 4711 off.*Killing it now may stop"):
        tier.evict(lease("a"), [4711])


def test_it_leaves_no_process_no_file_and_the_compute_mode_it_found(
    tier: MpsTier, stub: Stub, runtime: Path
) -> None:
    tier.prepare(V100)
    tier.open(lease("a"))
    tier.close(lease("a"))
    tier.stop()
    assert not stub.processes()
    assert list(runtime.iterdir()) == []
    assert stub.mode() == "Default"


def test_a_mode_that_was_exclusive_before_stays_so(tier: MpsTier, stub: Stub) -> None:
    stub.cards(mode="Exclusive_Process")
    tier.prepare(V100)
    tier.stop()
    assert stub.mode() == "Exclusive_Process"
    assert all("-c" not in call for call in stub.cards()["calls"])


def test_where_the_mode_may_not_be_set_mps_works_without(tier: MpsTier, stub: Stub) -> None:
    stub.cards(fixed=True)
    tier.prepare(V100)
    tier.open(lease("a"))
    tier.stop()
    assert stub.mode() == "Default"
