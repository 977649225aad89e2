"""What the Tab key offers, asked for as shells do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from support.terminal import Terminal


def offered(terminal: Terminal, line: str, **environment: str) -> list[str]:
    """Return what is offered for the last word of a line that bash completes."""
    words = line.split(" ")
    done = terminal.run(
        env={
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
            "_GPU_POOL_COMPLETE": "bash_complete",
            **environment,
        },
    )
    assert done.stderr == "", "nobody who presses Tab wants to read anything"
    return [each.partition(",")[2] for each in done.stdout.splitlines() if each]


def test_leases_are_offered_where_they_are_named(terminal: Terminal) -> None:
    held, waiting = terminal.hold("1"), terminal.hold("2%")
    assert offered(terminal, "gpu-pool release ") == [held, waiting]
    assert offered(terminal, f"gpu-pool release {held} ") == [waiting], "none is named twice"
    assert offered(terminal, "gpu-pool release 2") == [waiting]
    assert offered(terminal, "gpu-pool why ") == [waiting]
    assert offered(terminal, "gpu-pool exec --lease ") == [held]


def test_other_names_are_offered(terminal: Terminal) -> None:
    assert terminal.is_empty()
    assert offered(terminal, "gpu-pool drain ") == ["0", "SIM-V100-SXM2-32GB-32768MiB-0"]
    assert offered(terminal, "gpu-pool simulate ") == ["one-size", "mixed", "research"]
    assert offered(terminal, "gpu-pool simulate some/fi") == ["some/fi"], "the shell knows files"
    assert terminal.run("kernels", "install", "2%", "--prefix", str(terminal.folder)).returncode == 0
    found = {"JUPYTER_PATH": f"{terminal.folder}/share/jupyter"}
    assert "python3-gpu-2pct" in offered(terminal, "gpu-pool kernels remove py", **found)
    assert "python3" in offered(terminal, "gpu-pool kernels install 2% --base p")


@pytest.mark.parametrize("url", ["unix:/nowhere/pool.sock", "nonsense", "embedded:{folder}/new/store.db"])
def test_where_the_pool_is_away_nothing_is_offered_and_nothing_said(terminal: Terminal, url: str) -> None:
    url = url.format(folder=terminal.folder)
    assert offered(terminal, "gpu-pool release ", GPU_POOL_URL=url) == []
    assert not (terminal.folder / "new").exists(), "nor is a store made"


def test_the_pool_named_in_the_line_is_asked(terminal: Terminal) -> None:
    held = terminal.hold("1")
    url = terminal.environment["GPU_POOL_URL"]
    away = {"GPU_POOL_URL": "unix:/nowhere/pool.sock"}
    assert offered(terminal, f"gpu-pool --pool {url} release ", **away) == [held]
    assert offered(terminal, f"gpu-pool release --pool {url} ", **away) == [held]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script(terminal: Terminal, shell: str, tmp_path: Path) -> None:
    done = terminal.call("gpu-pool", env={"_GPU_POOL_COMPLETE": f"{shell}_source"})
    assert f"_GPU_POOL_COMPLETE={shell}_complete" in done.stdout
    if shutil.which(shell):
        script = tmp_path / "script"
        script.write_text(done.stdout)
        subprocess.run([shell, "-n", script], check=True)


def test_bash_itself_completes_a_lease(terminal: Terminal) -> None:
    held = terminal.hold("1")
    line = (
        'eval "$(_GPU_POOL_COMPLETE=bash_source gpu-pool)"; '
        'COMP_WORDS=(gpu-pool release ""); COMP_CWORD=2; _gpu_pool_completion gpu-pool; '
        'echo "${COMPREPLY[@]}"'
    )
    assert terminal.call("bash", "-c", line).stdout.split() == [held]
