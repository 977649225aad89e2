"""``gpu-pool run --docker``: a container whose life is its slice's life. Needs a Docker that runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from gpu_pool.cli import child
from gpu_pool.enforcement.hami_core import HamiTier
from gpu_pool_client import EndReason, LeaseState
from support.mps_stub import lease
from support.terminal import Terminal, eventually

#: One for each process that runs tests, which looks for its own containers.
IMAGE = f"gpu-pool-test:{os.getpid()}"
#: Without a network: a container that has none starts on every machine.
RUN = ("run", "2%", "--docker", "--", "--network", "none")


def docker(*words: str, **settings: object) -> str:
    done = subprocess.run(
        ["docker", *words], capture_output=True, text=True, timeout=120, check=True, **settings
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image that holds a shell and nothing else."""
    shell = shutil.which("busybox")
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker daemon answers here")
    if shell is None or subprocess.run(["ldd", shell], capture_output=True).returncode == 0:
        pytest.skip("no static busybox to make an image of (Debian: busybox-static)")
    archive = tmp_path_factory.mktemp("image") / "image.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(shell, "bin/busybox")
        for name in ("sh", "sleep", "env"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    docker("import", str(archive), IMAGE)
    yield IMAGE
    docker("rmi", "--force", IMAGE)


def containers() -> list[str]:
    return docker("ps", "--quiet", "--all", "--no-trunc", "--filter", f"ancestor={IMAGE}").split()


def start_sleeping(terminal: Terminal) -> tuple[subprocess.Popen[str], str, int]:
    """Start a container that does nothing; return the program, the lease's id and the container's pid."""
    program = terminal.start(*RUN, IMAGE, "sh", "-c", "echo $GPU_POOL_LEASE; sleep 600")
    assert program.stdout is not None
    lease_id = program.stdout.readline().strip()
    pid = int(docker("inspect", "--format", "{{.State.Pid}}", containers()[0]))

    def is_attached() -> bool:
        process = terminal.lease(lease_id).process
        return process is not None and process.pid == pid

    eventually(is_attached)
    return program, lease_id, pid


def test_the_container_knows_its_slice_and_its_exit_status_is_ours(terminal: Terminal, image: str) -> None:
    done = terminal.run(*RUN, image, "sh", "-c", "env; exit 7")
    assert done.returncode == 7
    lines = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert (lines["GPU_POOL_SLICE"], lines["CUDA_VISIBLE_DEVICES"]) == ("2%", "SIM-V100-SXM2-32GB-32768MiB-0")
    assert "JUPYTER_DATA_DIR" not in lines
    assert terminal.is_empty()
    assert containers() == []


def test_a_container_ends_when_its_slice_is_taken_back(terminal: Terminal, image: str) -> None:
    program, lease_id, _ = start_sleeping(terminal)
    assert terminal.run("release", lease_id).returncode == 0
    assert program.wait(timeout=120) != 0
    assert containers() == []


def test_a_signal_ends_the_container_and_gives_the_slice_back(terminal: Terminal, image: str) -> None:
    program, lease_id, _ = start_sleeping(terminal)
    program.send_signal(signal.SIGTERM)
    assert program.wait(timeout=120) == 128 + signal.SIGTERM
    assert terminal.lease(lease_id).end_reason is EndReason.RELEASED
    assert containers() == []


def test_no_container_outlives_a_docker_that_was_killed(terminal: Terminal, image: str) -> None:
    program, lease_id, _ = start_sleeping(terminal)
    [client] = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    os.kill(int(client), signal.SIGKILL)
    assert program.wait(timeout=120) == 128 + signal.SIGKILL
    assert terminal.lease(lease_id).state is LeaseState.ENDED
    assert containers() == []


def test_the_slice_is_back_when_the_container_is_gone_although_we_were_killed(
    terminal: Terminal, image: str
) -> None:
    program, lease_id, _ = start_sleeping(terminal)
    program.kill()
    # Docker's own program gets SIGTERM then, and passes it on.
    eventually(lambda: containers() == [])
    eventually(terminal.is_empty)
    assert terminal.lease(lease_id).end_reason is EndReason.PROCESS_GONE


def test_no_container_is_left_behind_whatever_docker_was_told(
    terminal: Terminal, image: str, tmp_path: Path
) -> None:
    detached = ("-d", "--cidfile", str(tmp_path / "id"), IMAGE, "sleep", "600")
    assert terminal.run(*RUN, *detached).returncode == 0
    assert containers() == []
    assert terminal.is_empty()


def test_without_docker_nothing_is_asked_for(terminal: Terminal, tmp_path: Path) -> None:
    done = terminal.run(*RUN, IMAGE, env={"PATH": str(tmp_path)})
    assert done.returncode == 127
    assert done.stderr == "gpu-pool: 'docker': command not found.\nCheck its name and the PATH.\n"
    assert terminal.is_empty()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's link")
def test_where_another_users_link_leads_is_not_mounted(tmp_path: Path) -> None:
    library, locks = tmp_path / "libvgpu.so", tmp_path / "vgpulock"
    library.write_text("")
    locks.symlink_to("/etc")
    os.chown(locks, 65534, 65534, follow_symlinks=False)
    variables = HamiTier(library, tmp_path / "hami").describe(lease("a")).variables
    command = child.DockerContainer(replace(lease("a"), variables=variables), locks).command((IMAGE,))
    assert f"{locks}:{locks}" not in command


def test_hami_core_finds_its_library_its_limits_and_its_lock_in_the_container(tmp_path: Path) -> None:
    library, locks = tmp_path / "libvgpu.so", tmp_path / "vgpulock"
    library.write_text("")
    locks.mkdir()
    tier, held = HamiTier(library, tmp_path / "hami", locks=locks), lease("a")
    tier.open(held)
    described = replace(held, variables=tier.describe(held).variables)
    command = child.DockerContainer(described, locks).command((IMAGE,))
    mounted = {after for word, after in pairwise(command) if word == "--volume"}
    # Its first process makes the file with the limits in the lease's folder, for all others.
    assert mounted == {f"{path}:{path}" for path in (library, locks, tmp_path / "hami/a")}


#: Stands in for Docker where only what it is asked for matters: its container is a process.
_DOCKER = """#!/bin/sh
cd {folder}
case $1 in
    run) echo $$ > pid; exec sleep 600 ;;
    ps) if [ -e pid ] && kill -0 "$(cat pid)" 2>/dev/null; then echo box; fi ;;
    inspect) cat pid ;;
    stop) echo "$@" >> stopped; kill "$(cat pid)" ;;
esac
"""


def test_a_container_whose_slice_is_over_is_stopped_and_not_killed_at_once(
    terminal: Terminal, tmp_path: Path
) -> None:
    program = tmp_path / "bin/docker"
    program.parent.mkdir()
    program.write_text(_DOCKER.format(folder=tmp_path))
    program.chmod(0o755)
    terminal.environment["PATH"] = f"{program.parent}:{terminal.environment['PATH']}"
    running = terminal.start(*RUN, "image")
    eventually(
        lambda: any(lease.process for lease in terminal.status().leases) and (tmp_path / "pid").exists()
    )
    terminal.free(terminal.status().leases[0].id)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 124
    assert "the slice has ended: it was given back." in errors
    assert (tmp_path / "stopped").read_text() == "stop -t 10 box\n"
