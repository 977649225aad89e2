"""The tests pass for whoever has kernels, settings and a pool of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import clean_environment

ROOT = Path(__file__).parents[2]
#: Some that look for kernels, settings or a pool, in this process, by the command line and in real servers.
LOOKING = (
    "tests/pool/cli/test_doctor.py::test_a_pool_that_works_is_healthy_and_says_that_it_is_simulated",
    "tests/pool/cli/test_doctor.py::test_devices_that_cannot_be_read_are_told",
    "tests/pool/cli/test_kernels_verbs.py::test_kernels_are_installed_listed_and_removed",
    "tests/kernels/test_installer.py::test_an_unknown_base_is_answered_with_those_there_are",
    "tests/provisioner/test_full_pool.py::test_the_message_names_what_is_free_what_would_start_and_who_to_ask",
    "tests/provisioner/test_server.py::test_kill_9_of_a_server_gives_everything_back",
)
#: What is wrong for everybody who reads it.
WRONG = "c.PoolSettings.longest_lease = 'never'\nc.KernelSpecManager.ensure_native_kernel = False\n"


@pytest.fixture
def lived_in(tmp_path: Path) -> Path:
    """Return the folder of an environment like the tester's own, after ``make lab`` and more."""
    folder = tmp_path / "prefix"
    clean_environment.make(folder)
    install = [folder / "bin/gpu-pool", "kernels", "install", "2%", "10%", "50%", "1"]
    home = {**os.environ, "HOME": str(tmp_path / "home")}
    subprocess.run([*install, "--sys-prefix"], check=True, capture_output=True, env=home)
    subprocess.run([*install, "--user"], check=True, capture_output=True, env=home)
    for place in ("prefix/etc/jupyter", "home/.jupyter", "elsewhere"):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        for name in ("gpu_pool_config.py", "jupyter_config.py", "jupyter_server_config.py"):
            (tmp_path / place / name).write_text(WRONG)
    return folder


def hostile(lived_in: Path) -> dict[str, str]:
    """Return variables as they may be in a kernel on a slice, on a Hub, with settings in every place."""
    elsewhere = str(lived_in.parent / "elsewhere")
    names = "URL TOKEN DEVICES DEFAULT_SLICE LEASE COURSE SLICE KERNELS WISHES POD SIMULATED".split()
    pool = {f"GPU_POOL_{name}": "nonsense" for name in names}
    hub = {
        f"JUPYTERHUB_{name}": "http://127.0.0.1:1" for name in "API_URL API_TOKEN SERVICE_URL USER".split()
    }
    folders = "JUPYTER_PATH JUPYTER_CONFIG_DIR JUPYTER_CONFIG_PATH JUPYTER_DATA_DIR XDG_STATE_HOME".split()
    more = {"KUBECONFIG": "/nowhere", "CUDA_VISIBLE_DEVICES": "GPU-1", "JPY_PARENT_PID": "1"}
    kept = {name: value for name, value in os.environ.items() if name != clean_environment.MARK}
    home = {"HOME": str(lived_in.parent / "home")}
    return {**kept, **pool, **hub, **dict.fromkeys(folders, elsewhere), **more, **home}


def test_tests_see_nothing_that_they_did_not_make(lived_in: Path) -> None:
    command = [lived_in / "bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *LOOKING]
    done = subprocess.run(
        command, cwd=ROOT, env=hostile(lived_in), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_every_variable_that_the_code_reads_is_taken_away() -> None:
    packages = ("kernels", "pool", "pool_client", "provisioner", "spawner")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    pattern = r"\b(?:GPU_POOL|JUPYTER|JUPYTERHUB|JPY|XDG|KUBE[A-Z]*|SUDO)_[A-Z_]+\b"
    variables = {name: "set" for path in files for name in re.findall(pattern, path.read_text())}
    assert "GPU_POOL_URL" in variables
    clean_environment.clean(variables, Path(os.environ[clean_environment.MARK]))
    assert variables.keys() == {"HOME", "PATH"}


def test_programs_of_packages_are_there_and_run_in_it() -> None:
    for name in ("gpu-pool", "jupyter", "jupyterhub"):
        assert Path(sys.prefix, "bin", name).is_file()
    told = subprocess.run(["gpu-pool", "--version"], capture_output=True, text=True, check=True).stdout
    assert "gpu-pool" in told


def test_jupyterlab_serves_its_files_from_there() -> None:
    """It serves no link that leads out of its folder."""
    scripts = list(Path(sys.prefix, "share/jupyter/lab/static").glob("main.*.js"))
    assert scripts
    assert not any(script.is_symlink() for script in scripts)
