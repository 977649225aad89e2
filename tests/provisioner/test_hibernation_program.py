"""The privileged program of hibernation: real users, by sudo, with a real CRIU."""

from __future__ import annotations

import fcntl
import grp
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.hibernating import CRIU, PYTHON, Installation, Kernel, User, installed, users, why_no_users

_WHY = why_no_users()
pytestmark = [pytest.mark.hibernation, pytest.mark.skipif(bool(_WHY), reason=f"no user can: {_WHY}")]

#: Counts in a file of its own for as long as it lives, with what kernels have besides.
COUNTS = """
import os, socket, subprocess, sys, tempfile, threading, time
log = open("count", "w+")
listening = socket.create_server(("127.0.0.1", 0))
temporary = tempfile.TemporaryFile()
temporary.write(b"x" * 1000); temporary.flush()
child = subprocess.Popen(["sleep", "600"])
beats = 0
def beat():
    global beats
    while True:
        beats += 1
        time.sleep(0.01)
threading.Thread(target=beat, daemon=True).start()
while True:
    temporary.seek(0)
    words = (beats, os.getpid(), os.readlink("/proc/self"), len(temporary.read()), child.poll())
    log.seek(0); log.truncate()
    print(*words, listening.getsockname()[1], "", file=log, flush=True)
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def installation() -> Iterator[Installation]:
    with installed() as found:
        yield found


@pytest.fixture(scope="module")
def both(installation: Installation) -> Iterator[list[User]]:
    with users(installation, "ada", "bob") as made:
        yield made


@pytest.fixture
def ada(both: list[User]) -> Iterator[User]:
    yield both[0]
    both[0].end()


@pytest.fixture
def bob(both: list[User]) -> Iterator[User]:
    yield both[1]
    both[1].end()


def until(is_so: Callable[[], object], within: float = 60) -> None:
    give_up_at = time.monotonic() + within
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def pids_in(namespace: str) -> list[int]:
    """Return the processes of a pid namespace."""

    def is_there(pid: str) -> bool:
        try:
            return os.readlink(f"/proc/{pid}/ns/pid") == namespace
        except OSError:
            return False

    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit() and is_there(each.name)]


def said(user: User) -> list[str]:
    words: list[str] = []

    def has_all() -> bool:
        file = user.home / "count"
        words[:] = file.read_text().split() if file.exists() else []
        return len(words) == 6

    until(has_all)
    return words


def test_a_users_kernel_sleeps_and_goes_on(ada: User, installation: Installation) -> None:
    kernel = ada.launch([PYTHON, "-c", COUNTS])
    assert kernel.answer["ok"], kernel.answer
    before = said(ada)
    asleep = ada.call("dump", kernel.id, note={"of": "ada"})
    assert asleep["ok"], asleep
    assert kernel.process.wait(60) == 0
    assert not Path(f"/proc/{kernel.pid}").exists()
    assert asleep["image"]["listens"] == [["127.0.0.1", int(before[5])]]
    assert ada.call("list")["kernels"] == [{key: asleep[key] for key in asleep if key != "ok"}]
    before = said(ada)
    again = ada.restore(kernel.id)
    assert again.answer["ok"], again.answer
    until(lambda: int(said(ada)[0]) > int(before[0]))
    # It is process 3, and knows it; what it has open is there.
    assert said(ada)[1:] == ["3", "3", "1000", "None", before[5]]
    found = status(again.pid)
    assert found["Uid"].split() == [str(ada.entry.pw_uid)] * 4
    assert (found["NoNewPrivs"], int(found["CapPrm"], 16)) == ("1", 0)
    assert ada.call("remove", kernel.id)["ok"]
    again.close()
    assert not list(installation.asleep.glob("?" * 32))


def asleep(user: User, code: str = COUNTS) -> str:
    """Put a kernel to disk; return its ID."""
    kernel = user.launch([PYTHON, "-c", code])
    assert kernel.answer["ok"], kernel.answer
    if code is COUNTS:
        said(user)
    else:
        until((user.home / "ready").exists)
    told = user.call("dump", kernel.id)
    assert told["ok"], told
    return kernel.id


def goes_on(user: User, kernel: str) -> bool:
    (found,) = [each for each in user.call("list")["kernels"] if each["id"] == kernel]
    return bool(found["goes_on"])


# -- Whose kernel it is ---------------------------------------------------------------


def test_nobody_else_has_anything_done_with_a_kernel(ada: User, bob: User) -> None:
    kernel = asleep(ada)
    assert bob.call("list")["kernels"] == []
    for words in (("restore", kernel), ("dump", kernel), ("remove", kernel), ("note", kernel)):
        answer = bob.call(*words, note={})
        assert (answer["ok"], answer["gone"]) == (False, True)
    assert bob.call("remove", "0" * 32)["error"] == answer["error"]  # it tells nothing
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


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"argv": []}, "argv must be"),
        ({"argv": "sh"}, "argv must be"),
        ({"argv": ["sh", "a\0b"]}, "argv must be"),
        ({"argv": ["sh", 1]}, "argv must be"),
        ({"env": {"A": 1}}, "argv must be"),
        ({"env": {"A=B": "x\0"}}, "argv must be"),
        ({"cwd": "/\0"}, "cwd must be"),
        ({"umask": "022"}, "umask a number"),
        ({"umask": -1}, "umask a number"),
        ({"cwd": "/root"}, "Permission denied"),
        ({"argv": ["/nowhere/python"]}, "No such file"),
    ],
)
def test_what_cannot_be_run_is_refused_and_leaves_nothing(
    ada: User, installation: Installation, changed: dict[str, object], why: str
) -> None:
    request = {"argv": ["sh"], "env": {"PATH": "/bin"}, "cwd": "/", "umask": 0o022, **changed}
    answer = ada.call("launch", **request)
    assert why in answer["error"]
    assert not list(installation.asleep.glob("?" * 32))


def test_a_user_says_no_settings(ada: User, tmp_path: Path) -> None:
    answer = ada.call("list", settings={"folder": str(tmp_path), "criu": "/bin/true"})
    assert answer["folder"] != str(tmp_path)


# -- What the kernel has, and what it gets --------------------------------------------


def test_a_kernel_has_no_right_of_roots_before_and_after(ada: User) -> None:
    """Neither by a program with the setuid bit, nor by what our processes have open or keep."""
    code = """
