"""No process is believed to be MPS because of its name, its command line or its environment."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_pool.enforcement.mps import MpsTier
from gpu_pool.enforcement.mps.daemon import PIPES, MpsDaemon
from gpu_pool.enforcement.mps.programs import SERVER, TOOL, is_believed, is_daemon, is_server
from support import mps_stub
from support.disguises import STUDENT, disguised, needs_root, set_user_id_shell

pytestmark = needs_root


@pytest.fixture
def folder() -> Iterator[Path]:
    """Give a folder with a short name that other users can come through."""
    made = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[mps_stub.Stub]:
    """Install the stand-ins for NVIDIA's tools."""
    with mps_stub.installed(tmp_path / "bin", monkeypatch) as stub:
        yield stub


@pytest.mark.parametrize("name", [b"a\rUid:\t0", b"a\x85Uid:\t0", b"Uid:\t0\t0\t0\t0"])
def test_a_students_daemon_keeps_nobody_off_a_gpu(stub: mps_stub.Stub, folder: Path, name: bytes) -> None:
    with disguised(name, argv0=f"{stub.folder / TOOL}", words=["-d"]) as fake:
        assert is_daemon(fake.pid), "it looks like one"
        assert not is_believed(fake.pid)
        tier = MpsTier(folder / "mps")
        tier.prepare(mps_stub.V100)
        tier.stop()
        assert fake.is_alive()


def control(folder: Path) -> MpsDaemon:
    return MpsDaemon(folder, options=(), visible="", public=False, timeout=10.0)


def test_a_set_user_id_program_that_a_student_starts_is_not_our_daemon(
    stub: mps_stub.Stub, folder: Path
) -> None:
    shell = set_user_id_shell(folder)
    ours = control(folder / "mps")
    environ = {PIPES: f"{ours.pipe}"}
    named = f"{stub.folder / TOOL}"
    with disguised(
        b"a", STUDENT, argv0=named, program=f"{shell}", options=["-p"], words=["-d"], environ=environ
    ) as fake:
        if Path(f"/proc/{fake.pid}").stat().st_uid != 0:
            pytest.skip("the shell here gives up its rights")
        assert is_daemon(fake.pid), "it looks like one, and runs as root"
        assert not ours.running()
        ours.kill()
        assert fake.is_alive(), "what is not ours is not ended"


def test_a_students_server_is_not_waited_for(stub: mps_stub.Stub, folder: Path) -> None:
    ours = control(folder / "mps")
    named = f"{stub.folder / SERVER}"
    with disguised(b"a\rUid:\t0", argv0=named, environ={PIPES: f"{ours.pipe}"}) as fake:
        assert is_server(fake.pid), "it looks like one"
        ours.kill()
        assert fake.is_alive(), "what is not ours is not ended"


def test_root_and_this_user_are_believed_by_the_name(stub: mps_stub.Stub) -> None:
    with disguised(b"a", os.geteuid(), argv0=f"{stub.folder / TOOL}", words=["-d"]) as real:
        assert is_daemon(real.pid)
        assert is_believed(real.pid)
