"""The privileged program of hibernation: real users, by sudo, with a real CRIU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.hibernating import PYTHON, Installation, User, installed, users, why_no_users

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
