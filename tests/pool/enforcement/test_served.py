"""A service that owns its devices: MPS from the settings to what a client is told, against the stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_pool_client import LeaseState, Pool, PoolUnreachable, Strength, connect, parse_request
from support import mps_stub
from support.mps_stub import V100, Stub
from support.pools import ME, eventually, key

pytestmark = pytest.mark.long
SCENARIO = f"driver 550.54.14\ngpu {V100.uuid} {V100.model}\nmemory 32768 274\nbus 1\n"
SETTINGS = 'c.PoolSettings.tier = "mps"\nc.PoolSettings.runtime_dir = {!r}\n'


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """Install the stand-ins alone: a service refuses a machine on which somebody else's MPS runs."""
    with mps_stub.installed(tmp_path / "bin", monkeypatch, alone=True) as stub:
        yield stub


class Served:
    """``gpu-pool serve`` over one V100 of the stand-ins."""

    def __init__(self, folder: Path, runtime: Path, nvml: Path) -> None:
        self.folder, self.url = folder, f"unix:{folder}/pool.sock"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("GPU_POOL_")},
            "LD_LIBRARY_PATH": str(nvml),
            "NVML_STUB_SCENARIO": str(folder / "scenario.txt"),
            "JUPYTER_CONFIG_DIR": str(folder),
        }
        (folder / "scenario.txt").write_text(SCENARIO)
        (folder / "gpu_pool_config.py").write_text(SETTINGS.format(str(runtime)))

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        arguments = ["serve", f"--socket={self.folder}/pool.sock", f"--store={self.folder}/store.db"]
        with open(self.folder / "log", "ab") as log:
            self.process = process = subprocess.Popen(
                [sys.executable, "-m", "gpu_pool.cli", *arguments],
                env=self._environment,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    async def pool(self) -> Pool:
        """Return the pool once it answers."""
        log = self.folder / "log"
        await eventually(lambda: ": Serving " in log.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, log.read_text()
        return connect(self.url)


@pytest.fixture
def served(stub: Stub, runtime: Path, nvml: Path) -> Served:
    folder = runtime / "s"
    folder.mkdir(mode=0o700)
    return Served(folder, runtime / "r", nvml)


async def test_a_client_gets_the_slice_with_its_limits_and_the_truth_about_them(
    served: Served, stub: Stub
) -> None:
    with served.running() as process:
        pool = await served.pool()
        lease = await pool.request(parse_request("2%"), ME, key())
        assert lease.variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=649M"
        assert f"{V100.uuid}/" in lease.environment["CUDA_MPS_PIPE_DIRECTORY"]
        # Without CUDA nobody could try to evade the limit, so it is not called hard.
        assert lease.enforcement.memory.strength is Strength.COOPERATIVE
        assert "MPS" in lease.describe_limits()
        assert "set_default_device_pinned_mem_limit 0 649M" in stub.asked()
        other = await pool.request(parse_request("10%"), ME, key())
        assert other.state is LeaseState.WAITING
        await pool.release(lease.id)
        assert (await pool.wait(other.id)).memory_mib == 3249
        assert "set_default_device_pinned_mem_limit 0 3249M" in stub.asked()
        await pool.release(other.id)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert stub.processes() == []
    assert stub.mode() == "Default"


async def test_a_service_that_was_killed_finds_its_daemon_and_its_leases(served: Served, stub: Stub) -> None:
    with served.running() as process:
        pool = await served.pool()
        lease = await pool.request(parse_request("2%"), ME, key())
        daemons = {each.pid for each in stub.processes("nvidia-cuda-mps-control")}
        process.kill()
        process.wait()
    (served.folder / "log").write_text("")
    with served.running():
        again = await (await served.pool()).get_lease(lease.id)
        assert (again.state, again.variables) == (LeaseState.HELD, lease.variables)
        assert {each.pid for each in stub.processes("nvidia-cuda-mps-control")} == daemons


async def test_a_daemon_that_was_killed_is_started_again_and_its_holders_are_told(
    served: Served, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served.running():
        pool = await served.pool()
        lease = await pool.request(parse_request("2%"), ME, key())
        stub.kill()
        states = pool.watch(lease.id)
        told = ""
        while not told:
            told = (await anext(states)).notice
        assert "Restart the kernel" in told
        assert stub.processes("nvidia-cuda-mps-control")


async def test_a_daemon_that_does_not_start_is_told_in_words(served: Served, stub: Stub) -> None:
    stub.tell(no_daemon="no such luck")
    with served.running() as process:
        assert process.wait(60) != 0
    assert "no such luck" in (served.folder / "log").read_text()


async def test_a_pool_of_ones_own_is_refused_beside_the_service(served: Served) -> None:
    with served.running() as process:
        await served.pool()
        own = connect(f"embedded:{served.folder}/store.db")
        with pytest.raises(PoolUnreachable, match=rf"belongs to gpu-pool serve \(process {process.pid}\)"):
            await own.status()
        await own.close()
