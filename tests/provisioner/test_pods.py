"""What of a kernelspec goes into a pod."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpu_pool_provisioner.environment import command_in_pod, folder_in_pod, variables_in_pod

FILE = "/home/ada/.local/share/jupyter/runtime/kernel-1.json"
OURS = ("--ext", "gpu_pool_kernels.inkernel")
QUIET = "-Xfrozen_modules=off"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            ["/opt/conda/bin/python3.11", "-m", "ipykernel_launcher", "-f", FILE],
            ("python3", QUIET, "-m", "ipykernel_launcher", *OURS, "-f", "{connection_file}"),
        ),
        (
            ["python", "-X", "dev", "-m", "ipykernel", f"--f={FILE}", "--matplotlib=inline"],
            (
                "python3",
                QUIET,
                "-X",
                "dev",
                "-m",
                "ipykernel",
                *OURS,
                "--f={connection_file}",
                "--matplotlib=inline",
            ),
        ),
        (
            ["python", "-X", "frozen_modules=on", "-m", "ipykernel_launcher", "-f", FILE],
            (
                "python3",
                "-X",
                "frozen_modules=on",
                "-m",
                "ipykernel_launcher",
                *OURS,
                "-f",
                "{connection_file}",
            ),
        ),
        (["/usr/bin/R", "--args", FILE], ("R", "--args", "{connection_file}")),
        (["pythonista", FILE], ("pythonista", "{connection_file}")),
    ],
)
def test_a_program_is_found_by_its_name(command: list[str], expected: tuple[str, ...]) -> None:
    assert command_in_pod(command, FILE) == expected


def test_the_debugger_has_nothing_to_warn_of() -> None:
    command = [sys.executable, *command_in_pod(["python3", "-m", "ipykernel_launcher"], FILE)[1:-4]]
    done = subprocess.run([*command, "-c", "import ipykernel.debugger"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pod_has_the_kernelspecs_variables_and_those_that_are_named() -> None:
    here = {"TZ": "UTC", "SECRET": "s", "JUPYTERHUB_API_TOKEN": "t", "JPY_API_TOKEN": "t", "MODE": "here"}
    spec = {"MODE": "fast", "ZONE": "${TZ} $SECRET ${JUPYTERHUB_API_TOKEN}"}
    named = ["TZ", "MODE", "MISSING", "JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN"]
    assert variables_in_pod(spec, here, named) == {
        "TZ": "UTC",
        "MODE": "fast",
        "ZONE": "UTC $SECRET ${JUPYTERHUB_API_TOKEN}",
    }


def test_a_kernel_starts_in_the_folder_of_its_notebook_if_that_is_in_the_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "course" / "week 1").mkdir(parents=True)
    (tmp_path / "link").symlink_to(home / "course")
    assert folder_in_pod(str(home / "course" / "week 1"), home) == "course/week 1"
    assert folder_in_pod(str(tmp_path / "link"), home) == "course"
    for elsewhere in (None, "", str(home), "/etc", str(tmp_path), f"{home}/course/../../etc"):
        assert folder_in_pod(elsewhere, home) is None
