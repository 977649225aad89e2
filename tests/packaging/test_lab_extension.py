"""JupyterLab's extension: its own tests, and its way into the wheel and out of the environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "labextension"
BUILT = SOURCES / "dist" / "package.json"
TARGET = "share/jupyter/labextensions/jupyter-gpu-pool"
built = pytest.mark.skipif(
    not BUILT.exists(), reason="JupyterLab's extension is not built: make labextension"
)


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command, and return all that it said."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def build(source: Path, out: Path, *kinds: str, **environment: str) -> str:
    return run(
        *(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *kinds, source), **environment
    )


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name.partition(".data/data/")[2] for name in archive.namelist()]


@pytest.mark.skipif(
    not (SOURCES / "node_modules" / "typescript").exists() or shutil.which("npm") is None,
    reason="what the tests of JupyterLab's extension need is not installed: npm ci in labextension/",
)
@pytest.mark.long
def test_the_tests_in_typescript_pass() -> None:
    assert "# fail 0" in run("npm", "test", cwd=SOURCES)


def test_no_registry_is_named() -> None:
    text = (SOURCES / "package-lock.json").read_text()
    assert '"resolved"' not in text
    assert "integrity" in text


def test_the_versions_are_one() -> None:
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    for file in ("package.json", "package-lock.json"):
        assert f'"version": "{version[1]}"' in (SOURCES / file).read_text().partition('"license"')[0], file


@built
@pytest.mark.long
def test_a_wheel_from_an_sdist_needs_no_node(tmp_path: Path) -> None:
    build(ROOT, tmp_path, "--sdist")
    shutil.unpack_archive(only(tmp_path, "*.tar.gz"), tmp_path)
    source = only(tmp_path, "jupyter_gpu_pool-*[0-9]")
    build(source, tmp_path / "out", "--wheel", PATH=str(tmp_path), GPU_POOL_LABEXTENSION="required")
    held = names(only(tmp_path / "out", "*.whl"))
    assert {f"{TARGET}/package.json", f"{TARGET}/install.json", f"{TARGET}/static/style.js"} <= {*held}
    assert f"{TARGET}/schemas/jupyter-gpu-pool/plugin.json" in held
    assert not (source / "labextension" / "node_modules").exists()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a copy of what git would keep."""
    copy = tmp_path / "clone"
    listed = run(
        "git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"
    )
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists() and not name.startswith("tests/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_a_clone_without_node_works_without_it_and_says_so_once(clone: Path, tmp_path: Path) -> None:
    said = build(clone, tmp_path / "out", "--wheel", PATH=str(tmp_path))
    assert said.count("JupyterLab's extension is left out") == 1
    held = names(only(tmp_path / "out", "*.whl"))
    assert [name for name in held if name.startswith("share/jupyter/labextensions")] == []
    assert "etc/jupyter/jupyter_server_config.d/gpu_pool_provisioner.json" in held


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_where_it_is_required_a_wheel_without_it_is_a_failure(clone: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Node.js 18 or newer is needed, and here is none"):
        build(
            clone,
            tmp_path / "out",
            "--wheel",
            PATH=str(tmp_path),
            GPU_POOL_LABEXTENSION="required",
        )


@built
@pytest.mark.long
def test_it_is_enabled_by_installing_and_gone_by_uninstalling(tmp_path: Path) -> None:
    build(ROOT, tmp_path, "--wheel")
    home = tmp_path / "environment"
    run(sys.executable, "-m", "venv", home)
    python = home / "bin" / "python"
    before = {path for path in home.rglob("*") if "__pycache__" not in path.parts}
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", only(tmp_path, "*.whl"))
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if "jupyter_gpu_pool" not in each.name:
            (borrowed / each.name).symlink_to(each)
    environment = {"PYTHONPATH": str(borrowed), "NO_COLOR": "1", "HOME": str(tmp_path)}
    listed = run(python, "-m", "jupyterlab.labextensions", "list", cwd=tmp_path, **environment)
    plain = re.sub("\x1b\\[[0-9]*m", "", listed)
    assert re.search(r"jupyter-gpu-pool v[\d.]+ +enabled +OK +\(python, jupyter-gpu-pool\)", plain), listed
    run(python, "-m", "pip", "uninstall", "--yes", "--quiet", "jupyter-gpu-pool")
    after = {path for path in home.rglob("*") if "__pycache__" not in path.parts}
    assert [path for path in after - before if path.is_file()] == []
