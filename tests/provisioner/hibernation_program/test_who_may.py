"""Who calls the program, for whose kernel, and with what words."""

from __future__ import annotations

import grp
import json
import os
import subprocess
from pathlib import Path

import pytest

from support.hibernating import PYTHON, Installation, User, asleep, status, until, why_no_users

_WHY = why_no_users()
pytestmark = [pytest.mark.hibernation, pytest.mark.skipif(bool(_WHY), reason=f"no user can: {_WHY}")]


def test_nobody_else_has_anything_done_with_a_kernel(ada: User, bob: User) -> None:
    kernel = asleep(ada)
    assert bob.call("list")["kernels"] == []
    for words in (("restore", kernel), ("dump", kernel), ("remove", kernel), ("note", kernel)):
        answer = bob.call(*words, note={})
        assert (answer["ok"], answer["gone"]) == (False, True)
    assert bob.call("remove", "0" * 32)["error"] == answer["error"]  # it tells nothing
    assert len(ada.call("list")["kernels"]) == 1


def test_who_has_a_removed_users_number_sees_nothing_of_theirs(ada: User, installation: Installation) -> None:
    asleep(ada)
    other = f"{ada.name}x"
    allowed = Path(f"/etc/sudoers.d/gpu-pool-test-{other}")
    allowed.write_text(f"{other} ALL=(root) NOPASSWD: {installation.program}\n")
    # It refuses as long as a process of that user's is about to end.
    until(lambda: subprocess.run(["usermod", "--login", other, ada.name], check=False).returncode == 0)
    try:
        assert User(other, str(installation.program)).call("list")["kernels"] == []
    finally:
        subprocess.run(["usermod", "--login", ada.name, other], check=True)
        allowed.unlink()
    assert len(ada.call("list")["kernels"]) == 1


def test_root_sees_all_and_lets_none_of_them_go_on(ada: User, installation: Installation) -> None:
    kernel = asleep(ada)

    def by_root(*words: str) -> dict[str, object]:
        done = subprocess.run([installation.program, *words], input=b"{}\n", capture_output=True, check=False)
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    found = by_root("list")["kernels"]
    assert isinstance(found, list)
    assert [(each["id"], each["uid"]) for each in found] == [(kernel, ada.entry.pw_uid)]
    for verb in ("restore", "dump"):
        assert by_root(verb, kernel)["gone"] is True
    assert by_root("remove", kernel) == {"ok": True}
    assert ada.call("list")["kernels"] == []


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("run",),
        ("dump",),
        ("list", "x"),
        ("restore", "../" + "0" * 29),
        ("restore", "0" * 32 + "\n"),
        ("restore", "0" * 33),
        ("restore", "A" * 32),
        ("remove", "/etc"),
        ("remove", ".."),
        ("dump", "٣" * 32),
    ],
)
def test_other_words_are_refused_before_anything_is_read(ada: User, words: tuple[str, ...]) -> None:
    answer = ada.said(b"", *words)
    assert not answer["ok"]
    assert "accepted are" in answer["error"] or "is no kernel's ID" in answer["error"]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff\xfe\n",
        b"[]\n",
        b"{",
        b"[" * 100_000 + b"\n",
        b'{"argv": ["' + b"x" * 10_000_000 + b'"]}\n',
    ],
)
def test_a_first_line_that_is_no_object_is_refused(ada: User, line: bytes) -> None:
    assert "must begin with a JSON object" in ada.said(line, "launch")["error"]


def test_a_user_says_no_settings(ada: User, tmp_path: Path) -> None:
    answer = ada.call("list", settings={"folder": str(tmp_path), "criu": "/bin/true"})
    assert answer["folder"] != str(tmp_path)


def test_who_comes_by_another_way_than_sudo_is_not_root(ada: User, installation: Installation) -> None:
    code = f"""
import os, subprocess
os.setresuid({ada.entry.pw_uid}, 0, 0)
subprocess.run([{str(installation.program)!r}, "list"], input=b"{{}}\\n")
"""
    told = []
    for words, variables in (
        ([PYTHON, "-c", code], {}),
        ([str(installation.program), "list"], {"PKEXEC_UID": str(ada.entry.pw_uid)}),
        ([str(installation.program), "list"], {"DOAS_USER": ada.name}),
    ):
        environment = {"PATH": os.environ["PATH"], **variables}
        done = subprocess.run(words, input=b"{}\n", capture_output=True, check=False, env=environment)
        told.append(json.loads(done.stdout).get("error", "done"))
    assert "who calls is not root" in told[0]
    assert "PKEXEC_UID is set" in told[1]
    assert "DOAS_USER is set" in told[2]


def test_a_kernel_has_no_group_that_its_server_has_not(ada: User) -> None:
    subprocess.run(["usermod", "--append", "--groups", "games", ada.name], check=True)
    try:
        request = {"argv": ["sleep", "600"], "env": {"PATH": "/bin"}, "cwd": "/", "umask": 0o022}
        with subprocess.Popen(
            ["sh", "-c", f"sudo -n {ada.command} launch; exit $?"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            **{**ada.identity, "extra_groups": []},
        ) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(json.dumps(request).encode() + b"\n")
            server.stdin.flush()
            kernel = json.loads(server.stdout.readline())
            groups = status(kernel["pid"])["Groups"].split()
            server.stdin.close()
    finally:
        subprocess.run(["gpasswd", "--delete", ada.name, "games"], check=True, capture_output=True)
    assert groups == [str(ada.entry.pw_gid)]


def test_a_user_who_left_a_group_is_told_and_nothing_is_lost(ada: User) -> None:
    subprocess.run(["usermod", "--append", "--groups", "games", ada.name], check=True)
    try:
        kernel = asleep(ada)
    finally:
        subprocess.run(["gpasswd", "--delete", ada.name, "games"], check=True, capture_output=True)
    games = grp.getgrnam("games").gr_gid
    assert f"no longer in the group {games}" in ada.restore(kernel).answer["error"]
    assert ada.call("list")["kernels"][0]["image"]