import os, subprocess, time
n = 0
while True:
    n += 1
    su = subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode
    seen = sorted(int(each) for each in os.listdir("/proc") if each.isdigit())
    try:
        first = len(os.listdir("/proc/1/fd"))
    except PermissionError:
        first = "refused"
    opens = [os.readlink(f"/proc/self/fd/{each}") for each in (0, 1, 2)]
    others = [each for each in os.listdir("/proc/self/fd") if int(each) > 3]
    with open("ready.new", "w") as file:
        print(n, su, first, len(others), *opens, seen[:3], file=file)
    os.rename("ready.new", "ready")
    time.sleep(0.01)
"""
    kernel = asleep(ada, code)
    before = (ada.home / "ready").read_text().split()
    again = ada.restore(kernel)
    assert again.answer["ok"], again.answer
    until(lambda: int((ada.home / "ready").read_text().split()[0]) > int(before[0]) + 1)
    for words in (before, (ada.home / "ready").read_text().split()):
        assert words[1:5] == ["1", "refused", "0", "/dev/null"]
        assert words[7:] == ["[1,", "2,", "3]"]
    inside = pids_in(os.readlink(f"/proc/{again.pid}/ns/pid"))
    assert len(inside) >= 3
    for each in inside:
        found = status(each)
        assert set(found["Uid"].split()) == {str(ada.entry.pw_uid)}
        assert (found["NoNewPrivs"], int(found["CapPrm"], 16)) == ("1", 0)


def test_a_user_neither_reads_nor_writes_an_image(ada: User, installation: Installation) -> None:
    kernel = asleep(ada)
    folder = installation.asleep / kernel
    for path in (installation.asleep, folder):
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (0, 0o700)
    for path in (folder / "image").iterdir():
        assert (path.stat().st_uid, path.stat().st_mode & 0o222 if path.suffix == ".img" else 0) == (0, 0)
    for words in (["ls", folder], ["cat", folder / "image/header.json"], ["touch", folder / "image/x"]):
        assert subprocess.run(words, capture_output=True, check=False, **ada.identity).returncode != 0


def test_a_damaged_image_is_not_restored(ada: User, installation: Installation) -> None:
    kernel = asleep(ada)
    pages = next((installation.asleep / kernel / "image").glob("pages-*.img"))
    whole = pages.read_bytes()
    pages.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "what is on disk is damaged" in ada.restore(kernel).answer["error"]
    pages.write_bytes(whole)
    assert ada.restore(kernel).answer["ok"]


# -- Paths that are other ones when it wakes --------------------------------------------

OPENS = """
import os, time
folder = os.path.expanduser("~/folder")
os.mkdir(folder)
kept = open(folder + "/kept", "w+"); kept.write("x" * 32); kept.flush()
{more}
open(os.path.expanduser("~/ready"), "w").close()
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def secret(installation: Installation) -> Iterator[Path]:
    """Return a folder of root's with a file of as many bytes as the kernel's."""
    folder = installation.folder / "secret"
    folder.mkdir(0o700)
    (folder / "kept").write_text("s" * 32)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_an_open_file_that_is_a_link_to_roots_is_not_opened(ada: User, secret: Path, what: str) -> None:
    kernel = asleep(ada, OPENS.format(more=""))
    folder = ada.home / "folder"
    replaced, by = (folder / "kept", secret / "kept") if what == "file" else (folder, secret)
    replaced.rename(ada.home / "before")
    replaced.symlink_to(by)
    answer = ada.restore(kernel).answer
    assert not answer["ok"]
    assert "changed, or went, while it slept" in answer["error"]
    assert (secret / "kept").read_text() == "s" * 32
    # What it was is there again, and it goes on.
    replaced.unlink()
    (ada.home / "before").rename(replaced)
    assert ada.restore(kernel).answer["ok"]


