"""A real API server for the tests: etcd and kube-apiserver of the folder ``KUBEBUILDER_ASSETS``."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.control_plane import ASSETS
from support.ports import free_port, free_ports

PROGRAMS = ("etcd", "kube-apiserver")
#: One line for each request that has been answered, and each watch that has begun.
_AUDITED = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
}


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
            with urllib.request.urlopen(request, context=context, timeout=120) as answer:
                return answer.status, _read(answer)
        except urllib.error.HTTPError as error:
            return error.code, _read(error)

    def create(self, path: str, body: object) -> Any:
        """Create an object and return it as it was stored; what is there already is as good."""
        status, made = self.call("POST", path, body)
        if status == 409:
            return None
        assert status == 201, made.get("message", made)
        return made


@dataclass(frozen=True)
class Account:
    """A service account whose requests are counted: ``namespace:name``, and a token of its own."""

    name: str
    folder: Path
    token: str

    @property
    def user(self) -> str:
        """What the API server calls it."""
        return f"system:serviceaccount:{self.name}"

    @property
    def log(self) -> Path:
        """Where the API server writes down what it asks."""
        return self.folder / "audit.log"

    def asked(self) -> Counter[tuple[str, str]]:
        """Return how often it has asked what, as ``("create", "pods")``.

        A list of what the API server does not serve, such as an older version of a kind, is not counted.
        """
        lines = map(json.loads, self.log.read_text().splitlines()) if self.log.exists() else ()
        # A watch is written down when it begins, and once more when it ends.
        return Counter(
            (each["verb"], each.get("objectRef", {}).get("resource", ""))
            for each in lines
            if (each["verb"] != "watch" or each["stage"] == "ResponseStarted") and not _is_unserved(each)
        )

    def flags(self) -> list[str]:
        """Return what makes kube-apiserver know it, and write down its requests and nobody else's."""
        rules = [{"level": "Metadata", "users": [self.user]}, {"level": "None"}]
        policy = self.folder / "policy.json"
        policy.write_text(json.dumps({**_AUDITED, "rules": rules}))
        return [f"--audit-policy-file={policy}", f"--audit-log-path={self.log}"]

    def row(self) -> str:
        """Return its line in a file of tokens."""
        groups = f"system:serviceaccounts,system:serviceaccounts:{self.name.partition(':')[0]}"
        return f'{self.token},{self.user},{self.user},"{groups}"\n'


def _is_unserved(request: dict[str, Any]) -> bool:
    """Whether a line of the log is of a list that is served nowhere."""
    return request["verb"] == "list" and request.get("responseStatus", {}).get("code") == 404


def missing_programs() -> list[str]:
    """Return the names of what an API server needs, and is not there."""
    missing = [name for name in PROGRAMS if not os.access(ASSETS / name, os.X_OK)]
    return missing + ([] if shutil.which("openssl") else ["openssl"])


@contextmanager
def api_serving(folder: Path, account: Account | None = None) -> Iterator[ApiServer]:
    """Run a fresh, empty API server in a folder of its own."""
    with etcd_running(folder) as etcd:
        program = Program.prepared(folder, etcd, account)
        with program.running():
            yield program.server


@contextmanager
def etcd_running(folder: Path) -> Iterator[str]:
    """Run a fresh etcd, and return its address."""
    clients, peers = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    command = [ASSETS / "etcd", "--data-dir", folder / "etcd", "--unsafe-no-fsync"]
    command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
    command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
    command += ["--initial-cluster", f"default={peers}"]
    with _running(command, folder / "etcd.log"):
        yield clients


@dataclass(frozen=True)
class Program:
    """One kube-apiserver, which may be run again and again over its etcd."""

    server: ApiServer
    command: list[Any]
    log: Path

    @classmethod
    def prepared(cls, folder: Path, etcd: str, account: Account | None = None) -> Program:
        """Write down who may ask it, and return how it is run."""
        port, token = free_port(), secrets.token_hex(16)
        tokens, key, certificates = folder / "tokens.csv", folder / "key.pem", folder / "certificates"
        tokens.touch(mode=0o600)
        tokens.write_text(f"{token},admin,admin,system:masters\n{account.row() if account else ''}")
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        command = [ASSETS / "kube-apiserver", f"--etcd-servers={etcd}", f"--secure-port={port}"]
        command += ["--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--cert-dir={certificates}"]
        command += ["--service-cluster-ip-range=10.0.0.0/24", "--service-account-issuer=https://localhost"]
        command += [f"--service-account-signing-key-file={key}", f"--service-account-key-file={key}"]
        command += [f"--token-auth-file={tokens}", "--authorization-mode=RBAC"]
        command += ["--allow-privileged=true"]  # as on nearly all clusters: policies decide it
        # No controller makes service accounts here, and pods are refused without.
        command += [
            "--disable-admission-plugins=ServiceAccount",
            "--feature-gates=DRAConsumableCapacity=true",
        ]
        # Pods of a lost node are evicted after seconds, and not after five minutes.
        command += [f"--default-{why}-toleration-seconds=2" for why in ("not-ready", "unreachable")]
        command += account.flags() if account else []
        server = ApiServer(f"https://127.0.0.1:{port}", token, certificates / "apiserver.crt")
        return cls(server, command, folder / "kube-apiserver.log")

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run it, from when it is ready."""
        with _running(self.command, self.log) as process:
            _await_ready(self.server, process, self.log)
            yield process


def _await_ready(server: ApiServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while not _is_ready(server):
        assert process.poll() is None, log.read_text()[-2_000:]
        assert time.monotonic() < deadline, log.read_text()[-2_000:]
        time.sleep(0.05)


def _is_ready(server: ApiServer) -> bool:
    """Whether it serves, and has made the namespace and the roles that the tests use."""
    try:
        paths = ("/api/v1/namespaces/default", "/readyz")
        return all(server.call("GET", path)[0] == 200 for path in paths)
    except OSError:
        return False


def _read(answer: Any) -> Any:
    """Return the object of an answer, or what it says in words."""
    text = answer.read()
    return json.loads(text) if text[:1] == b"{" else text.decode()


@contextmanager
def _running(command: list[Any], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        # What it keeps is of no use to anybody, and saying goodbye to all its clients takes it long.
        process.kill()
        process.wait()
