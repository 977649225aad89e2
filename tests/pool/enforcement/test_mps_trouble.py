"""Classic MPS when it cannot be used, and when something dies, hangs or has a fault."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.enforcement import TierFailed
from gpu_pool.enforcement.mps import MpsTier
from gpu_pool.enforcement.privileged import Privileged
from gpu_pool.enforcement.privileged.program import SystemPaths
from support.mps_stub import OTHER, V100, Stub, lease


def make(stub: Stub, runtime: Path, **options: object) -> MpsTier:
    """Return a tier as a pool makes one when it starts."""
    smi = SystemPaths(nvidia_smi=f"{stub.folder / 'nvidia-smi'}")
    chosen = {"privileged": Privileged(system=smi, root=True), "timeout": 30.0, **options}
    return MpsTier(runtime, **chosen)  # type: ignore[arg-type]


@pytest.fixture
def tier(stub: Stub, runtime: Path) -> MpsTier:
    return make(stub, runtime)


@pytest.fixture
def hasty(stub: Stub, runtime: Path) -> MpsTier:
    """Make a tier that does not wait long."""
    return make(stub, runtime, timeout=8.0)


def limits(stub: Stub) -> set[str]:
    """Return the memory limits that daemons were told since the last look."""
    return {line.split()[-1] for line in stub.asked() if line.startswith("set_default_device_pinned")}


def test_no_mps_on_the_machine(tier: MpsTier, stub: Stub) -> None:
    (stub.folder / "nvidia-cuda-mps-control").unlink()
    with pytest.raises(TierFailed, match=r"nvidia-cuda-mps-control was not found.*nvidia-compute-utils"):
        tier.prepare(V100)


def test_what_mps_does_not_divide(tier: MpsTier) -> None:
    with pytest.raises(TierFailed, match="is simulated"):
        tier.prepare(replace(V100, simulated=True))
    with pytest.raises(TierFailed, match='MIG instance.*Leave c.PoolSettings.tier at "auto"'):
        tier.prepare(replace(V100, mig_profile="1g.5gb"))


def test_a_daemon_of_somebody_else(tier: MpsTier, stub: Stub, runtime: Path) -> None:
    stub.start_elsewhere(runtime / "theirs")
    (theirs,) = stub.processes()
    with pytest.raises(
        TierFailed, match=f"MPS already runs on this machine: process {theirs.pid} of .*kill {theirs.pid}"
    ):
        tier.prepare(V100)
    assert stub.processes() == [theirs]


@contextmanager
def of_nobody(stub: Stub, program: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program as a user who holds nothing here, under the name of an MPS server."""
    name = f"{stub.folder / 'nvidia-cuda-mps-server'}"
    with subprocess.Popen([name, "600"], executable=program, user=65534, group=65534) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_another_users_process_is_not_mps_by_its_name_alone(tier: MpsTier, stub: Stub, runtime: Path) -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    runtime.chmod(0o755)
    real = Path(shutil.copy(sleep, runtime / "nvidia-cuda-mps-server"))
    with of_nobody(stub, real) as theirs, pytest.raises(TierFailed, match=f"process {theirs.pid} of nobody"):
        tier.prepare(V100)
    with of_nobody(stub, Path(sleep)):
        tier.prepare(V100)


