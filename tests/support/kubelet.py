"""A cluster of Kubernetes' own programs on this machine, whose pods are real containers.

etcd, kube-apiserver, kube-scheduler, kube-controller-manager, kube-proxy and a
kubelet of ``KUBEBUILDER_ASSETS``, over the system's containerd, runc and CNI
plugins, all within namespaces of their own (``support.namespaces``), so that
several can run at once. If there is a ``coredns`` beside them, it runs in a pod, by which
pods find services by their names, and nothing outside the cluster; if there is a
``kube-router``, its firewall enforces NetworkPolicies, otherwise nothing does::

    with real_cluster(folder, [image_archive]) as cluster:   # as root; a minute
        cluster.kubectl("get", "nodes")

Nothing is pulled: images are those that were given. Pods and services are
reached from here by their addresses. Its node is ``node-1``.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from support import cluster_dns
from support.api_server import ApiServer
from support.certificates import Pair, server_certificate, write_key
from support.control_plane import ASSETS, SCHEDULERS, Cluster, write_kubeconfig
from support.namespaces import Machine, machine, may_make_machines

_OURS = (
    "etcd",
    "kube-apiserver",
    "kube-scheduler",
    "kube-controller-manager",
    "kube-proxy",
    "kubelet",
    "kubectl",
)
_SYSTEM = (
    "containerd",
    "ctr",
    "runc",
    "buildah",
    "catatonit",
    "nsenter",
    "unshare",
    "ip",
    "iptables",
    "conntrack",
)
_CNI = Path("/usr/lib/cni")
_FIREWALL = ASSETS / "kube-router"
NODE = "node-1"
#: What pods stand on: does nothing but take over their orphans.
PAUSE = "localhost/pause:1"
_SOCKET = "/run/containerd/containerd.sock"


def no_names() -> str:
    """Return why pods of such a cluster find no services by their names, in words; nothing if they do."""
    there = os.access(ASSETS / "coredns", os.X_OK)
    return "" if there else f"no coredns in {ASSETS}: pods would not find services"


def no_firewall() -> str:
    """Return why NetworkPolicies are not enforced in such a cluster, in words; nothing if they are."""
    if not os.access(_FIREWALL, os.X_OK):
        return f"no kube-router in {ASSETS}: nothing enforces NetworkPolicies"
    return "" if shutil.which("ipset") else "no ipset (Debian has a package of this name)"


def missing() -> str:
    """Return why there can be no such cluster here, in words; nothing if there can."""
    ours = [name for name in _OURS if not os.access(ASSETS / name, os.X_OK)]
    if ours:
        return f"no {' and no '.join(ours)} in {ASSETS} (KUBEBUILDER_ASSETS names another folder)"
    system = [name for name in _SYSTEM if shutil.which(name) is None]
    if system:
        return f"no {' and no '.join(system)} (Debian has packages of these names)"
    if not (_CNI / "bridge").exists():
        return f"no CNI plugins in {_CNI} (Debian's package containernetworking-plugins)"
    return "" if may_make_machines() else "containers need root here, and namespaces"


class RealCluster(Cluster):
    """A cluster with one real node."""

    def __init__(self, kubeconfig: Path, made: Machine, folder: Path, server: ApiServer) -> None:
        """Take what has been started."""
        super().__init__(kubeconfig)
        self.machine, self.folder, self.server = made, folder, server

    def ctr(self, *arguments: object) -> str:
        """Return what containerd answers."""
        return self.machine.run("ctr", "--address", _SOCKET, "--namespace", "k8s.io", *arguments)

    def log(self, program: str) -> str:
        """Return what one of the programs wrote."""
        return (self.folder / f"{program}.log").read_text(errors="replace")

    def signal(self, program: str, signum: int) -> None:
        """Send a signal to one of the programs."""
        pid = self.machine.run("pidof", "-s", ASSETS / program).strip()
        self.machine.run("kill", f"-{int(signum)}", pid)

    def show(self, node: Mapping[str, Any]) -> None:
        """Show the node as another one (see ``support.clusters``): its labels, annotations and resources."""
        about = {key: node["metadata"].get(key, {}) for key in ("labels", "annotations")}
        about["labels"] = {k: v for k, v in about["labels"].items() if k != "kubernetes.io/hostname"}
        taints = node.get("spec", {}).get("taints", [])
        self.kubectl(
            "patch",
            "node",
            NODE,
            "--type=merge",
            "-p",
            json.dumps({"metadata": about, "spec": {"taints": taints}}),
        )
        amounts = {k: v for k, v in node["status"]["allocatable"].items() if "/" in k}
        status = json.dumps({"status": {"capacity": amounts, "allocatable": amounts}})
        self.kubectl("patch", "node", NODE, "--subresource=status", "--type=merge", "-p", status)


def make_home(folder: Path, below: Path) -> None:
    """Make the folder of a home that the user of a container reaches."""
    folder.mkdir()
    os.chown(folder, 1000, 100)
    for each in (below, *below.parents):
        if each.stat().st_mode & 0o001 == 0 and each.is_relative_to(below.parents[2]):
            each.chmod(each.stat().st_mode | 0o011)


@contextmanager
def real_cluster(folder: Path, images: Sequence[Path] = ()) -> Iterator[RealCluster]:
    """Run one; ``images`` are archives of what its pods may run."""
    mounts = [
        (folder / "kubelet", "/var/lib/kubelet"),
        (folder / "run", "/run/containerd"),
        (folder / "cni", "/var/lib/cni"),
        (folder / "pod-logs", "/var/log/pods"),
        (folder / "container-logs", "/var/log/containers"),
        (folder / "netns", "/run/netns"),
    ]
    with ExitStack() as after, machine(mounts) as made:
        after.callback(_remove_cgroups, folder / "run")
        programs = _Programs(after, made, folder)
        cluster = programs.control_plane()
        programs.containerd()
        for archive in (*_own_images(folder), *images):
            cluster.ctr("images", "import", archive)
        programs.node()
        _await(lambda: _is_ready(cluster), 120, lambda: cluster.log("kubelet")[-3_000:])
        programs.firewall()
        if not no_names():
            _start_dns(cluster)
        yield cluster


class _Programs:
    """Starts the programs, each with a log of its own; they end with their machine, and are waited for."""

    def __init__(self, after: ExitStack, made: Machine, folder: Path) -> None:
        self._after, self._machine, self._folder = after, made, folder
        folder.mkdir(parents=True, exist_ok=True)
        names = [made.address, "127.0.0.1", _first(made.services), "localhost", "kubernetes"]
        names += ["kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
        self._pair: Pair = server_certificate(folder, names)
        self._url = f"https://{made.address}:6443"
        self._token = secrets.token_hex(16)
        self._kubeconfig = write_kubeconfig(
            folder / "kubeconfig", self._url, self._token, self._pair.authority
        )

    def _start(self, program: object, *arguments: object) -> None:
        log = self._folder / f"{Path(str(program)).name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._machine.inside(program, *arguments),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._after.callback(_end, process)

    def control_plane(self) -> RealCluster:
        """Start what decides."""
        self._start(ASSETS / "etcd", "--data-dir", self._folder / "etcd", "--unsafe-no-fsync")
        self._api_server()
        server = ApiServer(self._url, self._token, self._pair.authority)
        log = self._folder / "kube-apiserver.log"
        _await(lambda: _answers(server), 90, lambda: log.read_text()[-3_000:])
        self._start(ASSETS / "kube-scheduler", f"--config={self._scheduler_settings()}", "--secure-port=0")
        self._start(
            ASSETS / "kube-controller-manager",
            f"--kubeconfig={self._kubeconfig}", "--leader-elect=false", "--secure-port=0",
            "--authentication-skip-lookup=true", f"--root-ca-file={self._pair.authority}",
            f"--service-account-private-key-file={self._folder / 'accounts.key'}",
            "--use-service-account-credentials=false", "--node-monitor-grace-period=20s",
            "--node-monitor-period=2s",
        )  # fmt: skip
        return RealCluster(self._kubeconfig, self._machine, self._folder, server)

    def _api_server(self) -> None:
        key, tokens = self._folder / "accounts.key", self._folder / "tokens.csv"
        write_key(key)
        tokens.touch(mode=0o600)
        tokens.write_text(f"{self._token},admin,admin,system:masters\n")
        self._start(
            ASSETS / "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379", "--secure-port=6443",
            f"--bind-address={self._machine.address}", f"--advertise-address={self._machine.address}",
            f"--tls-cert-file={self._pair.certificate}", f"--tls-private-key-file={self._pair.key}",
            f"--cert-dir={self._folder}", f"--service-cluster-ip-range={self._machine.services}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={key}", f"--service-account-key-file={key}",
            f"--token-auth-file={tokens}", "--authorization-mode=RBAC", "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP", "--feature-gates=DRAConsumableCapacity=true",
        )  # fmt: skip

    def _scheduler_settings(self) -> Path:
        return self._write(
            "scheduler.json",
            {
                "apiVersion": "kubescheduler.config.k8s.io/v1",
                "kind": "KubeSchedulerConfiguration",
                "clientConnection": {"kubeconfig": str(self._kubeconfig)},
                "leaderElection": {"leaderElect": False},
                "podMaxBackoffSeconds": 2,
                "profiles": [{"schedulerName": name} for name in SCHEDULERS],
            },
        )

    def containerd(self) -> None:
        """Start what runs containers."""
        networks = self._folder / "networks"
        networks.mkdir()
        (networks / "10-bridge.conflist").write_text(json.dumps(_network(self._machine)))
        settings = self._folder / "containerd.toml"
        settings.write_text(
            _CONTAINERD.format(folder=self._folder, socket=_SOCKET, networks=networks, pause=PAUSE, cni=_CNI)
        )
        self._start("containerd", "--config", settings)
        socket = self._folder / "run" / Path(_SOCKET).name
        _await(socket.exists, 60, lambda: (self._folder / "containerd.log").read_text()[-3_000:])

    def node(self) -> None:
        """Start what makes a node of this machine."""
        resolver = self._folder / "resolv.conf"
        resolver.write_text(f"nameserver {self._machine.outside}\n")
        settings = _kubelet(self._machine, resolver)
        if not no_names():
            settings |= {"clusterDNS": [_dns_address(self._machine)], "clusterDomain": "cluster.local"}
        self._start(
            ASSETS / "kubelet",
            f"--config={self._write('kubelet.json', settings)}", f"--kubeconfig={self._kubeconfig}",
            f"--hostname-override={NODE}", f"--node-ip={self._machine.address}",
        )  # fmt: skip
        proxy = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "hostnameOverride": NODE,
            "clusterCIDR": self._machine.pods,
            "clientConnection": {"kubeconfig": str(self._kubeconfig)},
            "conntrack": {"maxPerCore": 0},
            "iptables": {"minSyncPeriod": "100ms"},
        }
        self._start(ASSETS / "kube-proxy", f"--config={self._write('proxy.json', proxy)}")

    def firewall(self) -> None:
        """Start what enforces NetworkPolicies, where there is such a program."""
        if not no_firewall():
            self._start(
                _FIREWALL, "--run-firewall=true", "--run-router=false", "--run-service-proxy=false",
                f"--kubeconfig={self._kubeconfig}", f"--hostname-override={NODE}", "--enable-ipv6=false",
                f"--service-cluster-ip-range={self._machine.services}", "--metrics-port=0",
            )  # fmt: skip

    def _write(self, name: str, settings: Mapping[str, Any]) -> Path:
        path = self._folder / name
        path.write_text(json.dumps(settings))
        return path


def _network(made: Machine) -> dict[str, Any]:
    addresses = {"type": "host-local", "ranges": [[{"subnet": made.pods}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [{**bridge, "ipam": addresses}]}


def _kubelet(made: Machine, resolver: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": made.address,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": f"unix://{_SOCKET}",
        "resolvConf": str(resolver),
        # This machine may be a container itself, with control groups of the first version.
        "failCgroupV1": False,
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "cgroupDriver": "cgroupfs",
        "failSwapOn": False,
        "nodeStatusUpdateFrequency": "2s",
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"nodefs.available": "0%", "imagefs.available": "0%", "memory.available": "10Mi"},
        "maxPods": 200,
        "registryPullQPS": 0,
    }


_CONTAINERD = """version = 2
root = "{folder}/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "{networks}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""


