"""The kernels of a course, shown without being installed."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

from gpu_pool_client import parse_request
from gpu_pool_kernels import installer
from gpu_pool_kernels.offered import KERNELS_VARIABLE, OfferedKernels

PYTHON = {"argv": ["python", "-m", "x", "{resource_dir}"], "display_name": "Course", "language": "python"}
JULIA = {"argv": ["julia"], "display_name": "Julia", "language": "julia"}

Put = Callable[..., Path]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Let Jupyter look in an empty folder, and put kernels there; offer 2% and 10%."""
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setattr("jupyter_client.kernelspec.jupyter_path", lambda name: [str(tmp_path / name)])
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv(KERNELS_VARIABLE, '["2%", "10%"]')

    def put(name: str, spec: dict[str, object]) -> Path:
        folder = tmp_path / "kernels" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel.json").write_text(json.dumps(spec))
        (folder / "logo-64x64.png").write_bytes(b"logo")
        return folder

    return put


def names(manager: KernelSpecManager) -> dict[str, str]:
    return {name: entry["spec"]["display_name"] for name, entry in manager.get_all_specs().items()}


def test_every_python_is_offered_on_every_slice(put: Put) -> None:
    put("course", PYTHON)
    put("julia", JULIA)
    manager = OfferedKernels(inner=KernelSpecManager(ensure_native_kernel=False))
    assert names(manager) == {
        "course": "Course",
        "julia": "Julia",
        "course-gpu-2pct": "Course (GPU 2%)",
        "course-gpu-10pct": "Course (GPU 10%)",
    }
    assert manager.find_kernel_specs().keys() == names(manager).keys()
    assert names(OfferedKernels(bases=["julia"])).keys() >= {"julia-gpu-2pct"}


def test_they_are_what_the_installer_makes(put: Put, tmp_path: Path) -> None:
    put("course", PYTHON)
    manager = OfferedKernels()
    offered = manager.get_kernel_spec("Course-GPU-2pct")
    (made,) = installer.install([parse_request("2%")], base="course", prefix=tmp_path / "elsewhere")
    theirs = KernelSpecManager(kernel_dirs=[str(made.path.parent)]).get_kernel_spec(made.name)
    assert offered.to_dict() == theirs.to_dict()
    for file in ("logo-svg.svg", "logo-64x64.png"):
        assert Path(offered.resource_dir, file).read_bytes() == (made.path / file).read_bytes()


def test_installed_kernels_on_slices_are_hidden(put: Put, tmp_path: Path) -> None:
    put("course", PYTHON)
    put("own", {**PYTHON, "metadata": {"kernel_provisioner": {"provisioner_name": "gpu-pool"}}})
    installer.install([parse_request("1")], base="course", prefix=tmp_path)
    (tmp_path / "share/jupyter/kernels/course-gpu-1gpu").rename(tmp_path / "kernels/course-gpu-1gpu")
    manager = OfferedKernels()
    assert manager.inner.get_kernel_spec("course-gpu-1gpu").display_name == "Course (1 GPU)"
    for name in ("own", "course-gpu-1gpu", "nothing"):
        assert name not in names(manager)
        with pytest.raises(NoSuchKernel):
            manager.get_kernel_spec(name)


def test_other_kernels_can_be_hidden(put: Put) -> None:
    put("course", PYTHON)
    inner = KernelSpecManager(ensure_native_kernel=False)
    assert names(OfferedKernels(inner=inner, other_kernels=False)).keys() == {
        "course-gpu-2pct",
        "course-gpu-10pct",
    }


def test_a_change_of_a_base_is_seen_and_nothing_else_is_written_again(put: Put) -> None:
    put("course", PYTHON)
    manager = OfferedKernels()
    written = Path(manager.get_kernel_spec("course-gpu-2pct").resource_dir, "kernel.json")
    before = written.stat().st_ino
    manager.get_all_specs()
    assert written.stat().st_ino == before
    put("course", {**PYTHON, "display_name": "New"})
    assert manager.get_kernel_spec("course-gpu-2pct").display_name == "New (GPU 2%)"


@pytest.mark.parametrize("text", ["nonsense", '{"a": 1}', "[2, null]", "5"])
def test_what_cannot_be_read_offers_nothing_and_stops_nobody(
    put: Put, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    put("course", PYTHON)
    monkeypatch.setenv(KERNELS_VARIABLE, text)
    assert not [name for name in names(OfferedKernels()) if "gpu" in name]


def test_outside_a_course_nothing_changes(put: Put, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put("own", {**PYTHON, "metadata": {"kernel_provisioner": {"provisioner_name": "gpu-pool"}}})
    monkeypatch.delenv(KERNELS_VARIABLE)
    manager = OfferedKernels()
    assert manager.get_all_specs() == KernelSpecManager().get_all_specs()
    assert str(tmp_path / "kernels") in manager.kernel_dirs


def test_nothing_is_left_of_it(put: Put) -> None:
    put("course", PYTHON)
    manager = OfferedKernels()
    folder = Path(manager.get_kernel_spec("course-gpu-2pct").resource_dir)
    del manager
    gc.collect()
    assert not folder.exists()
