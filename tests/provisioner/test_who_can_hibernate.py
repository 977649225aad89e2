"""Where kernels can sleep on disk, and what their administrator reads where they cannot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_pool_provisioner.hibernation import program
from gpu_pool_provisioner.hibernation.calling import why_not
from support.jupyter_env import TINY, JupyterEnv, Managers, answer, started_kernel
from support.pods import PodPool, pods

__all__ = ["pods"]

_WHY = why_not("criu-of-nobody") if os.geteuid() == 0 else "only root is asked for no program."
_SETPRIV = shutil.which("setpriv")
as_root = pytest.mark.skipif("criu-of-nobody" not in _WHY, reason=f"no kernel sleeps here: {_WHY}")


def criu(folder: Path, version: str, check: str = "exit 0") -> str:
    """Write a CRIU that says so of itself, and of this machine."""
    file = folder / "criu"
    file.write_text(f"#!/bin/sh\n[ $1 = check ] && {{ {check}; }}\necho Version: {version}\n")
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1_000_000)


@pytest.mark.usefixtures("as_user")
def test_another_user_than_root_is_told_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, sudo = str(tmp_path / "program"), tmp_path / "sudo"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not(installed=missing).startswith("there is no sudo, by which other users than root")
    sudo.touch(0o755)
    said = why_not(installed=missing)
    assert said.startswith(
        f"there is no {missing}, which writes the kernels of other users than root to disk"
    )
    assert said.endswith(f"sudo install -D -o root -g root -m 0755 gpu-pool-hibernation {missing}")


@pytest.mark.usefixtures("as_user")
def test_a_program_that_others_can_change_is_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sudo, installed = tmp_path / "sudo", tmp_path / "program"
    for each in (sudo, installed):
        each.write_text("#!/bin/sh\ntouch called\n")
        each.chmod(0o777)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not(installed=str(installed)) == (
        f"{installed} is not root's alone: chown root {installed}; chmod go-w {installed}."
    )
    assert not (tmp_path / "called").exists()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a program, and a sudo that says what is written into the file ``says``."""
    sudo, program = tmp_path / "sudo", tmp_path / "program"
    sudo.write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/says >&2\nexit 1\n")
    program.touch()
    for each in (sudo, program):
        each.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return program


@as_root
@pytest.mark.usefixtures("as_user")
def test_what_sudo_says_is_told_with_what_allows_it(installed: Path) -> None:
    (installed.parent / "says").write_text("sudo: a password is required\n")
    said = why_not(installed=str(installed))
    assert said.startswith("sudo says: sudo: a password is required.")
    assert f"/etc/sudoers.d/gpu-pool-hibernation: %gpu-pool ALL=(root) NOPASSWD: {installed};" in said
    assert said.endswith("must be in that group: sudo usermod --append --groups gpu-pool 1000000")


@as_root
@pytest.mark.usefixtures("as_user")
def test_a_sudo_that_asks_for_a_terminal_is_told_with_what_leaves_that_out(installed: Path) -> None:
    (installed.parent / "says").write_text("sudo: sorry, you must have a tty to run sudo\n")
    said = why_not(installed=str(installed))
    assert said.startswith("sudo says: sudo: sorry, you must have a tty to run sudo.")
    assert said.endswith(f"/etc/sudoers.d/gpu-pool-hibernation: Defaults!{installed} !requiretty")