def test_a_file_that_is_a_link_to_roots_by_the_time_that_criu_runs_is_not_opened(
    ada: User, installation: Installation, secret: Path, criu: Callable[[str], None]
) -> None:
    """The user is faster than CRIU, after the program has looked: CRIU's own rights do not suffice."""
    kernel = asleep(ada, OPENS.format(more=""))
    kept = ada.home / "folder" / "kept"
    criu(f'[ "$1" = restore ] && {{ mv {kept} {kept}.old; ln -s {secret}/kept {kept}; }}')
    answer = ada.restore(kernel).answer
    assert not answer["ok"]
    assert "Permission denied" in answer["error"]


def test_a_deleted_files_folder_that_is_a_link_to_roots_is_not_written_to(ada: User, secret: Path) -> None:
    kernel = asleep(ada, OPENS.format(more='gone = open(folder + "/gone", "w+"); os.unlink(gone.name)'))
    folder = ada.home / "folder"
    (folder / "kept").rename(ada.home / "kept")
    folder.rename(ada.home / "before")
    folder.symlink_to(secret)
    before = sorted(each.name for each in secret.iterdir())
    assert not ada.restore(kernel).answer["ok"]
    assert sorted(each.name for each in secret.iterdir()) == before


def test_a_working_folder_that_is_a_link_to_roots_is_not_entered(ada: User, secret: Path) -> None:
    kernel = asleep(ada, OPENS.format(more="os.chdir(folder); kept.close()"))
    folder = ada.home / "folder"
    folder.rename(ada.home / "before")
    folder.symlink_to(secret)
    answer = ada.restore(kernel).answer
    assert not answer["ok"], os.readlink(f"/proc/{answer['pid']}/cwd")


# -- What else must hold ---------------------------------------------------------------


@pytest.fixture
def criu(installation: Installation) -> Iterator[Callable[[str], None]]:
    """Have a shell run something with the rights of CRIU, before CRIU itself."""
    wrapper = installation.folder / "criu"

    def install(before: str) -> None:
        wrapper.write_text(f'#!/bin/sh\n{before}\nexec {os.path.realpath(CRIU)} "$@"\n')
        wrapper.chmod(0o755)
        installation.configure(criu=str(wrapper))

    yield install
    installation.configure()


