"""The kernels of a course, shown without being installed."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

from gpu_pool_client import Holder, NotAllowed, SliceRequest, connect, parse_request
from gpu_pool_kernels import installer, offered
from gpu_pool_kernels.offered import KERNELS_VARIABLE, PRELOAD_VARIABLE, OfferedKernels
from support.terminal import eventually

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
    folder = put("course", PYTHON)
    helper = folder / "helper.sh"
    helper.write_text("#!/bin/sh\n")
    helper.chmod(0o755)
    manager = OfferedKernels()
    offered = manager.get_kernel_spec("Course-GPU-2pct")
    (made,) = installer.install([parse_request("2%")], base="course", prefix=tmp_path / "elsewhere")
    theirs = KernelSpecManager(kernel_dirs=[str(made.path.parent)]).get_kernel_spec(made.name)
    # A script runs from where it is: in a folder for temporary files, perhaps nothing may be executed.
    assert offered.argv == ["python", "-m", "x", str(folder)]
    assert offered.to_dict() == {**theirs.to_dict(), "argv": offered.argv}
    assert os.access(Path(offered.resource_dir, "helper.sh"), os.X_OK)
    for file in ("logo-svg.svg", "logo-64x64.png"):
        assert Path(offered.resource_dir, file).read_bytes() == (made.path / file).read_bytes()


def test_installed_kernels_on_slices_are_hidden(put: Put, tmp_path: Path) -> None:
    put("course", PYTHON)
    put("own", {**PYTHON, "metadata": {"kernel_provisioner": {"provisioner_name": "gpu-pool"}}})
    installer.install([parse_request("1")], base="course", prefix=tmp_path)
    (tmp_path / "share/jupyter/kernels/course-gpu-1gpu").rename(tmp_path / "kernels/course-gpu-1gpu")
    manager = OfferedKernels()
    assert manager.inner.get_kernel_spec("course-gpu-1gpu").display_name == "Course (whole GPU)"
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


IPYTHON = {**PYTHON, "argv": ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]}


def configs(manager: KernelSpecManager) -> dict[str, object]:
    """Return the provisioner's settings of the kernels on slices, without the slice."""
    found = {}
    for name, entry in manager.get_all_specs().items():
        stanza = entry["spec"]["metadata"].get("kernel_provisioner", {})
        if stanza.get("provisioner_name") == "gpu-pool":
            found[name] = {key: value for key, value in stanza["config"].items() if key != "slice"}
    return found


