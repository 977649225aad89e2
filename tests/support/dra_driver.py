"""A DRA driver of one node that prepares every claim and notes which: what a kubelet sees of NVIDIA's.

It registers itself as a driver does, by a socket in the kubelet's ``plugins_registry``, and answers
``k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin``. It gives no device to any container (none of CDI's names).
Messages are written and read here: there are three of them, of text alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from support.clusters import listed, resource_slice
from support.kubelet import NODE, RealCluster
from support.whole_devices import DEVICE_CLASS

DRIVER = "gpu.nvidia.com"
#: Where a kubelet looks for drivers.
_HOME = Path("/var/lib/kubelet")
_REGISTERED_WITHIN = 60.0


@dataclass
class DraDriver:
    """What a driver was asked to do, in order: ``prepare`` or ``unprepare``, and the uid of the claim."""

    pool: str
    device: str
    calls: list[tuple[str, str]] = field(default_factory=list)
    _registered: threading.Event = field(default_factory=threading.Event)
    _refusal: str = ""

    @property
    def prepared(self) -> set[str]:
        """The uids of the claims that are prepared now."""
        found: set[str] = set()
        for verb, uid in self.calls:
            (found.add if verb == "prepare" else found.discard)(uid)
        return found

    def calls_of(self, *claims: str) -> list[tuple[str, str]]:
        """What it was asked to do with these claims; those of other tests may come late."""
        return [(verb, uid) for verb, uid in self.calls if uid in claims]

    def await_registration(self) -> None:
        """Return once the kubelet has taken it over."""
        assert self._registered.wait(_REGISTERED_WITHIN), "the kubelet has not asked for it"
        assert not self._refusal, self._refusal

    # -- What a kubelet asks ---------------------------------------------------

    def info(self, _: bytes, __: Any) -> bytes:
        """Say what it is and where: ``PluginInfo``."""
        endpoint = str(_HOME / "plugins" / DRIVER / "dra.sock")
        return b"".join(map(_written, (1, 2, 3, 4), ("DRAPlugin", DRIVER, endpoint, "v1.DRAPlugin")))

    def note_status(self, request: bytes, _: Any) -> bytes:
        """Hear what has become of that: ``RegistrationStatus``."""
        self._refusal = next((text.decode() for number, text in _fields(request) if number == 2), "")
        self._registered.set()
        return b""

    def prepare(self, request: bytes, _: Any) -> bytes:
        """Prepare claims: ``NodePrepareResources``."""
        device = _written(2, self.pool) + _written(3, self.device)
        return self._answer("prepare", request, _written(1, device))

    def unprepare(self, request: bytes, _: Any) -> bytes:
        """Do the opposite: ``NodeUnprepareResources``."""
        return self._answer("unprepare", request, b"")

    def _answer(self, verb: str, request: bytes, each: bytes) -> bytes:
        uids = [dict(_fields(claim))[2].decode() for _, claim in _fields(request)]
        self.calls += [(verb, uid) for uid in uids]
        return b"".join(_written(1, _written(1, uid) + _written(2, each)) for uid in uids)


@contextmanager
def dra_driver(kubelet: Path, pool: str, device: str) -> Iterator[DraDriver]:
    """Run one, of which the kubelet knows that has its folder here. It has one ``device`` in one ``pool``."""
    driver = DraDriver(pool, device)
    about = {"GetInfo": driver.info, "NotifyRegistrationStatus": driver.note_status}
    verbs = {"NodePrepareResources": driver.prepare, "NodeUnprepareResources": driver.unprepare}
    socket = kubelet / "plugins" / DRIVER / "dra.sock"
    registration = kubelet / "plugins_registry" / f"{DRIVER}-reg.sock"
    with (
        _answering(socket, "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin", verbs),
        _answering(registration, "pluginregistration.Registration", about),
    ):
        driver.await_registration()
        yield driver


@contextmanager
def one_gpu(cluster: RealCluster, device: str) -> Iterator[DraDriver]:
    """Have a GPU on the cluster's node, listed as NVIDIA's driver does, and run what prepares it."""
    with dra_driver(cluster.folder / "kubelet", NODE, device) as driver:
        # Not before: a kubelet deletes what is listed of drivers that it does not know.
        about = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
        listing = {**about, **resource_slice(listed(device), name=NODE)}
        cluster.apply(DEVICE_CLASS, listing)
        yield driver
        names = (f"resourceslice/{listing['metadata']['name']}", f"deviceclass/{DRIVER}")
        cluster.kubectl("delete", *names, "--ignore-not-found")


@contextmanager
def _answering(socket: Path, service: str, verbs: dict[str, Callable[[bytes, Any], bytes]]) -> Iterator[None]:
    socket.parent.mkdir(parents=True, exist_ok=True)
    server = grpc.server(ThreadPoolExecutor(4))
    handlers = {name: grpc.unary_unary_rpc_method_handler(verb) for name, verb in verbs.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"unix://{socket}")
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()
        socket.unlink(missing_ok=True)


# -- Protocol buffers: fields of bytes alone -----------------------------------


def _written(number: int, value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return bytes([number << 3 | 2]) + _length(len(data)) + data


def _length(size: int) -> bytes:
    found = bytearray()
    while size >= 0x80:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*found, size])


def _fields(message: bytes) -> Sequence[tuple[int, bytes]]:
    """Return the fields of bytes of a message, by number; numbers are passed over."""
    found, at = [], 0

    def number() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = number()
        size = number()
        if key & 7 == 2:
            found.append((key >> 3, message[at : at + size]))
            at += size
    return found
