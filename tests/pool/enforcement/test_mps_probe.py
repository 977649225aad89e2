"""Whether a device is closed is tried with a process, against a stand-in for CUDA's library."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_pool.enforcement.mps import MpsTier, ProbeOutcome, attempt
from gpu_pool.enforcement.mps.probe import CONFUSING
from gpu_pool.enforcement.privileged import Privileged
from gpu_pool.enforcement.privileged.program import SystemPaths
from gpu_pool_client import Strength
from support.mps_stub import V100, Stub, build_cuda, lease

#: What cuInit, cuCtxCreate and an allocation past the limit return.
CLOSED, OPEN = "0 46 2", "0 0 2"


Answer = Callable[..., None]


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_cuda(tmp_path_factory.mktemp("cuda"))


def look(cuda: Path, answers: str, mib: int = 0, **variables: str) -> ProbeOutcome:
    told = {"LD_LIBRARY_PATH": f"{cuda}", "CUDA_STUB": answers, **variables}
    return attempt(V100.uuid, os.geteuid(), told, mib)


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        (CLOSED, ProbeOutcome.REFUSED),
        ("0 807 2", ProbeOutcome.REFUSED),  # an MPS server that admits nobody now
        (OPEN, ProbeOutcome.OPENED),
        ("100 0 2", ProbeOutcome.UNKNOWN),  # no device is seen, which says nothing about one that is
        ("803 0 2", ProbeOutcome.UNKNOWN),  # library and driver do not match
        ("0 2 2", ProbeOutcome.UNKNOWN),  # the device is full
        ("nothing", ProbeOutcome.UNKNOWN),
    ],
)
def test_only_a_refusal_by_the_driver_is_one(cuda: Path, answers: str, outcome: ProbeOutcome) -> None:
    assert look(cuda, answers) is outcome


def test_without_cuda_nothing_is_known(tmp_path: Path) -> None:
    assert look(tmp_path, OPEN) is ProbeOutcome.UNKNOWN


def test_memory_past_a_limit(cuda: Path) -> None:
    limit = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=100M"}
    assert look(cuda, OPEN, 101, **limit) is ProbeOutcome.REFUSED
    assert look(cuda, OPEN, 99, **limit) is ProbeOutcome.OPENED


def test_a_user_whose_processes_cannot_be_started_is_not_known(
    cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent")
    assert look(cuda, CLOSED) is ProbeOutcome.UNKNOWN


@pytest.fixture
def tier(stub: Stub, runtime: Path, cuda: Path, monkeypatch: pytest.MonkeyPatch) -> MpsTier:
    """Give a tier of root's, as it looks to a user who is another, without changing to one."""
    if os.geteuid() != 0:
        pytest.skip("only root can try what another user can do")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{cuda}")
    smi = SystemPaths(nvidia_smi=f"{stub.folder / 'nvidia-smi'}")
    tier = MpsTier(runtime, uid=12345, privileged=Privileged(system=smi, root=True), timeout=30.0)
    tier.prepare(V100)
    return tier


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Give a function that makes tries run as ourselves, with these answers of CUDA."""

    def answer(answers: str, **variables: str) -> None:
        def run(uuid: str, uid: int, given: dict[str, str] | None = None, mib: int = 0) -> ProbeOutcome:
            assert uid == 12345
            return attempt(uuid, os.geteuid(), {"CUDA_STUB": answers, **variables, **(given or {})}, mib)

        monkeypatch.setattr("gpu_pool.enforcement.mps.probe.attempt", run)

    return answer


def strength(tier: MpsTier) -> Strength:
    return tier.describe(lease("a")).enforcement.memory.strength


def test_a_device_that_refuses_both_tries_is_hard(tier: MpsTier, answering: Answer, stub: Stub) -> None:
    answering(CLOSED)
    stub.asked()
    assert tier.probe(V100) is ProbeOutcome.REFUSED
    assert strength(tier) is Strength.HARD
    told = [line for line in stub.asked() if line.startswith("set_default_device_pinned")]
    assert [line.split()[-1] for line in told] == ["1024M", "1M"]  # and nobody is admitted again


def test_a_device_that_a_terminal_can_open_is_not_hard(tier: MpsTier, answering: Answer) -> None:
    answering(OPEN)
    assert tier.probe(V100) is ProbeOutcome.OPENED
    assert strength(tier) is Strength.COOPERATIVE


@pytest.mark.parametrize("value", CONFUSING)
def test_a_limit_that_a_client_can_confuse_away_is_not_hard(
    tier: MpsTier, answering: Answer, value: str
) -> None:
    answering(CLOSED, CUDA_STUB_EVADED=value)
    assert tier.probe(V100) is ProbeOutcome.OPENED
    assert strength(tier) is Strength.COOPERATIVE


def test_a_device_that_was_hard_and_is_not_any_more(tier: MpsTier, answering: Answer) -> None:
    answering(CLOSED)
    tier.probe(V100)
    answering("803 0 0")
    assert tier.probe(V100) is ProbeOutcome.UNKNOWN
    assert strength(tier) is Strength.COOPERATIVE


def test_a_daemon_of_the_user_itself_is_never_hard(stub: Stub, runtime: Path) -> None:
    tier = MpsTier(runtime, privileged=Privileged(root=False), timeout=30.0)
    tier.prepare(V100)
    assert tier.probe(V100) is ProbeOutcome.OPENED
