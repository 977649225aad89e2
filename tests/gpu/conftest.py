"""The GPU of this machine and slices of it, or a plain reason why there are none."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.devices import discover
from gpu_pool.enforcement import Tier
from gpu_pool_client import Device
from support import entry_points
from support.gpu import TIERS, SharedDevice, hidden_processes, opened, torch_facts, why_not

# The benchmarks are tested, too, and are nowhere installed.
sys.path.append(str(Path(__file__).parents[2]))

ShareDevice = Callable[..., SharedDevice]


@pytest.fixture(scope="session")
def device() -> Device:
    """Return the first GPU that is not divided into MIG instances."""
    inventory = discover({})
    whole = [device for device in inventory.devices if device.mig_profile is None]
    if not inventory.devices:
        pytest.skip(f"no GPU: {inventory.problems[0]}")
    if not whole:
        pytest.skip("every GPU here is divided into MIG instances")
    return whole[0]


@pytest.fixture(scope="session")
def torch(device: Device) -> Mapping[str, Any]:
    """Return what PyTorch says of itself and of the device."""
    facts = torch_facts(device.uuid)
    if not facts:
        pytest.skip("the Python that runs this has no PyTorch")
    if not facts["available"]:
        pytest.skip(f"PyTorch {facts['torch']} finds no GPU: it is built without CUDA, or for another driver")
    return facts


@pytest.fixture(scope="session")
def seen(device: Device) -> None:
    """Skip where the driver does not tell which processes use the device."""
    why = hidden_processes(device)
    if why:
        pytest.skip(why)


@pytest.fixture
def share_device(device: Device, torch: object, tmp_path: Path) -> Iterator[ShareDevice]:
    """Make pools that divide the device: ``share_device(tier, **settings)``."""
    made: list[SharedDevice] = []

    def make(tier: Tier | None = None, **settings: Any) -> SharedDevice:
        folder = tmp_path / f"{len(made)}"
        folder.mkdir()
        made.append(SharedDevice(folder, device, tier, **settings))
        return made[-1]

    yield make
    for shared in made:
        shared.close()


@pytest.fixture
def shared(share_device: ShareDevice) -> SharedDevice:
    """Divide the device with nothing but the caps of the frameworks."""
    return share_device()


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, device: Device, torch: object) -> Iterator[Tier]:
    """Return each tier that this card and its driver allow."""
    why = why_not(request.param, device)
    if why:
        pytest.skip(why)
    with opened(request.param) as tier:
        yield tier


@pytest.fixture
def tiered(tier: Tier, share_device: ShareDevice) -> SharedDevice:
    """Divide the device by each tier; the processes on it end before the tier does."""
    return share_device(tier)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let Jupyter find this project, which may run from its sources."""
    missing = [name for name in ("jupyter_client", "ipykernel") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if entry_points.are_there():
        yield
        return
    folder = tmp_path_factory.mktemp("installed")
    entry_points.write(folder)
    sys.path.append(str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture
def install(installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Install kernels on slices of the GPU, for this test alone: ``install(size, **config)``."""
    for name, value in {
        "JUPYTER_PATH": str(tmp_path),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "GPU_POOL_URL": f"embedded:{tmp_path}/store.db",
    }.items():
        monkeypatch.setenv(name, value)

    def install(size: str, **config: Any) -> str:
        name = f"slice-{len(list(tmp_path.glob('kernels/*')))}"
        spec = tmp_path / "kernels" / name
        spec.mkdir(parents=True)
        provisioner = {"provisioner_name": "gpu-pool", "config": {"slice": size, **config}}
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        facts = {"argv": argv, "display_name": name, "language": "python"}
        (spec / "kernel.json").write_text(
            json.dumps({**facts, "metadata": {"kernel_provisioner": provisioner}})
        )
        return name

    return install
