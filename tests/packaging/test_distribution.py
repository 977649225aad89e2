"""The sdist and the wheel: complete, alike, and working in an environment of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

#: To build it takes most of a minute.
pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
PACKAGES = ("kernels", "pool", "pool_client", "provisioner", "spawner")
#: Imports every module of the installed packages and prints where each came from.
IMPORT_EVERYTHING = """
import importlib, pkgutil
for name in ["gpu_pool_kernels", "gpu_pool", "gpu_pool_client", "gpu_pool_provisioner", "gpu_pool_spawner"]:
    package = importlib.import_module(name)
    print(name, package.__file__)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__"):
            print(module.name, importlib.import_module(module.name).__file__)
"""


@dataclass(frozen=True)
class Built:
    """What ``python -m build`` made."""

    sdist: Path
    wheel: Path


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return what it printed; fail with its whole output."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(source: Path, out: Path, *kinds: str) -> None:
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *kinds, source)


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def packed_files(wheel: Path) -> dict[str, bytes]:
    """Return name and content of every file of the wheel that is not about the wheel itself."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out, "--sdist", "--wheel")
    return Built(only(out, "*.tar.gz"), only(out, "*.whl"))


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the ``bin`` of a new environment that holds the wheel and borrows its dependencies."""
    home = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", home)
    python = home / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", built.wheel)
    # A path in a .pth file is searched last, and .pth files inside it are not read:
    # the project's own editable install stays invisible.
    (site,) = home.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def source_files() -> dict[str, bytes]:
    """Return every file of the five packages that git would keep, by its name in a wheel."""
    listed = run(
        *("git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
        *PACKAGES,
    )
    names = [name for name in listed.split("\0") if name and (ROOT / name).exists()]
    return {name.partition("/")[2]: (ROOT / name).read_bytes() for name in names}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout: nothing to compare with")
def test_the_wheel_holds_every_file_of_every_room_and_nothing_else(built: Built) -> None:
    data = f"{'-'.join(built.wheel.name.split('-')[:2])}.data/data"
    shared = {
        "docs/man": "share/man/man1",
        "jupyter-config/server-config": "etc/jupyter/jupyter_server_config.d",
    }
    others = {
        f"{data}/{target}/{file.name}": file.read_bytes()
        for folder, target in shared.items()
        for file in (ROOT / folder).iterdir()
    }
    packed = packed_files(built.wheel)
    # JupyterLab's extension is built, where that can be done, see test_lab_extension.py.
    ours = {
        name: held for name, held in packed.items() if not name.startswith(f"{data}/share/jupyter/labext")
    }
    assert ours == source_files() | others


def test_the_wheel_is_typed_and_offers_its_entry_points(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = archive.namelist()
        (entry_points,) = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    assert sum(name.endswith("/py.typed") for name in names) == len(PACKAGES)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for offered in (
        "gpu-pool = gpu_pool.cli:main",
        "gpu-pool = gpu_pool_provisioner.",
        "embedded = gpu_pool.",
        "hami = gpu_pool.cluster.dialects.",
        "mps = gpu_pool.enforcement.",
    ):
        assert offered in entry_points


def test_the_sdist_builds_the_same_wheel(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = only(tmp_path, "jupyter_gpu_pool-*")
    build(source, tmp_path / "again", "--wheel")
    assert packed_files(only(tmp_path / "again", "*.whl")) == packed_files(built.wheel)


def test_the_sdist_holds_what_a_packager_needs(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "docs/conf.py", "pyproject.toml"} <= names
    assert any(name.startswith("tests/") for name in names)


def test_every_module_imports_where_only_the_wheel_is_installed(installed: Path, tmp_path: Path) -> None:
    lines = run(installed / "python", "-c", IMPORT_EVERYTHING, cwd=tmp_path).splitlines()
    assert len(lines) > len(PACKAGES)
    assert [line for line in lines if str(installed.parent) not in line] == []


def test_the_manual_pages_are_installed(installed: Path) -> None:
    assert (installed.parent / "share/man/man1/gpu-pool-run.1").exists()


def test_a_jupyter_server_loads_our_extension(installed: Path, tmp_path: Path) -> None:
    command = (installed / "python", "-m", "jupyter_server.extension.serverextension", "list")
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True, check=True
    )
    said = done.stdout + done.stderr
    folder = installed.parent / "etc/jupyter"
    ours = said.partition(f"Config dir: {folder}")[2].partition("Config dir:")[0]
    assert "gpu_pool_provisioner enabled" in re.sub("\x1b\\[[0-9]*m", "", ours), said
    assert "gpu_pool_provisioner  OK" in re.sub("\x1b\\[[0-9]*m", "", ours), said


@pytest.mark.parametrize("command", ["gpu-pool", "jupyter-gpu-pool"])
def test_the_installed_command_tells_its_version(
    command: str, installed: Path, built: Built, tmp_path: Path
) -> None:
    version = built.wheel.name.split("-")[1]
    assert version in run(installed / command, "--version", cwd=tmp_path)


def test_after_uninstalling_nothing_is_left_that_jupyter_warns_of(built: Built, tmp_path: Path) -> None:
    """As the administrator's page says: kernels first, in all folders; then the package."""
    run(sys.executable, "-m", "venv", tmp_path / "environment")
    python = tmp_path / "environment/bin/python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", built.wheel)
    # Dependencies are borrowed, but not what is known there of this project: its provisioner would be found.
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if "jupyter_gpu_pool" not in each.name:
            (borrowed / each.name).symlink_to(each)
    (site,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("GPU_POOL", "JUPYTER"))},
        "HOME": str(tmp_path / "home"),
        "JUPYTER_PATH": str(tmp_path / "system/share/jupyter"),
    }

    def told(*command: str | Path) -> tuple[str, str]:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    gpu_pool, jupyter = python.parent / "gpu-pool", (python, "-m", "jupyter_client.kernelspecapp", "list")
    for place in (["--sys-prefix"], ["--user"], ["--prefix", str(tmp_path / "system")]):
        told(gpu_pool, "kernels", "install", "2%", *place)
    assert "python3-gpu-2pct" in told(*jupyter)[0]
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "system/share/jupyter/kernels/python3-gpu-2pct", kept)
    assert told(gpu_pool, "kernels", "remove", "--all")[0].count("Removed ") == 3
    told(python, "-m", "pip", "uninstall", "--yes", "--quiet", "jupyter-gpu-pool")
    shown, warned = told(*jupyter)
    assert ("python3 " in shown, "gpu" in shown, warned) == (True, False, "")
    # One that had been left behind is what Jupyter would warn of.
    kept.rename(tmp_path / "system/share/jupyter/kernels/python3-gpu-2pct")
    assert "gpu-pool" in told(*jupyter)[1]
