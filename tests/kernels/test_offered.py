"""Kernels that are offered over those that another manager than Jupyter's own finds."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager, NoSuchKernel

from gpu_pool_kernels.offered import KERNELS_VARIABLE, OfferedKernels

NAME = "conda-env-PythonData-py"


class Environments(KernelSpecManager):
    """Finds one kernel, and names it as it likes, as managers of conda environments do."""

    metadata: dict[str, Any] = {}  # noqa: RUF012 - one of a test's own is set on the object

    def get_all_specs(self) -> dict[str, Any]:
        spec = {
            "argv": ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": "PythonData",
            "language": "python",
            "env": {},
            "metadata": self.metadata,
        }
        return {NAME: {"resource_dir": str(self.data_dir), "spec": spec}}

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        entry = self.get_all_specs()[kernel_name]
        return KernelSpec(resource_dir=entry["resource_dir"], **entry["spec"])


@pytest.fixture
def environments(tmp_path: Path) -> Environments:
    return Environments(data_dir=str(tmp_path))


@pytest.mark.parametrize("slices", [None, '["2%"]'])
def test_names_with_capitals_are_found(
    environments: Environments, monkeypatch: pytest.MonkeyPatch, slices: str | None
) -> None:
    if slices is None:
        monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(KERNELS_VARIABLE, slices)
    manager = OfferedKernels(inner=environments)
    shown = manager.get_all_specs()
    assert len(shown) == (1 if slices is None else 2)
    for name, entry in shown.items():
        assert manager.get_kernel_spec(name).display_name == entry["spec"]["display_name"]
    with pytest.raises(NoSuchKernel):
        manager.get_kernel_spec("nothing")


def test_a_provisioner_that_is_not_named_as_jupyter_does_hides_no_kernels(
    environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, '["2%"]')
    environments.metadata = {"kernel_provisioner": "local-provisioner"}
    assert NAME in OfferedKernels(inner=environments).get_all_specs()


#: Shows kernels, and ends as it is told: killed, or in order after a forked child has ended so. Prints JSON.
SERVER = """
import json, os, signal, sys, tempfile
from gpu_pool_kernels.offered import OfferedKernels

tempfile.tempdir = sys.argv[1]
manager = OfferedKernels()
def files():
    return sorted(entry["resource_dir"] + "/kernel.json" for entry in manager.get_all_specs().values()
                  if entry["resource_dir"].startswith(sys.argv[1]))
ours = files()
said = {"ours": ours}
if sys.argv[2] == "killed":
    print(json.dumps(said), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, json.dumps(files() if sys.argv[2] == "forks and looks" else []).encode())
    sys.exit(0)
os.waitpid(child, 0)
said["childs"] = json.loads(os.read(reading, 65536))
said["left"] = [each for each in ours if os.path.exists(each)]
said["after"] = files()
print(json.dumps(said), flush=True)
"""


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for temporary files, empty; offer one slice."""
    monkeypatch.setenv(KERNELS_VARIABLE, '["2%"]')
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def serve(temporary: Path, how: str) -> dict[str, Any]:
    words = [sys.executable, "-c", SERVER, str(temporary), how]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 0)
    said: dict[str, Any] = json.loads(done.stdout)
    assert len(said["ours"]) == 1
    return said


def clean(temporary: Path) -> None:
    """Remove all of it, as a cleaner does."""
    for each in temporary.iterdir():
        shutil.rmtree(each)


def clean_kernels(temporary: Path) -> None:
    """Remove what is older than its folder."""
    for each in list(temporary.rglob("kernel.json")):
        shutil.rmtree(each.parent)


def clean_files(temporary: Path) -> None:
    """Remove the files alone."""
    for each in list(temporary.rglob("kernel.json")):
        each.unlink()


@pytest.mark.parametrize("cleaner", [clean, clean_kernels, clean_files])
def test_what_a_cleaner_of_temporary_files_has_removed_is_made_again(
    environments: Environments, temporary: Path, cleaner: Callable[[Path], None]
) -> None:
    manager = OfferedKernels(inner=environments)
    names = manager.get_all_specs().keys()
    cleaner(temporary)
    assert manager.get_all_specs().keys() == names
    for name in names - {NAME}:
        folder = Path(manager.get_kernel_spec(name).resource_dir)
        assert (folder / "kernel.json").exists()
        assert manager.kernel_dirs == [str(folder.parent)]
    assert manager.get_kernel_spec(NAME).display_name == "PythonData"


def test_other_kernels_are_shown_where_none_can_be_made_on_slices(
    environments: Environments, temporary: Path
) -> None:
    temporary.rmdir()
    manager = OfferedKernels(inner=environments)
    assert manager.get_all_specs().keys() == {NAME}
    assert manager.get_kernel_spec(NAME).display_name == "PythonData"
    temporary.mkdir()
    assert len(manager.get_all_specs()) == 2


def test_a_forked_child_that_ends_removes_nothing_of_its_servers(temporary: Path) -> None:
    said = serve(temporary, "forks")
    assert said["left"] == said["after"] == said["ours"]
    assert not list(temporary.iterdir())


def test_a_forked_child_that_looks_has_kernels_of_its_own(temporary: Path) -> None:
    said = serve(temporary, "forks and looks")
    assert len(said["childs"]) == 1
    assert said["childs"] != said["ours"]
    assert said["left"] == said["after"] == said["ours"]
    assert not list(temporary.iterdir())


def test_what_a_killed_server_has_left_is_removed_by_the_next(
    environments: Environments, temporary: Path
) -> None:
    (left,) = serve(temporary, "killed")["ours"]
    assert Path(left).exists()
    manager = OfferedKernels(inner=environments)
    assert len(manager.get_all_specs()) == 2
    assert not Path(left).exists()
    assert len(list(temporary.iterdir())) == 1
