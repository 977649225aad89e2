"""What a reservation promises, tried on this machine's kernel."""

from __future__ import annotations

import contextlib
import gc
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import zmq
from jupyter_client.connect import LocalPortCache

from gpu_pool_provisioner.ports import SUPPORTED, PortReservation
from support.open_files import sockets_at

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="ports are reserved on Linux only")

#: Takes ports by bind(0) and by connecting, and prints how many of those it was told of it was given.
HAMMER = """
import socket, sys
ip, reuse, reserved = sys.argv[1], sys.argv[2] == "reuse", set(map(int, sys.argv[3].split(",")))
server = socket.create_server((ip, 0))
hits, kept = 0, []
for turn in range(4000):
    sock = socket.socket()
    if reuse:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("0.0.0.0" if turn % 2 else ip, 0))
    sock.listen()
    with socket.create_connection(server.getsockname()) as client:
        hits += client.getsockname()[1] in reserved
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1]) + bytes(7))
    server.accept()[0].close()
    hits += sock.getsockname()[1] in reserved
    kept.append(sock)
    if len(kept) > 300:
        kept.pop(0).close()
print(hits)
"""


@pytest.fixture(params=["127.0.0.1", "127.0.0.2", "0.0.0.0", "outside"])
def ip(request: pytest.FixtureRequest) -> str:
    return outside() if request.param == "outside" else str(request.param)


def outside() -> str:
    """Return an address at which others reach this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no way out")
        return str(sock.getsockname()[0])


@contextlib.contextmanager
def reserved(ip: str, count: int) -> Iterator[tuple[int, ...]]:
    reservation = PortReservation(ip, count)
    try:
        yield reservation.ports
    finally:
        reservation.close()


def test_a_kernel_can_bind_its_ports_again_and_again(ip: str) -> None:
    with reserved(ip, 5) as ports:
        for port in ports * 2:
            # A context each: when it has ended, as when a kernel has, its sockets are closed.
            with (
                zmq.Context() as context,
                context.socket(zmq.ROUTER) as kernel,
                context.socket(zmq.DEALER) as client,
            ):
                kernel.bind(f"tcp://{ip}:{port}")
                client.connect(f"tcp://{ip}:{port}")
                client.send(b"hello")
                assert kernel.recv_multipart()[1] == b"hello"


@pytest.mark.parametrize("way", ["reuse", "plain"])
def test_nobody_else_is_given_a_reserved_port(ip: str, way: str) -> None:
    with reserved(ip, 250) as ports:
        listed = ",".join(map(str, ports))
        done = subprocess.run(
            [sys.executable, "-c", HAMMER, ip, way, listed], capture_output=True, text=True, check=True
        )
    assert done.stdout == "0\n"


def test_stock_kernels_of_this_process_are_kept_apart() -> None:
    cache = LocalPortCache.instance()
    theirs = {port for port in range(1024, 65536) if port & 2} - cache.currently_used_ports
    cache.currently_used_ports |= theirs
    try:
        with reserved("127.0.0.1", 50) as ports:
            assert theirs.isdisjoint(ports)
            assert cache.currently_used_ports.issuperset(ports)
        assert cache.currently_used_ports.isdisjoint(ports)
    finally:
        cache.currently_used_ports -= theirs


def test_a_dropped_reservation_lets_go_quietly() -> None:
    reservation = PortReservation("127.0.0.1", 1)
    (port,) = reservation.ports
    assert sockets_at(port) == 1
    del reservation
    gc.collect()
    # Any process may have been given the port since.
    assert sockets_at(port) == 0


def test_an_address_that_is_not_local_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        PortReservation("203.0.113.1", 5)
