"""The program that runs as root: what it does, and above all what it does not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_pool.enforcement import TierFailed
from gpu_pool.enforcement.privileged import Privileged
from gpu_pool.enforcement.privileged import program as privileged_program
from gpu_pool.enforcement.privileged.program import _LEASE, PrivilegedRefused, SystemPaths, perform
from support.mps_stub import V100, Stub
from support.pools import embedded, running, take

PROGRAM = Path(privileged_program.__file__)
LEASE = "12-0123abcd"
ME = os.getuid()


@pytest.fixture
def system(stub: Stub, tmp_path: Path) -> SystemPaths:
    """Give a machine whose control groups are plain folders."""
    groups = tmp_path / "cgroup"
    for folder in (groups, groups / "gpu-pool"):
        folder.mkdir()
        (folder / "cgroup.controllers").write_text("cpu dmem memory\n")
    return SystemPaths(f"{stub.folder / 'nvidia-smi'}", groups)


@pytest.fixture
def group(system: SystemPaths) -> Path:
    """Give the control group of a lease, with the file that the kernel would make in it."""
    perform(["cgroup-make", LEASE], system, ME)
    (system.folder / LEASE / "cgroup.procs").write_text("")
    return system.folder / LEASE


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["sh"],
        ["compute-mode"],
        ["compute-mode", V100.uuid],
        ["compute-mode", V100.uuid, "exclusive", "extra"],
        ["compute-mode", V100.uuid, "EXCLUSIVE_PROCESS"],
        ["compute-mode", V100.uuid + "\n", "exclusive"],
        ["compute-mode", "0", "exclusive"],
        ["compute-mode", V100.uuid + ",--gpu-reset", "default"],
        ["compute-mode", "--gpu-reset", "default"],
        ["cgroup-make", "../../etc"],
        ["cgroup-make", ".."],
        ["cgroup-make", ""],
        ["cgroup-make", "0123abc/"],
        ["cgroup-make", "0123ABCD"],
        ["cgroup-make", "a" * 65],
        ["cgroup-limit", LEASE, V100.uuid, "-1"],
        ["cgroup-limit", LEASE, V100.uuid, "max"],
        ["cgroup-limit", LEASE, V100.uuid, "٣"],
        ["cgroup-limit", LEASE, V100.uuid, "1e3"],
        ["cgroup-join", LEASE, "0"],
        ["cgroup-join", LEASE, "-1"],
        ["cgroup-join", LEASE, "1\n2"],
        ["cgroup-join", LEASE, "01"],
        ["cgroup-join", LEASE, f"{2**31 - 1}"],
        ["cgroup-join", LEASE, f"{2**31}"],
        ["cgroup-join", LEASE, f"{2**32 + 1}"],
        ["cgroup-join", LEASE, f"{2**64 + 1}"],
        ["cgroup-join", LEASE, "9" * 5_000],
        ["cgroup-join", LEASE, "1\0"],
        ["cgroup-join", LEASE, "\udcff"],
        ["cgroup-limit", LEASE, V100.uuid, "100000000"],
        ["cgroup-limit", LEASE, V100.uuid, "00"],
        ["cgroup-limit", LEASE, V100.uuid, ""],
        ["cgroup-make", "1" * 19 + "-0123abcd"],
        ["cgroup-make", LEASE + "\udc80"],
        ["cgroup-remove", "gpu-pool"],
    ],
)
def test_nothing_else_is_accepted(arguments: list[str], system: SystemPaths, stub: Stub) -> None:
    with pytest.raises(PrivilegedRefused, match="accepted"):
        perform(arguments, system, 0)
    assert stub.cards()["calls"] == []
    assert {path.name for path in system.cgroups.rglob("*")} == {"cgroup.controllers", "gpu-pool"}


def test_compute_modes(system: SystemPaths, stub: Stub) -> None:
    perform(["compute-mode", V100.uuid, "exclusive"], system, ME)
    assert stub.mode() == "Exclusive_Process"
    perform(["compute-mode", V100.uuid, "default"], system, ME)
    assert stub.mode() == "Default"


def test_tools_are_run_with_an_empty_environment(
    system: SystemPaths, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD_OF_MINE", "evil.so")
    perform(["compute-mode", V100.uuid, "exclusive"], system, ME)
    # Python itself sets LC_CTYPE when it finds no language.
    assert set(stub.cards()["environ"]) <= {"LC_CTYPE"}


def test_a_tool_that_fails_is_quoted(system: SystemPaths, stub: Stub) -> None:
    stub.cards(fixed=True)
    with pytest.raises(PrivilegedRefused, match="Insufficient Permissions"):
        perform(["compute-mode", V100.uuid, "exclusive"], system, ME)


def test_a_group_is_made_limited_joined_and_removed(system: SystemPaths, stub: Stub, group: Path) -> None:
    assert (system.cgroups / "cgroup.subtree_control").read_text() == "+dmem"
    assert (system.folder / "cgroup.subtree_control").read_text() == "+dmem"
    answer = perform(["cgroup-limit", LEASE, V100.uuid, "655"], system, ME)
    assert "hard limit: 655 MiB" in str(answer["said"])
    perform(["cgroup-join", LEASE, f"{os.getpid()}"], system, ME)
    assert (group / "cgroup.procs").read_text() == f"{os.getpid()}"
    with pytest.raises(PrivilegedRefused, match="still has processes"):
        perform(["cgroup-remove", LEASE], system, ME)


def test_the_soft_limit_is_zeroed_before_a_group_is_removed(
    system: SystemPaths, stub: Stub, group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    perform(["cgroup-limit", LEASE, V100.uuid, "655"], system, ME)
    removed: list[object] = []
    # A real control group is removed with the files that the kernel has in it.
    monkeypatch.setattr(Path, "rmdir", lambda path: removed.append((path, stub.cards()[V100.uuid]["limits"])))
    perform(["cgroup-remove", LEASE], system, ME)
    assert removed == [(group, {f"{group}": ["0", "max"]})]


def test_what_is_done_twice_is_done(system: SystemPaths, group: Path) -> None:
    perform(["cgroup-make", LEASE], system, ME)
    perform(["cgroup-remove", "13-ffff0000"], system, ME)


def test_a_group_that_does_not_exist(system: SystemPaths) -> None:
    with pytest.raises(PrivilegedRefused, match="has no control group"):
        perform(["cgroup-limit", LEASE, V100.uuid, "655"], system, ME)


def test_version_1_of_control_groups(system: SystemPaths) -> None:
    (system.cgroups / "cgroup.controllers").unlink()
    with pytest.raises(PrivilegedRefused, match="not cgroup v2"):
        perform(["cgroup-make", LEASE], system, ME)


def test_a_process_of_another_user_is_not_moved(system: SystemPaths, group: Path) -> None:
    with running() as process:
        with pytest.raises(PrivilegedRefused, match=f"not one of user {ME + 1}'s"):
            perform(["cgroup-join", LEASE, f"{process.pid}"], system, ME + 1)
        assert (group / "cgroup.procs").read_text() == ""
        perform(["cgroup-join", LEASE, f"{process.pid}"], system, 0)  # root moves anybody's
        assert (group / "cgroup.procs").read_text() == f"{process.pid}"


def test_a_process_that_has_ended_is_not_moved(system: SystemPaths, group: Path) -> None:
    with running() as process:
        process.kill()
        process.wait()
        with pytest.raises(ProcessLookupError):
            perform(["cgroup-join", LEASE, f"{process.pid}"], system, 0)


def test_a_process_that_ends_meanwhile_is_not_said_to_be_moved(system: SystemPaths, group: Path) -> None:
    with running() as process:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its number is not free yet
        with pytest.raises(PrivilegedRefused, match="has ended"):
            perform(["cgroup-join", LEASE, f"{process.pid}"], system, 0)


def test_a_pid_above_all_that_linux_gives_is_no_process(system: SystemPaths, group: Path) -> None:
    with pytest.raises(ProcessLookupError):
        perform(["cgroup-join", LEASE, "9999999"], system, 0)


def as_program(*arguments: str, uid: int = ME, **environ: str) -> tuple[int, dict[str, object]]:
    """Run it as sudo would, with the standard library alone; return its status and its answer."""
    text = PROGRAM.read_text()
    other = {"user": uid, "group": uid, "extra_groups": []} if uid != ME else {}
    python = sys.executable if uid == ME else "/usr/bin/python3"
    done = subprocess.run(  # type: ignore[call-overload]
        [python, "-IS", "-c", text, *arguments], capture_output=True, env=environ, cwd="/", **other
    )
    (line,) = done.stdout.decode().splitlines()
    return done.returncode, json.loads(line)


@pytest.mark.skipif(ME == 0 and not Path("/usr/bin/python3").exists(), reason="no Python for another user")
def test_it_does_nothing_unless_it_is_root() -> None:
    status, answer = as_program("cgroup-make", LEASE, uid=ME or 65534)
    assert (status, answer["ok"]) == (1, False)
    assert "must be run by root" in str(answer["error"])


@pytest.mark.skipif(ME != 0, reason="needs root")
def test_it_prints_one_line_and_takes_the_caller_from_sudo() -> None:
    status, answer = as_program("cgroup-join", "../..", "1", SUDO_UID="1000")
    assert (status, answer) == (1, {"ok": False, "error": "'../..' is not accepted by cgroup-join"})


@pytest.mark.skipif(ME != 0, reason="needs root")
@pytest.mark.parametrize("uid", ["me", "", "-1", " 0", "0_0", "٣", f"{2**32 - 1}", f"{2**64}", "9" * 5_000])
def test_who_calls_it_is_a_user_or_nothing_is_done(uid: str) -> None:
    status, answer = as_program("cgroup-remove", LEASE, SUDO_UID=uid)
    assert (status, answer["ok"]) == (1, False)
    assert "which is no user" in str(answer["error"])


def test_whoever_does_not_read_its_answer_has_its_status_alone() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-IS", str(PROGRAM), "sh"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("said", ["3", "[]", "null", '"ok"'])
def test_an_answer_that_it_never_gives_is_told(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sudo = tmp_path / "sudo"
    sudo.write_text(f"#!/bin/sh\necho '{said}'\n")
    sudo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(TierFailed, match="cgroup-make was not done: .* answered with what it never answers"):
        Privileged(program=sudo, root=False).call("cgroup-make", LEASE)


def test_the_pool_calls_it_by_sudo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sudo = tmp_path / "sudo"
    sudo.write_text(
        '#!/bin/sh\nprintf "%s " "$@" > "$0.log"\necho \'{"ok": false, "error": "no such thing"}\'\n'
    )
    sudo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    pool = Privileged(program=sudo, root=False)
    assert pool.available()
    with pytest.raises(TierFailed, match="cgroup-make was not done: no such thing"):
        pool.call("cgroup-make", LEASE)
    assert (tmp_path / "sudo.log").read_text() == f"-n {sudo} cgroup-make {LEASE} "


def test_a_sudo_that_asks_for_a_password_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sudo = tmp_path / "sudo"
    sudo.write_text("#!/bin/sh\necho 'sudo: a password is required' >&2\nexit 1\n")
    sudo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(TierFailed, match="sudo said: sudo: a password is required"):
        Privileged(program=sudo, root=False).call("cgroup-make", LEASE)


def test_without_root_and_without_the_program_there_is_no_way(tmp_path: Path) -> None:
    assert not Privileged(program=tmp_path / "absent", root=False).available()


async def test_the_ids_of_a_pools_own_leases_are_accepted(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        assert re.fullmatch(_LEASE, await take(pool, "2%", "key"))
