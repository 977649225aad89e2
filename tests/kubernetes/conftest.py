"""A real API server for the tests: etcd and kube-apiserver of the folder ``KUBEBUILDER_ASSETS``."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.control_plane import (
    Cluster,
    missing_programs,
    scheduling_and_controlling,
    write_kubeconfig,
)
from support.node_agent import NodeAgent

ASSETS = Path(os.environ.get("KUBEBUILDER_ASSETS", "/usr/local/kubebuilder/bin"))
PROGRAMS = ("etcd", "kube-apiserver")


@dataclass(frozen=True)
class ApiServer:
    """How to talk to it as its administrator."""

    url: str
    token: str
    certificate: Path

    def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Return the status and the object that it answers."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        context = ssl.create_default_context(cafile=str(self.certificate))
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        try:
            with urllib.request.urlopen(request, context=context, timeout=30) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")

    def create(self, path: str, body: object) -> Any:
        """Create an object and return it as it was stored; what is there already is as good."""
        status, made = self.call("POST", path, body)
        if status == 409:
            return None
        assert status == 201, made.get("message", made)
        return made


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Return a fresh, empty API server; skip if there is none to start."""
    missing = [name for name in PROGRAMS if not os.access(ASSETS / name, os.X_OK)]
    missing += [] if shutil.which("openssl") else ["openssl"]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} in {ASSETS} (KUBEBUILDER_ASSETS names another folder)")
    folder = tmp_path_factory.mktemp("kubernetes")
    with ExitStack() as stack:
        etcd = stack.enter_context(_etcd(folder))
        yield stack.enter_context(_kube_apiserver(folder, etcd))


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return how to reach a cluster with scheduler and controllers: ``KUBECONFIG``, or a fresh one."""
    if os.environ.get("KUBECONFIG"):
        yield Path(os.environ["KUBECONFIG"])
        return
    if missing := missing_programs():
        pytest.skip(f"no {' and no '.join(missing)} in {ASSETS} (KUBEBUILDER_ASSETS names another folder)")
    server: ApiServer = request.getfixturevalue("api_server")
    path = tmp_path_factory.mktemp("control-plane") / "kubeconfig"
    write_kubeconfig(path, server.url, server.token, server.certificate)
    with scheduling_and_controlling(path):
        yield path


@pytest.fixture(scope="module")
def cluster(kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return a cluster without nodes yet. Those that a module adds, and their pods, go with it."""
    if os.environ.get("KUBECONFIG"):
        yield Cluster(kubeconfig)
        return
    with NodeAgent(kubeconfig, tmp_path_factory.mktemp("nodes")) as agent:
        yield Cluster(kubeconfig, agent)


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """Return the name of a fresh namespace, which goes with the test."""
    name = f"test-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@contextmanager
def _etcd(folder: Path) -> Iterator[str]:
    clients, peers = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
    command = [ASSETS / "etcd", "--data-dir", folder / "etcd", "--unsafe-no-fsync"]
    command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
    command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
    command += ["--initial-cluster", f"default={peers}"]
    with _running(command, folder / "etcd.log"):
        yield clients


@contextmanager
def _kube_apiserver(folder: Path, etcd: str) -> Iterator[ApiServer]:
    port, token = _free_port(), secrets.token_hex(16)
    tokens, key, certificates = folder / "tokens.csv", folder / "key.pem", folder / "certificates"
    tokens.touch(mode=0o600)
    tokens.write_text(f"{token},admin,admin,system:masters\n")
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    command = [ASSETS / "kube-apiserver", f"--etcd-servers={etcd}", f"--secure-port={port}"]
    command += ["--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--cert-dir={certificates}"]
    command += ["--service-cluster-ip-range=10.0.0.0/24", "--service-account-issuer=https://localhost"]
    command += [f"--service-account-signing-key-file={key}", f"--service-account-key-file={key}"]
    command += [f"--token-auth-file={tokens}", "--authorization-mode=RBAC"]
    # No controller makes service accounts here, and pods are refused without.
    command += ["--disable-admission-plugins=ServiceAccount", "--feature-gates=DRAConsumableCapacity=true"]
    # Pods of a lost node are evicted after seconds, and not after five minutes.
    command += [f"--default-{why}-toleration-seconds=2" for why in ("not-ready", "unreachable")]
    server = ApiServer(f"https://127.0.0.1:{port}", token, certificates / "apiserver.crt")
    with _running(command, folder / "kube-apiserver.log") as process:
        _await_ready(server, process, folder / "kube-apiserver.log")
        yield server


def _await_ready(server: ApiServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 90
    while not _is_ready(server):
        assert process.poll() is None, log.read_text()[-2_000:]
        assert time.monotonic() < deadline, log.read_text()[-2_000:]
        time.sleep(0.05)


def _is_ready(server: ApiServer) -> bool:
    """Whether it serves, and has made the namespace that the tests use."""
    try:
        return server.call("GET", "/api/v1/namespaces/default")[0] == 200
    except OSError:
        return False


@contextmanager
def _running(command: list[Any], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
