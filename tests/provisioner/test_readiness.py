"""The watch, asked by a program that plays a kernel badly or well."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import zmq
from jupyter_client.session import Session

from gpu_pool_client import LeaseGone, PoolUnreachable, Process
from gpu_pool_provisioner.readiness import ReadinessWatch

KEY = b"the key of the connection file"


class Stage:
    """A process, sockets that a kernel would have bound, and a note of what was decided."""

    def __init__(self) -> None:
        self.child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, start_new_session=True)
        self.context = zmq.Context()
        self.shell, self.control = (self.context.socket(zmq.ROUTER) for _ in range(2))
        self.notes: list[str] = []
        self.confirm_error: Exception | None = None
        self.confirming, self.may_confirm = threading.Event(), threading.Event()
        self.may_confirm.set()

    async def confirm(self) -> None:
        self.confirming.set()
        await asyncio.to_thread(self.may_confirm.wait)
        self.notes.append("confirmed")
        if self.confirm_error is not None:
            error, self.confirm_error = self.confirm_error, None
            raise error

    async def give_back(self) -> None:
        alive = process.is_alive() if (process := Process.of(self.child.pid)) else False
        self.notes.append(f"given back, alive: {alive}")

    def watch(self, timeout: float = 120, adopted: bool = True, ip: str = "127.0.0.1") -> ReadinessWatch:
        process = Process.of(self.child.pid)
        assert process is not None
        ports = [sock.bind_to_random_port("tcp://127.0.0.1") for sock in (self.shell, self.control)]
        connection = {"transport": "tcp", "ip": ip, "shell_port": ports[0], "control_port": ports[1]}
        watch = ReadinessWatch(
            process,
            connection,
            Session(key=KEY),
            timeout=timeout,
            confirm=self.confirm,
            give_back=self.give_back,
        )
        if adopted:
            watch.adopted.set()
        watch.start()
        return watch

    def reply(self, channel: zmq.Socket[bytes], key: bytes = KEY) -> None:
        """Answer one request as a kernel with that key would."""
        assert channel.poll(10_000)
        identity, request = Session(key=KEY).recv(channel)
        assert request is not None
        assert request["msg_type"] == "kernel_info_request"
        Session(key=key).send(channel, "kernel_info_reply", {"status": "ok"}, parent=request, ident=identity)

    def reply_with(self, channel: zmq.Socket[bytes], *parts: bytes) -> None:
        """Answer one request with these parts, signed with the kernel's key."""
        assert channel.poll(10_000)
        identity, *_ = channel.recv_multipart()
        channel.send_multipart([identity, b"<IDS|MSG>", Session(key=KEY).sign(list(parts)), *parts])

    def close(self) -> None:
        self.child.kill()
        self.child.communicate()
        self.context.destroy(linger=0)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def finish(watch: ReadinessWatch) -> None:
    watch.join(30)
    assert not watch.is_alive()


@pytest.mark.parametrize("channel", ["shell", "control"])
def test_a_reply_on_either_channel_confirms(stage: Stage, channel: str) -> None:
    watch = stage.watch()
    stage.reply(getattr(stage, channel))
    finish(watch)
    assert stage.notes == ["confirmed"]
    assert stage.child.poll() is None


def test_silence_ends_the_kernel_and_then_its_lease(stage: Stage) -> None:
    finish(stage.watch(timeout=0.5))
    assert stage.child.wait(60) == -9
    assert stage.notes == ["given back, alive: False"]


def test_a_reply_signed_by_somebody_else_does_not_count(stage: Stage) -> None:
    watch = stage.watch(timeout=1)
    stage.reply(stage.control, key=b"a guess")
    finish(watch)
    assert "confirmed" not in stage.notes


@pytest.mark.parametrize(
    "parts", [(), (b"{}",) * 4, (b"[]",) * 4, (b"null",) * 4, (b"\xff",) * 4, (b"[" * 100_000,) * 4]
)
def test_what_cannot_be_read_is_no_reply(stage: Stage, parts: tuple[bytes, ...]) -> None:
    watch = stage.watch()
    stage.reply_with(stage.control, *parts)
    stage.reply(stage.shell)
    finish(watch)
    assert stage.notes == ["confirmed"]


def test_a_kernel_that_cannot_be_asked_is_ended_before_its_lease(stage: Stage) -> None:
    finish(stage.watch(ip="not an address"))
    assert stage.child.wait(60) == -9
    assert stage.notes == ["given back, alive: False"]


def test_a_kernel_that_cannot_be_confirmed_is_ended_before_its_lease(stage: Stage) -> None:
    stage.confirm_error = KeyError("what nobody expected")
    watch = stage.watch()
    stage.reply(stage.shell)
    finish(watch)
    assert stage.child.wait(60) == -9
    assert stage.notes == ["confirmed", "given back, alive: False"]


def test_a_reply_does_not_count_before_the_start_is_through(stage: Stage) -> None:
    finish(stage.watch(timeout=0.5, adopted=False))
    assert stage.notes == ["given back, alive: False"]


def test_after_stop_it_touches_nothing(stage: Stage) -> None:
    watch = stage.watch()
    assert watch.stop()
    finish(watch)
    assert stage.notes == []
    assert stage.child.poll() is None


def test_it_cannot_be_stopped_in_the_middle_of_a_decision(stage: Stage) -> None:
    stage.may_confirm.clear()
    watch = stage.watch()
    stage.reply(stage.shell)
    assert stage.confirming.wait(60)
    assert not watch.stop()
    stage.may_confirm.set()
    finish(watch)
    assert watch.stop()
    assert stage.notes == ["confirmed"]


def test_the_kernels_death_ends_the_watch(stage: Stage) -> None:
    watch = stage.watch()
    stage.child.kill()
    finish(watch)
    assert stage.notes == []


def test_a_kernel_whose_lease_is_gone_is_ended(stage: Stage) -> None:
    stage.confirm_error = LeaseGone("It ended.")
    watch = stage.watch()
    stage.reply(stage.shell)
    finish(watch)
    assert stage.child.wait(60) == -9


def test_a_pool_out_of_reach_is_asked_again(stage: Stage) -> None:
    stage.confirm_error = PoolUnreachable("Not now.")
    watch = stage.watch()
    stage.reply(stage.shell)
    finish(watch)
    assert stage.notes == ["confirmed", "confirmed"]
    assert stage.child.poll() is None
