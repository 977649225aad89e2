"""Another package in the place of nvidia-ml-py: named with what puts it right, and all else is looked at."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.suites import required
from support.terminal import Terminal

INSTALL = f"{sys.executable} -m pip install --upgrade --force-reinstall --no-deps nvidia-ml-py"


def seen(terminal: Terminal, folder: Path, message: str, remedy: str) -> None:
    """Look with that folder first on the path: it is said what is wrong, and all else is looked at."""
    there = {"PYTHONPATH": str(folder), "GPU_POOL_DEVICES": ""}
    for verb in ("list", "health", "doctor"):
        done = terminal.run(verb, env=there)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == (7 if verb == "list" else 1)
        assert message in said
        assert remedy in said
        assert "unexpected" not in said
    assert "broken gpus: " in said
    for check in ("python", "jupyter_client", "provisioner", "store"):
        assert f"ok {check}: " in said
    assert "kernels: none is installed" in said
    simulated = " ".join(terminal.run("doctor", env={"PYTHONPATH": str(folder)}).stdout.split())
    assert "ok gpus: 1 found by simulated (GPU_POOL_DEVICES)" in simulated
    assert f"note gpus: {message}" in simulated


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "version", "module"),
    [
        ("pynvml", "11.5.3", "pynvml/__init__.py"),
        ("pynvml", "8.0.4", "pynvml/__init__.py"),
        ("nvidia-ml-py3", "7.352.0", "pynvml.py"),
    ],
)
def test_a_package_that_shadows_nvidia_ml_py_is_named_with_the_two_commands(
    terminal: Terminal, pytestconfig: pytest.Config, name: str, version: str, module: str
) -> None:
    cache = pytestconfig.cache
    assert cache is not None
    folder = required([f"{name}=={version}"], cache)
    message = (
        f"The package {name} {version} takes the place of nvidia-ml-py, whose module has the same name, and "
        f"lacks what the NVIDIA driver is asked with, so no GPU can be found ({folder / module})."
    )
    uninstall = f"{sys.executable} -m pip uninstall -y {name}"
    seen(terminal, folder, message, f"Remove the one, then install the other again: {uninstall}; {INSTALL}")


@pytest.mark.long
def test_a_nvidia_ml_py_that_is_too_old_is_named(terminal: Terminal, pytestconfig: pytest.Config) -> None:
    cache = pytestconfig.cache
    assert cache is not None
    folder = required(["nvidia-ml-py==12.535.133"], cache)
    seen(terminal, folder, "nvidia-ml-py 12.535.133 is too old: it lacks what the NVIDIA driver is", INSTALL)


@pytest.mark.long
def test_a_module_of_no_package_is_named_by_its_file(terminal: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "shadow/pynvml.py"
    file.parent.mkdir()
    file.write_text("")
    message = f"{file} takes the place of nvidia-ml-py"
    seen(terminal, file.parent, message, f"Move it away, then install nvidia-ml-py again: {INSTALL}")


def test_nvidia_ml_py_without_its_module_is_to_be_installed_again(terminal: Terminal, tmp_path: Path) -> None:
    """As after another package with the same file has been removed."""
    file = tmp_path / "shadow/pynvml.py"
    file.parent.mkdir()
    file.write_text("raise ModuleNotFoundError('No module named pynvml')\n")
    seen(terminal, file.parent, "nvidia-ml-py is not installed, or not wholly", INSTALL)