def test_criu_has_the_users_rights_and_two_capabilities(ada: User, criu: Callable[[str], None]) -> None:
    criu(f'cat /proc/self/status > {ada.home}/"$1"')
    kernel = asleep(ada)
    assert ada.restore(kernel).answer["ok"]
    for verb in ("dump", "restore"):
        lines = (ada.home / verb).read_text().splitlines()
        found = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        assert set(found["Uid"].split()) == {str(ada.entry.pw_uid)}
        assert set(found["Groups"].split()) <= {str(each) for each in ada.identity["extra_groups"]}
        capabilities = {found[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
        assert capabilities == {f"{1 << 19 | 1 << 40:016x}"}
        assert found["NoNewPrivs"] == "1"


def test_settings_that_others_can_write_are_refused(ada: User, installation: Installation) -> None:
    settings = installation.configure()
    settings.chmod(0o666)
    assert (
        ada.call("list")["error"]
        == f"{settings} is not root's alone: chown root {settings}; chmod go-w {settings}"
    )
    settings.chmod(0o644)
    assert ada.call("list")["ok"]


@pytest.mark.parametrize(
    "written", ['{"criu": 1}', '{"cpus": 1}', "[]", "{", '{"days": 0}', '{"folder": "asleep"}']
)
def test_settings_that_are_wrong_are_refused(ada: User, installation: Installation, written: str) -> None:
    settings = installation.configure()
    settings.write_text(written)
    why = ada.call("list")["error"]
    installation.configure()
    assert str(settings) in why


def test_a_criu_that_others_can_write_is_refused(ada: User, installation: Installation) -> None:
    kernel, other = asleep(ada), ada.launch(["sleep", "600"])
    theirs = ada.home / "criu"
    theirs.write_text(f"#!/bin/sh\ntouch {ada.home}/called\n")
    theirs.chmod(0o755)
    installation.configure(criu=str(theirs))
    told = [ada.call("check")["why"]]
    told += [ada.call("dump", other.id)["error"], ada.restore(kernel).answer["error"]]
    installation.configure()
    assert all("is not root's alone" in why for why in told)
    assert not (ada.home / "called").exists()


def test_of_two_restores_one_goes_on(ada: User) -> None:
    kernel = asleep(ada, OPENS.format(more=""))  # none of whose files changes meanwhile
    first = ada.restore(kernel)
    assert first.answer["ok"], first.answer
    assert ada.restore(kernel).answer["error"] == "it goes on already."
    first.close()
    again = ada.restore(kernel)
    assert again.answer["ok"], again.answer


def test_two_restores_at_once_let_one_go_on(ada: User) -> None:
    kernel = asleep(ada)
    calls = [ada.start("restore", kernel) for _ in range(3)]
    answers = []
    for each in calls:
        assert each.stdout is not None
        answers.append(json.loads(each.stdout.readline()))
    assert [each["ok"] for each in answers].count(True) == 1
    for each in calls:
        each.communicate()


def test_a_user_who_left_a_group_is_told_and_nothing_is_lost(ada: User) -> None:
    subprocess.run(["usermod", "--append", "--groups", "games", ada.name], check=True)
    try:
        kernel = asleep(ada)
    finally:
        subprocess.run(["gpasswd", "--delete", ada.name, "games"], check=True, capture_output=True)
    games = grp.getgrnam("games").gr_gid
    assert f"no longer in the group {games}" in ada.restore(kernel).answer["error"]
    assert ada.call("list")["kernels"][0]["image"]


@pytest.mark.parametrize(("setting", "whose"), [("user_mib", "your kernels"), ("all_mib", "kernels")])
def test_what_images_may_take_keeps_the_next_one_awake(
    ada: User, installation: Installation, setting: str, whose: str
) -> None:
    asleep(ada)
    installation.configure(**{setting: 20})
    kernel = ada.launch([PYTHON, "-c", "import time; kept = bytes(range(256)) * 80_000; time.sleep(600)"])
    until(lambda: int(status(kernel.pid)["VmRSS"].split()[0]) > 20_000)
    why = ada.call("dump", kernel.id)["error"]
    installation.configure()
    assert f"of the 20 MiB that {whose} may take on disk" in why
    assert goes_on(ada, kernel.id)
    assert ada.call("dump", kernel.id)["ok"]


def test_what_nobody_has_asked_for_in_days_is_removed_unless_a_server_has_it(
    ada: User, installation: Installation
) -> None:
    old, had, server = asleep(ada), asleep(ada), ada.launch(["sleep", "600"])
    assert ada.call("note", had, note={}, server=server.pid)["ok"]
    for each in (old, had):
        os.utime(installation.asleep / each, (1000, 1000))
    assert "a process of yours" in ada.call("note", old, note={}, server=os.getpid())["error"]
    ada.launch(["sleep", "60"])
    found = {each["id"] for each in ada.call("list")["kernels"]}
    assert (old in found, had in found) == (False, True)


def test_an_image_survives_a_reboot(ada: User, installation: Installation) -> None:
    """All processes are gone, and the system has another id: no process has what it had."""
    kernel = asleep(ada)
    state = installation.asleep / kernel / "kernel.json"
    said = json.loads(state.read_text())
    said["run"].update(boot="another", first=1, started=1)
    state.write_text(json.dumps(said))
    assert not goes_on(ada, kernel)
    assert ada.call("dump", kernel)["error"] == "it has ended"
    (before,) = ada.call("list")["kernels"]
    assert ada.restore(kernel).answer["ok"]
    # It is written anew, although the image from which it goes on is still there.
    assert ada.call("dump", kernel)["image"]["since"] > before["image"]["since"]


# -- What is killed, and what ends -----------------------------------------------------


def test_a_kernel_ends_with_its_server_and_leaves_nothing(ada: User, installation: Installation) -> None:
    kernel = ada.launch([PYTHON, "-c", COUNTS])
    said(ada)
    kernel.close()
    assert not Path(f"/proc/{kernel.pid}").exists()
    assert not list(installation.asleep.glob("?" * 32))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_criu_that_its_user_ends_or_stops_leaves_the_kernel_awake(
    ada: User, criu: Callable[[str], None], signum: signal.Signals
) -> None:
    criu(
        f'[ "$1" = dump ] && {{ echo $$ > {ada.home}/criu.new; mv {ada.home}/criu.new {ada.home}/criu; '
        f"while [ ! -e {ada.home}/may ]; do sleep 0.01; done; }}"
    )
    kernel = ada.launch([PYTHON, "-c", COUNTS])
    said(ada)
    with ada.start("dump", kernel.id) as dump:
        until((ada.home / "criu").exists)
        namespace = os.readlink(f"/proc/{kernel.pid}/ns/pid")
        number = (ada.home / "criu").read_text().strip()
        pid = next(pid for pid in pids_in(namespace) if status(pid)["NSpid"].split()[-1] == number)
        done = subprocess.run(["kill", f"-{int(signum)}", str(pid)], check=False, **ada.identity)
        assert done.returncode == 0
        assert dump.stdin is not None
        assert dump.stdout is not None
        if signum is signal.SIGSTOP:
            dump.stdin.close()  # its server has had enough
        assert not json.loads(dump.stdout.readline())["ok"]
    beats = int(said(ada)[0])
    until(lambda: int(said(ada)[0]) > beats)
    (ada.home / "may").touch()
    assert ada.call("dump", kernel.id)["ok"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_dump_that_is_killed_leaves_the_kernel_or_its_image_and_the_next_one_ends_it(
    ada: User, installation: Installation, criu: Callable[[str], None], when: str
) -> None:
    """Root kills the program while CRIU is about to run, or while it makes the image known."""
    hold = f"touch {ada.home}/begun; while [ ! -e {ada.home}/may ]; do sleep 0.01; done"
    criu(f'[ "$1" = dump ] && {{ {hold}; }}')
    kernel = ada.launch([PYTHON, "-c", COUNTS])
    said(ada)
    dump = ada.start("dump", kernel.id)
    until((ada.home / "begun").exists)
    caller = child_of(dump.pid)
    image = installation.asleep / kernel.id / "image"
    if when == "after":
        (ada.home / "may").touch()
        until(image.exists)
    os.kill(caller, signal.SIGKILL)
    dump.communicate()
    (ada.home / "may").touch()
    assert image.exists() == (when == "after")
    told = ada.call("dump", kernel.id)
    assert told["ok"] or (when == "after" and told["error"] == "it has ended"), told
    assert ada.call("list")["kernels"][0]["image"]
    assert kernel.process.wait(60) == 0
    again = ada.restore(kernel.id)
    assert again.answer["ok"], again.answer
    assert said(ada)


def stopped(ada: User, installation: Installation) -> tuple[Kernel, subprocess.Popen[bytes], Path]:
    """Return a kernel that CRIU has just written, its dump, and where it makes a large image whole."""
    kernel = ada.launch([PYTHON, "-c", "import os; kept = os.urandom(300_000_000)\n" + COUNTS])
    said(ada)
    dump = ada.start("dump", kernel.id)
    folder = installation.asleep / kernel.id
    new = folder / "image.new"
    until(lambda: new.exists() and new.stat().st_mode & 0o777 == 0o755)  # root's again
    return kernel, dump, folder


def test_a_dump_that_is_killed_once_criu_has_ended_leaves_nothing_stopped_in_the_next_image(
    ada: User, installation: Installation
) -> None:
    kernel, dump, folder = stopped(ada, installation)
    os.kill(child_of(dump.pid), signal.SIGKILL)
    dump.communicate()
    assert (folder / "image.new").exists()
    assert not (folder / "image").exists()
    assert ada.call("dump", kernel.id)["ok"]
    beats = int(said(ada)[0])
    assert ada.restore(kernel.id).answer["ok"]
    until(lambda: int(said(ada)[0]) > beats)


@pytest.mark.parametrize("what", ["kernel", "server"])
def test_a_kernel_that_ends_while_its_image_is_made_whole_does_not_come_back(
    ada: User, installation: Installation, what: str
) -> None:
    kernel, dump, folder = stopped(ada, installation)
    with dump:
        assert dump.stdin is not None
        assert dump.stdout is not None
        if what == "kernel":
            os.kill(int(kernel.answer["first"]), signal.SIGKILL)
        else:
            dump.stdin.close()
        assert json.loads(dump.stdout.readline()).get("error") == "it was ended meanwhile."
    assert not list(folder.glob("image*"))


def child_of(pid: int) -> int:
    """Return the program's process, which sudo has run."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def test_a_launch_that_is_killed_leaves_a_kernel_that_sleeps_and_ends_all_the_same(ada: User) -> None:
    kernel = ada.launch([PYTHON, "-c", COUNTS])
    said(ada)
    os.kill(child_of(kernel.process.pid), signal.SIGKILL)
    kernel.process.wait(60)
    beats = int(said(ada)[0])
    until(lambda: int(said(ada)[0]) > beats)
    assert ada.call("dump", kernel.id)["ok"]
    again = ada.restore(kernel.id)
    assert again.answer["ok"]
    os.kill(child_of(again.process.pid), signal.SIGKILL)
    again.close()
    until(lambda: not Path(f"/proc/{again.pid}").exists())


def test_a_restore_that_is_killed_leaves_the_image(ada: User, criu: Callable[[str], None]) -> None:
    hold = f"touch {ada.home}/begun; while [ ! -e {ada.home}/may ]; do sleep 0.01; done"
    criu(f'[ "$1" = restore ] && {{ {hold}; }}')
    kernel = asleep(ada)
    restore = ada.start("restore", kernel)
    until((ada.home / "begun").exists)
    os.kill(child_of(restore.pid), signal.SIGKILL)
    restore.communicate()  # its server lets go
    until(lambda: not goes_on(ada, kernel))
    (ada.home / "may").touch()
    again = ada.restore(kernel)
    assert again.answer["ok"], again.answer


# -- Numbers, locks and bounds -----------------------------------------------------------


def started(pid: int) -> int:
    """Return when a process has started, in ticks (proc(5))."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_an_answer_says_when_the_first_process_has_started(ada: User) -> None:
    kernel = ada.launch(["sleep", "600"])
    assert kernel.answer["started"] == started(int(kernel.answer["first"]))


def test_a_number_that_is_a_process_of_the_users_by_now_has_nothing_of_theirs_run(
    ada: User, installation: Installation
) -> None:
    """It is alone in namespaces of the user's own making, with a file of theirs in CRIU's place."""
    kernel = ada.launch([PYTHON, "-c", COUNTS])
    said(ada)
    theirs = ada.home / "theirs"
    theirs.write_text(f"#!/bin/sh\ntouch {ada.home}/called\n")
    theirs.chmod(0o755)
    drops = "exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all --ambient-caps=-all sleep 600"
    mounts = f"mount --bind {theirs} {os.path.realpath(CRIU)} && touch {ada.home}/mounted && {drops}"
    words = ["unshare", "-Urmpf", "--kill-child", "sh", "-c", mounts]
    with subprocess.Popen(words, stderr=subprocess.PIPE, **ada.identity) as other:
        until(lambda: (ada.home / "mounted").exists() or other.poll() is not None)
        if other.poll() is not None:
            assert other.stderr is not None
            pytest.skip(f"users have no namespaces of their own here: {other.stderr.read().decode().strip()}")
        number = child_of(other.pid)
        until(lambda: status(number)["NoNewPrivs"] == "1")
        state = installation.asleep / kernel.id / "kernel.json"
        told = json.loads(state.read_text())
        told["run"].update(first=number, started=started(number))
        state.write_text(json.dumps(told))
        answer = ada.call("dump", kernel.id)
        other.kill()
    assert not (ada.home / "called").exists()
    assert answer.get("error") == "it is not in namespaces that this program has made"


def test_a_terminal_stops_no_call(ada: User) -> None:
    kernel = ada.launch(["sleep", "600"])
    for signum in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
        os.kill(child_of(kernel.process.pid), signum)
        os.kill(int(kernel.answer["first"]), signum)
    kernel.process.stdin.close()  # type: ignore[union-attr]
    assert kernel.process.wait(60) == 0


def test_nobody_waits_for_who_holds_the_folder(bob: User, installation: Installation) -> None:
    asleep(bob)
    held = os.open(installation.asleep, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        asleep(bob)
    finally:
        os.close(held)


def test_a_deep_note_is_refused_and_stops_nobody(ada: User) -> None:
    kernel = asleep(ada)
    note = '{"a":' * 980 + "1" + "}" * 980
    answer = ada.said(f'{{"note": {note}}}\n'.encode(), "note", kernel)
    assert "20 levels" in answer["error"]
    assert ada.call("note", kernel, note={"a": [{"b": 1}]})["ok"]
    assert ada.call("list")["kernels"][0]["note"] == {"a": [{"b": 1}]}


def test_an_image_takes_no_more_than_was_reserved(ada: User, installation: Installation) -> None:
    """Files that have no name count for nothing in its memory, and go into its image."""
    code = """
import os, tempfile, time
kept = [tempfile.TemporaryFile(dir=".") for _ in range(4)]
for each in kept:
    each.write(b"x" * 60_000_000), each.flush()
open("ready", "w").close()
time.sleep(600)
"""
    kernel = ada.launch([PYTHON, "-c", code])
    until((ada.home / "ready").exists)
    assert "its image takes more than the " in ada.call("dump", kernel.id).get("error", "")
    assert goes_on(ada, kernel.id)
    assert not list((installation.asleep / kernel.id).glob("image*"))


def test_a_part_of_the_disk_stays_free(ada: User, installation: Installation) -> None:
    small = installation.folder / "small"
    small.mkdir(0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m,mode=700", "none", small], check=True)
    try:
        subprocess.run(["fallocate", "-l", "330M", small / "other"], check=True)  # 70 are left
        installation.configure(folder=str(small))
        kernel = ada.launch(["sleep", "600"])
        why = ada.call("dump", kernel.id).get("error", "")
        kernel.close()
    finally:
        installation.configure()
        subprocess.run(["umount", small], check=True)
        small.rmdir()
    assert "and the disk has " in why


def test_a_file_system_that_never_answers_is_not_waited_for(ada: User) -> None:
    """A user's own (FUSE): they mount it where a file was open, and it answers nothing."""
    if not Path("/dev/fuse").exists():
        pytest.skip("there is no /dev/fuse.")
    kernel = asleep(ada, OPENS.format(more=""))
    folder = ada.home / "folder"
    device = os.open("/dev/fuse", os.O_RDWR)
    try:
        options = f"fd={device},rootmode=40000,user_id={ada.entry.pw_uid},group_id={ada.entry.pw_gid}"
        mount = ["mount", "-i", "-t", "fuse", "-o", options, "none", folder]
        subprocess.run(mount, check=True, pass_fds=[device])
        why = ada.restore(kernel).answer["error"]
        assert "has not answered within 10 seconds" in why
    finally:
        subprocess.run(["umount", "-l", folder], check=False)
        os.close(device)
    assert ada.restore(kernel).answer["ok"]


# -- Who calls ---------------------------------------------------------------------------


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