def test_a_daemon_of_somebody_else_for_another_device_is_none_of_ours(
    tier: MpsTier, stub: Stub, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", OTHER.uuid)
    stub.start_elsewhere(runtime / "theirs")
    tier.prepare(V100)


def test_a_device_that_is_exclusive_to_somebody_else(tier: MpsTier, stub: Stub) -> None:
    stub.cards(mode="Exclusive_Process", apps=["4711, python"])
    with pytest.raises(TierFailed, match=r"process 4711 \(python\), and its compute mode.*admits no other"):
        tier.prepare(V100)
    assert not stub.processes()


def test_a_device_that_somebody_uses(tier: MpsTier, stub: Stub) -> None:
    stub.cards(apps=["4711, python"])
    with pytest.raises(TierFailed, match=r"is used by process 4711 \(python\)\. End it first \(kill 4711\)"):
        tier.prepare(V100)
    assert stub.mode() == "Default"


def test_a_process_whose_name_looks_like_more_of_them_is_one(tier: MpsTier, stub: Stub) -> None:
    stub.cards(apps=["4711, py\rthon\x1b[2J\n1, init"])
    with pytest.raises(TierFailed, match=r"process 4711 \(py\?thon\?\[2J\)\. End it first \(kill 4711\)"):
        tier.prepare(V100)


def test_a_device_that_is_prohibited(tier: MpsTier, stub: Stub) -> None:
    stub.cards(mode="Prohibited")
    with pytest.raises(TierFailed, match="Prohibited: nothing may use it.*-c DEFAULT"):
        tier.prepare(V100)


def test_a_daemon_that_does_not_start_leaves_everything_as_it_was(
    tier: MpsTier, stub: Stub, runtime: Path
) -> None:
    stub.tell(no_daemon="Failed to start: operation not permitted")
    with pytest.raises(TierFailed, match="operation not permitted"):
        tier.prepare(V100)
    assert (list(runtime.iterdir()), stub.processes(), stub.mode()) == ([], [], "Default")


@pytest.mark.long
def test_a_server_that_does_not_start_leaves_everything_as_it_was(
    hasty: MpsTier, stub: Stub, runtime: Path
) -> None:
    stub.tell(lie=["start_server"])
    with pytest.raises(TierFailed, match="MPS server did not start"):
        hasty.prepare(V100)
    assert (list(runtime.iterdir()), stub.processes(), stub.mode()) == ([], [], "Default")


def test_a_folder_that_is_too_deep_for_sockets(stub: Stub, runtime: Path) -> None:
    with pytest.raises(TierFailed, match="too long a name.*such as /run/gpu-pool"):
        make(stub, runtime / ("x" * 60)).prepare(V100)


@pytest.mark.skipif(os.geteuid() == 0, reason="root serves all users")
def test_other_users_need_root(stub: Stub, runtime: Path) -> None:
    with pytest.raises(TierFailed, match="needs a pool that runs as root"):
        make(stub, runtime, multiuser=True).prepare(V100)


@pytest.mark.long
def test_a_daemon_that_hangs_is_not_waited_for(hasty: MpsTier, stub: Stub) -> None:
    hasty.prepare(V100)
    stub.tell(hang=["set_default_device_pinned_mem_limit"])
    with pytest.raises(TierFailed, match=r"nvidia-cuda-mps-control .* did not answer within 8 s"):
        hasty.open(lease("a"))


def test_a_daemon_that_refuses_is_quoted(tier: MpsTier, stub: Stub) -> None:
    tier.prepare(V100)
    stub.tell(refuse={"set_default_device_pinned_mem_limit": "Operation not permitted"})
    with pytest.raises(TierFailed, match="649M failed: Operation not permitted"):
        tier.open(lease("a"))


def test_a_daemon_that_was_killed_is_started_again_and_its_leases_are_told(tier: MpsTier, stub: Stub) -> None:
    tier.prepare(V100)
    tier.prepare(OTHER)
    tier.open(lease("a"))
    tier.open(lease("b", 20, OTHER))
    assert tier.tend() == {}
    (daemon,) = (
        each
        for each in stub.processes("nvidia-cuda-mps-control")
        if each.environ()["CUDA_VISIBLE_DEVICES"] == V100.uuid
    )
    daemon.send_signal(signal.SIGKILL)
    stub.asked()
    assert list(tier.tend()) == ["a"]
    assert limits(stub) == {"649M"}
    assert len(stub.processes("nvidia-cuda-mps-control")) == 2
    assert len(stub.processes("nvidia-cuda-mps-server")) == 2  # the one that it left behind is gone
    assert tier.tend() == {}


@pytest.mark.long
def test_a_shell_that_is_open_on_the_daemon_is_not_taken_for_it(
    tier: MpsTier, stub: Stub, runtime: Path
) -> None:
    tier.prepare(V100)
    tier.open(lease("a"))
    pipe = {"CUDA_MPS_PIPE_DIRECTORY": f"{runtime / V100.uuid / 'pipe'}"}
    tool = stub.folder / "nvidia-cuda-mps-control"
    daemons = stub.processes("nvidia-cuda-mps-control")
    with subprocess.Popen([tool], stdin=subprocess.PIPE, env={**os.environ, **pipe}) as shell:
        daemons[0].send_signal(signal.SIGKILL)
        assert list(tier.tend()) == ["a"]
        assert shell.poll() is None
        shell.kill()


@pytest.mark.long
def test_a_daemon_that_hangs_is_killed_and_started_again(hasty: MpsTier, stub: Stub) -> None:
    hasty.prepare(V100)
    hasty.open(lease("a"))
    (hung,) = stub.processes("nvidia-cuda-mps-control")
    stub.tell(hang=["get_server_list"])
    with pytest.raises(TierFailed):
        hasty.evict(lease("a"), [1])
    stub.tell()
    assert (
        hasty.tend() == {} == hasty.tend()
    )  # it may be slow, and its clients would lose all they have there
    assert hung in stub.processes()
    assert "started again" in hasty.tend()["a"]
    assert hung not in stub.processes()


def test_a_daemon_that_cannot_be_asked_is_left_alone(
    tier: MpsTier, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.prepare(V100)
    tier.open(lease("a"))
    before = stub.processes()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    for what in (subprocess, "Popen"), (tempfile, "TemporaryFile"):
        with monkeypatch.context() as patch:
            patch.setattr(*what, full)
            assert [tier.tend() for _ in range(5)] == [{}] * 5
    assert stub.processes() == before
    assert tier.tend() == {}


@pytest.mark.long
def test_one_device_that_cannot_be_mended_does_not_keep_others_from_it(hasty: MpsTier, stub: Stub) -> None:
    for device in (V100, OTHER):
        hasty.prepare(device)
        hasty.open(lease(device.uuid, 20, device))
    stub.kill("nvidia-cuda-mps-control")
    stub.tell(no_daemon="out of memory")
    told = hasty.tend()
    assert set(told) == {V100.uuid, OTHER.uuid}
    assert "could not be started again" in told[OTHER.uuid]
    assert "out of memory" in told[OTHER.uuid]


@pytest.mark.long
def test_a_daemon_that_dies_of_a_question(tier: MpsTier, stub: Stub) -> None:
    tier.prepare(V100)
    stub.tell(die=["set_default_active_thread_percentage"])
    with pytest.raises(TierFailed, match="MPS control daemon ended"):
        tier.open(lease("a"))
    stub.tell()
    tier.tend()
    tier.open(lease("a"))


def test_a_fault_ends_all_clients_then_the_server_and_the_leases_are_told(tier: MpsTier, stub: Stub) -> None:
    tier.prepare(V100)
    tier.open(lease("a"))
    (server,) = stub.processes("nvidia-cuda-mps-server")
    stub.tell(faulty=[server.pid], clients={"*": [4711, 4712]})
    stub.asked()
    assert "not by your doing" in tier.tend()["a"]
    asked = stub.asked()
    assert [line.split()[-1] for line in asked if line.startswith("terminate_client")] == ["4711", "4712"]
    assert server not in stub.processes()
    assert tier.tend() == {}


def test_a_fault_that_is_over_once_its_clients_have_gone(tier: MpsTier, stub: Stub) -> None:
    tier.prepare(V100)
    tier.open(lease("a"))
    (server,) = stub.processes("nvidia-cuda-mps-server")
    stub.tell(faulty=[server.pid], heals="terminate_client", clients={"*": [4711]})
    assert "not by your doing" in tier.tend()["a"]
    assert stub.processes("nvidia-cuda-mps-server") == [server]


@pytest.fixture
def crashed(stub: Stub, runtime: Path) -> Iterator[Stub]:
    """Leave what a pool leaves that is killed while it holds a lease on one device, and none on another."""
    code = f"""if True:
        import os, pathlib, signal
        from gpu_pool.enforcement.mps import MpsTier
        from gpu_pool.enforcement.privileged import Privileged
        from gpu_pool.enforcement.privileged.program import SystemPaths
        import pytest
        from support.mps_stub import OTHER, V100, Stub, lease
        Stub(pathlib.Path({f"{stub.folder}"!r})).hide_others(pytest.MonkeyPatch())
        system = SystemPaths(nvidia_smi={f"{stub.folder}/nvidia-smi"!r})
        tier = MpsTier(pathlib.Path({f"{runtime}"!r}), privileged=Privileged(system=system, root=True))
        tier.prepare(V100)
        tier.prepare(OTHER)
        tier.open(lease("a"))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    tests = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tests, env={**os.environ, "PYTHONPATH": f"{tests}"}
    )
    assert done.returncode == -signal.SIGKILL
    return stub


def test_after_a_crash_its_daemons_are_taken_over(crashed: Stub, runtime: Path) -> None:
    before = {each.pid for each in crashed.processes()}
    tier = make(crashed, runtime)
    tier.prepare(V100)
    tier.prepare(OTHER)
    crashed.asked()
    tier.recover([lease("a")])
    assert {each.pid for each in crashed.processes()} == before
    assert limits(crashed) == {"649M", "1M"}
    with pytest.raises(TierFailed, match="slices of 649 MiB now"):
        tier.open(lease("b", 100))
    tier.close(lease("a"))
    tier.stop()
    assert (list(runtime.iterdir()), crashed.processes(), crashed.mode()) == ([], [], "Default")


@pytest.mark.long
def test_after_a_crash_daemons_that_nobody_needs_are_stopped(crashed: Stub, runtime: Path) -> None:
    make(crashed, runtime).recover([])
    assert (list(runtime.iterdir()), crashed.processes(), crashed.mode()) == ([], [], "Default")


@pytest.mark.long
def test_after_a_crash_of_all_of_it_the_daemons_are_started_again(crashed: Stub, runtime: Path) -> None:
    crashed.kill()
    crashed.cards(apps=["4711, the lease's process, which lives on"])
    tier = make(crashed, runtime)
    tier.recover([lease("a")])
    assert limits(crashed) >= {"649M"}
    assert len(crashed.processes("nvidia-cuda-mps-control")) == 1
    assert [path.name for path in runtime.iterdir()] == [V100.uuid]


def test_a_file_with_somebody_elses_pid_does_not_mislead(tier: MpsTier, stub: Stub, runtime: Path) -> None:
    tier.prepare(V100)
    before = stub.processes()
    (runtime / V100.uuid / "pipe" / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}")
    assert tier.tend() == {}
    assert stub.processes() == before