def _own_images(folder: Path) -> Iterator[Path]:
    """Return archives of the images that every cluster needs, made of programs that are here."""
    pause = shutil.which("catatonit")
    assert pause is not None
    yield _image_of(Path(pause), PAUSE, ["/catatonit", "-P"], folder / "pause.tar")
    if not no_names():
        yield _image_of(ASSETS / "coredns", cluster_dns.IMAGE, [cluster_dns.PROGRAM], folder / "coredns.tar")


def _image_of(program: Path, name: str, command: Sequence[str], archive: Path) -> Path:
    """Return an archive of an image whose one file is a program, which lies where its command says."""
    container = _out("buildah", "from", "scratch")
    _out("buildah", "copy", container, program, command[0])
    _out("buildah", "config", "--entrypoint", json.dumps(command), container)
    _out("buildah", "commit", "--rm", container, f"docker-archive:{archive}:{name}")
    return archive


def _dns_address(made: Machine) -> str:
    """Return the address of the Service of names: by custom the tenth."""
    return f"{_first(made.services)}0"


def _start_dns(cluster: RealCluster) -> None:
    """Answer for the names of services from now on."""
    cluster.apply(*cluster_dns.dns(_dns_address(cluster.machine)))
    cluster.kubectl("rollout", "status", "-n", cluster_dns.NAMESPACE, "deployment/coredns", "--timeout=120s")


def _out(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _is_ready(cluster: Cluster) -> bool:
    nodes = cluster.get("nodes")["items"]
    conditions = [each for node in nodes for each in node["status"].get("conditions", ())]
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _answers(server: ApiServer) -> bool:
    try:
        return server.call("GET", "/readyz")[0] == 200
    except OSError:
        return False


def _first(network: str) -> str:
    return f"{network.partition('/')[0].rpartition('.')[0]}.1"


def _await(is_so: Any, seconds: float, why_not: Any) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, why_not()
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for what stood outside for a program that has ended; it may have been stopped with it."""
    process.kill()
    process.wait()


def _remove_cgroups(run: Path) -> None:
    """Remove the control groups that its containers have left, as soon as their processes are gone."""
    ours = {each.name for each in run.glob("io.containerd.runtime.v2.task/k8s.io/*")}
    for folder in Path("/sys/fs/cgroup").glob("**/k8s.io/*/"):
        if folder.name in ours:
            with suppress(AssertionError):
                _await(partial(_is_removed, folder), 10, lambda folder=folder: f"{folder} is in use")


def _is_removed(folder: Path) -> bool:
    with suppress(OSError):
        folder.rmdir()
    return not folder.exists()
