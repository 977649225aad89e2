"""The wheel alone, in an empty environment: it does what the README says, and names extras that are missing.

``make matrix`` names all Pythons; ``make test-all`` has the one that runs the tests.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import clean_environment

ROOT = Path(__file__).parents[2]
PYTHONS = os.environ.get("GPU_POOL_TEST_PYTHONS", sys.executable).split()
#: Imports every module, and prints what is missing for those that cannot be imported.
IMPORT_EVERYTHING = """
import importlib, pkgutil
for name in ["gpu_pool_kernels", "gpu_pool", "gpu_pool_client", "gpu_pool_provisioner", "gpu_pool_spawner"]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                print((error.__cause__ or error).name)
"""
#: What the extras bring that is imported where a module is loaded.
OF_EXTRAS = {"aiohttp", "jupyter_server", "jupyterhub", "kubernetes_asyncio"}
#: What a Hub tells a service that it starts.
BEHIND_A_HUB = "JUPYTERHUB_SERVICE_URL=http://127.0.0.1:10101 JUPYTERHUB_API_TOKEN=secret"
#: Starts a kernel as Jupyter does, and prints what a cell shows.
CELL = """
import sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="python3-gpu-2pct")
def show(message):
    data = message["content"].get("data", {})
    print(data.get("text/plain", message["content"].get("text", "")))
client.execute_interactive(sys.argv[1], output_hook=show, timeout=120)
client.stop_channels()
manager.shutdown_kernel()
"""

# One process, and so one wheel and one environment for each Python.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.xdist_group("wheel_alone")]


@dataclass(frozen=True)
class Alone:
    """An environment with the wheel and what it requires."""

    python: Path
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        ours = ("GPU_POOL", "JUPYTER", "PYTHON", "XDG_", "IPYTHON")
        rest = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {
            **rest,
            "HOME": str(self.home),
            "PATH": f"{self.python.parent}{os.pathsep}{rest['PATH']}",
            "GPU_POOL_DEVICES": "V100-SXM2-32GB:1",
        }

    def install(self, *requirements: str | Path) -> None:
        """Install from the package index, or skip the test."""
        pip = [self.python, "-m", "pip", "install", "--disable-pip-version-check"]
        if uv := shutil.which("uv"):
            pip = [uv, "pip", "install", "--python", self.python]
        done = subprocess.run([*pip, "--quiet", *requirements], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"what the wheel requires cannot be installed: {done.stderr[-300:]}")

    def says(self, *command: str) -> str:
        """Run a command; return all that it said, in one line."""
        done = subprocess.run(
            command, env=self.environment, cwd=self.home, capture_output=True, text=True, check=False
        )
        return " ".join((done.stdout + done.stderr).split())

    def shell(self, command: str) -> str:
        """Run a line of a shell that must succeed; return what it printed, as a terminal shows it."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"exec 2>&1; {command}"],
            env=self.environment,
            cwd=self.home,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}:\n{done.stdout}"
        return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module", params=PYTHONS, ids=lambda python: Path(python).name)
def alone(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    python = shutil.which(request.param)
    if python is None:
        pytest.skip(f"there is no {request.param} on this machine")
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run([python, "-m", "venv", folder / "environment"], check=True)
    made = Alone(folder / "environment/bin/python", folder / "home")
    made.home.mkdir()
    (packages,) = (folder / "environment").glob("lib/python*/site-packages")
    for name, text in clean_environment.HOOKS.items():
        (packages / name).write_text(text)
    made.install(wheel)
    return made


def session(heading: str) -> list[tuple[str, str]]:
    """Return the commands of the README's terminal after some words, each with what it prints there."""
    block = (ROOT / "README.md").read_text().partition(heading)[2].partition("```console\n")[2]
    commands = block.partition("```")[0].split("$ ")[1:]
    return [(command.partition("\n")[0], command.partition("\n")[2]) for command in commands]


def test_it_imports_but_for_what_extras_bring(alone: Alone) -> None:
    assert set(alone.shell(f"python -c '{IMPORT_EVERYTHING}'").split()) <= OF_EXTRAS


@pytest.mark.parametrize(
    ("command", "what", "extra"),
    [
        ("gpu-pool serve --kubernetes --socket ./cluster.sock", "Kubernetes support", "kubernetes"),
        ("gpu-pool doctor --kubernetes", "Kubernetes support", "kubernetes"),
        (f"{BEHIND_A_HUB} gpu-pool serve --socket ./hub.sock", "JupyterHub support", "hub"),
        ("python -c 'import gpu_pool_spawner.kube'", "The spawner for Kubernetes", "kubernetes"),
    ],
)
def test_what_needs_an_extra_names_it(alone: Alone, command: str, what: str, extra: str) -> None:
    said = alone.says("bash", "-c", command)
    assert re.search(
        rf"{what} is not installed: No module named '\w+'\. "
        rf"(?:-> )?Install it: pip install 'jupyter-gpu-pool\[{extra}\]'\.",
        said,
    ), said


@contextmanager
def serving(alone: Alone) -> Iterator[http.client.HTTPConnection]:
    """Serve on a Unix socket, and connect to it."""
    path = alone.home / "pool.sock"
    service = subprocess.Popen(
        [alone.python.parent / "gpu-pool", "serve", "--socket", path], env=alone.environment, cwd=alone.home
    )
    try:
        end = time.monotonic() + 120
        while not path.exists():
            assert service.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(path))
        yield connection
        connection.close()
    finally:
        service.terminate()
        assert service.wait(60) == 0


def test_a_service_without_the_library_for_metrics_says_so(alone: Alone) -> None:
    with serving(alone) as connection:
        connection.request("GET", "/metrics")
        said = json.load(connection.getresponse())["detail"]
    assert said == (
        "The library for metrics is not installed: No module named 'prometheus_client'. "
        "Install it: pip install 'jupyter-gpu-pool[metrics]'."
    )


def test_it_does_what_the_readme_says(alone: Alone) -> None:
    """Last: a JupyterLab's environment has ipykernel, without which there is nothing to build on."""
    said = alone.says("gpu-pool", "kernels", "install", "2%")
    assert said == (
        "gpu-pool: There is no kernel 'python3' to build on. "
        "Installed: none are. Install one first: pip install ipykernel."
    )
    alone.install("ipykernel")
    commands = session("## Install")
    assert len(commands) == 4
    for command, printed in commands:
        shown = alone.shell(command)
        assert printed.strip() in shown, command
    shown = alone.says("python", "-c", CELL, "%gpu")
    for words in ("Slice", "2%", "V100-SXM2-32GB (simulated)", "Held for"):
        assert words in shown