def test_a_course_says_what_its_ipython_kernels_preload(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    put("course", IPYTHON)
    put("other", PYTHON)
    monkeypatch.setenv(PRELOAD_VARIABLE, '{"modules": ["numpy"], "with_server": "0.1"}')
    assert configs(OfferedKernels(inner=KernelSpecManager(ensure_native_kernel=False))) == {
        "course-gpu-2pct": {"preload": ["numpy"]},
        "course-gpu-10pct": {"preload": ["numpy"], "preload_with_server": True},
        "other-gpu-2pct": {},
        "other-gpu-10pct": {},
    }


@pytest.mark.parametrize(
    "text", ["nonsense", "[]", "{}", "5", '{"modules": 5}', '{"modules": [], "with_server": "x"}']
)
def test_what_is_preloaded_and_cannot_be_read_stops_nobody(
    put: Put, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    put("course", IPYTHON)
    monkeypatch.setenv(PRELOAD_VARIABLE, text)
    found = configs(OfferedKernels(inner=KernelSpecManager(ensure_native_kernel=False)))
    assert found == {"course-gpu-2pct": {}, "course-gpu-10pct": {}}
    assert "GPU_POOL_PRELOAD cannot be read, so nothing is preloaded" in caplog.text


def test_outside_a_course_nothing_changes(put: Put, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put("own", {**PYTHON, "metadata": {"kernel_provisioner": {"provisioner_name": "gpu-pool"}}})
    monkeypatch.delenv(KERNELS_VARIABLE)
    manager = OfferedKernels()
    assert manager.get_all_specs() == KernelSpecManager().get_all_specs()
    assert str(tmp_path / "kernels") in manager.kernel_dirs


COURSE = "title: A course\nslices: [{name: Small, request: 2%}, {name: Large, request: 10%}]\n"


@pytest.fixture
def file(put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Follow the course of a pool's file at every look; return the file."""
    put("course", PYTHON)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/gpu_pool_config.py").write_text(f"c.PoolSettings.courses_dir = {str(tmp_path)!r}")
    variables = {
        "JUPYTER_CONFIG_DIR": f"{tmp_path}/config",
        "GPU_POOL_URL": f"embedded:{tmp_path}/pool/store.db",
        "GPU_POOL_DEVICES": "V100-SXM2-32GB:1",
        "GPU_POOL_COURSE": "cs101",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "cs101.yaml"
    file.write_text(COURSE)
    return file


def on_slices(manager: KernelSpecManager) -> list[str]:
    return [name for name in names(manager) if name.startswith("course-gpu")]


async def knows(course: str) -> bool:
    """Whether the pool has read the file of a course."""
    async with connect() as pool:
        try:
            await pool.offers(Holder("somebody", course))
        except NotAllowed:
            return False
        return True


def following() -> OfferedKernels:
    """Return what asks the pool at every look, and waits for its first answer."""
    return OfferedKernels(ask_every=0.0, first_answer_within=60.0)


def test_a_course_that_changes_is_followed(file: Path) -> None:
    manager = following()
    assert on_slices(manager) == ["course-gpu-2pct", "course-gpu-10pct"]
    resources = Path(manager.get_kernel_spec("course-gpu-10pct").resource_dir)
    file.write_text(COURSE.replace("2%", "20%"))
    eventually(lambda: on_slices(manager) == ["course-gpu-10pct", "course-gpu-20pct"])
    made = {path.name for path in resources.parent.glob("course-*")}
    assert made == {"course-gpu-10pct", "course-gpu-20pct"}
    with pytest.raises(NoSuchKernel):
        manager.get_kernel_spec("course-gpu-2pct")


@pytest.mark.parametrize("spoil", [lambda file: file.write_text("title: ["), Path.unlink])
def test_of_a_file_with_an_error_or_none_the_last_word_holds(
    file: Path, spoil: Callable[[Path], object]
) -> None:
    file.write_text(COURSE.replace("2%", "20%"))
    manager = following()
    assert on_slices(manager) == ["course-gpu-10pct", "course-gpu-20pct"]
    spoil(file)
    other = file.with_name("other.yaml")
    other.write_text("title: Another\n")
    # The pool's answer of after that change is there once it knows of the other file.
    eventually(lambda: asyncio.run(knows(other.stem)))
    for _ in range(3):
        assert on_slices(manager) == ["course-gpu-10pct", "course-gpu-20pct"]


def test_who_is_not_in_the_course_is_told_nothing_of_it(file: Path) -> None:
    file.write_text(COURSE.replace("2%", "20%") + "who: {users: [somebody-else]}\n")
    assert on_slices(OfferedKernels()) == ["course-gpu-2pct", "course-gpu-10pct"]


def test_a_pool_that_is_away_hides_no_kernel_and_is_left_alone(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GPU_POOL_URL", "nonsense:")
    manager = OfferedKernels(log=logging.getLogger("server"))
    assert on_slices(manager) == on_slices(manager) == ["course-gpu-2pct", "course-gpu-10pct"]
    assert [record.message for record in caplog.records if "did not say what cs101 offers" in record.message]
    assert sum("did not say what cs101 offers" in record.message for record in caplog.records) == 1


class SlowPool:
    """A pool whose answer may come once somebody says so. In the place of what ``connect`` finds."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Semaphore(0), threading.Semaphore(0)
        self.answers = 0

    async def __aenter__(self) -> SlowPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close nothing."""

    async def offers(self, _: Holder) -> tuple[SliceRequest, ...]:
        self.asked.release()
        assert await asyncio.to_thread(self.may_answer.acquire, timeout=60)
        self.answers += 1
        return (parse_request(f"{4 + self.answers}%"),)


@pytest.fixture
def slow(file: Path, monkeypatch: pytest.MonkeyPatch) -> SlowPool:
    pool = SlowPool()
    monkeypatch.setattr(offered, "connect", lambda _: pool)
    return pool


def test_an_answer_that_takes_long_serves_whoever_asks_next(slow: SlowPool) -> None:
    manager = OfferedKernels(ask_every=0.0, first_answer_within=0.0)
    assert on_slices(manager) == ["course-gpu-2pct", "course-gpu-10pct"]
    assert slow.asked.acquire(timeout=60)
    for _ in range(3):
        assert on_slices(manager) == ["course-gpu-2pct", "course-gpu-10pct"]
    assert not slow.asked.acquire(blocking=False), "it is asked once at a time"
    slow.may_answer.release()
    eventually(lambda: on_slices(manager) == ["course-gpu-5pct"])


def test_a_pool_that_is_slow_is_waited_for_once(slow: SlowPool) -> None:
    slow.may_answer.release()
    manager = following()
    assert on_slices(manager) == ["course-gpu-5pct"], "the first answer is waited for"
    assert slow.asked.acquire(timeout=60)
    # The pool does not answer again before this has returned.
    assert on_slices(manager) == ["course-gpu-5pct"]
    assert slow.asked.acquire(timeout=60), "it is asked all the same"
    slow.may_answer.release()
    eventually(lambda: on_slices(manager) == ["course-gpu-6pct"])


def test_a_server_that_has_a_slice_itself_follows_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "[]")
    assert on_slices(OfferedKernels()) == []


def test_nothing_is_left_of_it(put: Put) -> None:
    put("course", PYTHON)
    manager = OfferedKernels()
    folder = Path(manager.get_kernel_spec("course-gpu-2pct").resource_dir)
    del manager
    gc.collect()
    assert not folder.exists()