@as_root
@pytest.mark.skipif(_SETPRIV is None, reason="there is no setpriv")
def test_a_process_that_can_get_no_rights_is_told_who_forbids_that(installed: Path) -> None:
    code = (
        "import os; os.geteuid = lambda: 1000000\n"
        "from gpu_pool_provisioner.hibernation.calling import why_not\n"
        f"print(why_not(installed={str(installed)!r}))"
    )
    command = [str(_SETPRIV), "--no-new-privs", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("sudo can do nothing for this process, which can get no more rights")
    assert "SystemdSpawner by disable_user_sudo = False" in done.stdout


@as_root
@pytest.mark.usefixtures("as_user")
def test_a_program_of_another_version_is_told(installed: Path) -> None:
    (installed.parent / "sudo").write_text("""#!/bin/sh\necho '{"ok": true, "why": "", "version": 0}'\n""")
    assert why_not(installed=str(installed)).startswith(f"{installed} is another version's")


@as_root
def test_without_criu_it_is_said_what_to_install() -> None:
    assert "there is no criu-of-nobody: install CRIU 4.1 or newer" in why_not("criu-of-nobody")


@as_root
@pytest.mark.parametrize(("version", "why"), [("3.17.1", "is 3.17, and 4.1 or newer"), ("?", "does not say")])
def test_with_an_old_criu_it_is_said_which_is_needed(tmp_path: Path, version: str, why: str) -> None:
    assert why in why_not(criu(tmp_path, version))


@as_root
def test_what_criu_misses_of_this_machine_is_said_in_its_words(tmp_path: Path) -> None:
    check = "echo 'Error (criu/x.c:1): No seccomp.' >&2; exit 1"
    assert why_not(criu(tmp_path, "4.2", check)).endswith("this machine cannot: No seccomp.")


@as_root
def test_a_folder_where_others_write_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    said = why_not(criu(tmp_path, "4.2"), folder=str(tmp_path))
    assert said == f"{tmp_path} is not root's alone: chown root {tmp_path}; chmod go-w {tmp_path}."


@as_root
@pytest.mark.parametrize("kind", ["pid", "mnt"])
def test_a_system_without_namespaces_is_told(tmp_path: Path, kind: str) -> None:
    """Asked of the program itself, for which its tests say where things are."""
    (tmp_path / f"max_{kind}_namespaces").write_text("0\n")
    code = (
        "import sys\n"
        f"sys.path.insert(0, {program.FOLDER!r})\n"
        "from gpu_pool_hibernation.command import main\n"
        "from gpu_pool_hibernation.values import System\n"
        f"sys.exit(main(['check'], System(limits={str(tmp_path)!r})))\n"
    )
    request = json.dumps({"settings": {"folder": str(tmp_path)}}) + "\n"
    done = subprocess.run(
        [sys.executable, "-c", code], input=request, capture_output=True, text=True, check=True
    )
    assert f"set user.max_{kind}_namespaces (sysctl)" in json.loads(done.stdout)["why"]


@as_root
def test_with_all_that_kernels_can(tmp_path: Path) -> None:
    assert why_not(criu(tmp_path, "4.1"), folder=str(tmp_path)) == ""


@pytest.mark.parametrize("who", ["kernelspec", "course"])
async def test_that_kernels_of_another_language_stay_awake_is_logged_once(
    jupyter_env: JupyterEnv,
    manager: Managers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    who: str,
) -> None:
    settings = {"PoolSettings": {"default_course": {"hibernate_after": "1s"}}} if who == "course" else {}
    (tmp_path / "gpu_pool_config.json").write_text(json.dumps(settings))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    config = {} if who == "course" else {"hibernate_after": 1}
    name = jupyter_env.install(f"R {who}", argv=TINY, language="R", **config)
    for _ in range(2):
        km = await started_kernel(manager(name))
        await answer(km, "wait until it runs")
        assert km.provisioner.session.to_disk is None
    said = [each.getMessage() for each in caplog.records if "sleep on disk" in each.getMessage()]
    why = f"R {who} is no IPython kernel, and only those can."
    assert said == [f"Kernels do not sleep on disk (hibernate_after): {why}"]


async def test_that_kernels_in_pods_stay_awake_is_logged(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool, caplog: pytest.LogCaptureFixture
) -> None:
    km = await started_kernel(manager(jupyter_env.install("in pod", hibernate_after=3600)))
    await answer(km, "1")
    said = [each.getMessage() for each in caplog.records if "in pods" in each.getMessage()]
    assert said == ["Kernels do not sleep on disk (hibernate_after): those in pods stay awake."]


WITH_PROXY = "Kernels do not sleep on disk (hibernate_after): those with a proxy of their own"


async def test_that_kernels_with_a_proxy_of_their_own_stay_awake_is_logged(
    jupyter_env: JupyterEnv, manager: Managers, caplog: pytest.LogCaptureFixture
) -> None:
    km = manager(jupyter_env.install("independent", argv=TINY, hibernate_after=3600))
    await km.start_kernel(independent=True)
    await answer(km)
    assert len([each for each in caplog.records if each.getMessage().startswith(WITH_PROXY)]) == 1


def test_who_does_not_use_it_loads_nothing_of_it() -> None:
    code = (
        "import sys, gpu_pool_provisioner.provisioner\n"
        "print([each for each in sys.modules if each.startswith('gpu_pool_provisioner.hibernation')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
