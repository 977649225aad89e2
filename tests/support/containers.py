"""Containers for tests, made by util-linux and iproute2: what a node of the tests starts for a pod.

A container has namespaces of its own, this machine's file system below a layer
of its own, which nobody else sees and which goes with it, and the user, groups
and capabilities that it is given. Those of a pod share a :class:`Sandbox`:
address, host name and, if wanted, processes. Addresses are of a :class:`Network`
on a bridge of this machine; who talks to one that has gone hears nothing.

Needs root, and namespaces, overlays and bridges of the kernel: see :func:`missing`.
There are no control groups, so no limits, and no seccomp.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "mount", "chroot")
_ROOT = Path(__file__).resolve().parents[2]
#: Reserved for tests of networks (RFC 2544), so that no machine is there.
_BLOCKS = [f"198.{18 + number // 32}.{number % 32 * 8}" for number in range(64)]
_PREFIX_LENGTH = 21
#: In which a container finds nothing of this machine.
_EMPTIED = ("tmp", "run")
#: What containerd leaves to a container that does not ask for more or less.
DEFAULT_CAPABILITIES = frozenset(
    {
        "audit_write", "chown", "dac_override", "fowner", "fsetid", "kill", "mknod", "net_bind_service",
        "net_raw", "setfcap", "setgid", "setpcap", "setuid", "sys_chroot",
    }
)  # fmt: skip
#: Holds a pod's namespaces, takes over its orphans (a signal that is ignored so does it), and ends when
#: the node agent does.
_SANDBOX = """set -e
mount -t tmpfs -o size=64m,mode=1777,nosuid,nodev,noexec shm "$2"
echo "$1" > /proc/sys/kernel/hostname
echo ready
exec env --ignore-signal=CHLD cat > /dev/null
"""
#: Runs its first argument as the first process of a process namespace, and ends as that does. In the
#: foreground, for a shell lets what it starts in the background ignore interrupts.
_FIRST = 'exec 3>&2 2> /dev/null; (exec sh -c "$0" sh "$@" 2>&3 3>&-); exit $?'
#: Makes the file system of a container of what lies in ``$layer``.
_FILES = """set -e
touch "$layer/begun"
root=$layer/root
mount -t overlay overlay -o "lowerdir=$image:/,upperdir=$layer/upper,workdir=$layer/work" "$root"
for each in $bound; do mkdir -p "$root$each"; mount --rbind "$each" "$root$each"; done
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"; mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
mount -t tmpfs -o mode=755,size=64m,nosuid tmpfs "$root/dev"
for name in null zero full random urandom tty; do
    touch "$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"
done
ln -s /proc/self/fd "$root/dev/fd"; ln -s fd/0 "$root/dev/stdin"
ln -s fd/1 "$root/dev/stdout"; ln -s fd/2 "$root/dev/stderr"
mkdir "$root/dev/shm" "$root/dev/pts" "$root/dev/mqueue"
mount -t mqueue -o nosuid,nodev,noexec mqueue "$root/dev/mqueue"
mount --rbind "$shm" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mounted() {  # its source, its target, and ro or rw
    if [ -d "$1" ]; then mkdir -p "$root$2"; else mkdir -p "${root}${2%/*}"; touch "$root$2"; fi
    mount --rbind "$1" "$root$2"
    if [ "$3" = ro ]; then mount -o remount,bind,ro "$root$2"; fi
}
"""
_RUN = """mkdir -p "$root$folder"
if [ "$readonly" = yes ]; then mount -o remount,bind,ro "$root"; fi
if ! chroot "$root" env "PATH=$path" sh -c 'cd "$2" && command -v -- "$1"' sh "$1" "$folder" > /dev/null; then
    echo "$1" > "$layer/not-found"
    exit 128
fi
touch "$layer/started"
"""


@functools.cache
def missing() -> str:
    """Return why there can be no containers here, in words; nothing if there can."""
    programs = [name for name in _PROGRAMS if shutil.which(name) is None]
    if programs:
        return f"no {' and no '.join(programs)} (util-linux and iproute2 have them)"
    if os.geteuid() != 0:
        return "nodes that run pods need root: users, mounts and a network are made"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for name in ("upper", "work", "root"):
            (Path(folder) / name).mkdir()
        layers = f"lowerdir=/,upperdir={folder}/upper,workdir={folder}/work"
        tried = f"mount -t overlay overlay -o {layers} {folder}/root && ip link add gpn-try type bridge"
        command = ["unshare", "--mount", "--net", "--pid", "--fork", "sh", "-c", tried]
        done = subprocess.run(command, capture_output=True, text=True)
    return f"no containers can be made here: {done.stderr.strip()}" if done.returncode else ""


@dataclass(frozen=True)
class Mount:
    """Something of this machine, and where a container has it."""

    source: Path
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Container:
    """What runs, as whom, with which files and rights."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    uid: int
    gid: int
    groups: Sequence[int] = ()
    mounts: Sequence[Mount] = ()
    capabilities: frozenset[str] = DEFAULT_CAPABILITIES
    no_new_privileges: bool = False
    read_only_root: bool = False


class Network:
    """Addresses of this machine's containers: a bridge."""

    def __init__(self) -> None:
        """Make it; addresses of networks that are there at the same time differ."""
        for number, block in enumerate(_BLOCKS):
            self.bridge, self._block = f"gpn{number}", block
            made = subprocess.run(["ip", "link", "add", self.bridge, "type", "bridge"], capture_output=True)
            if made.returncode == 0:
                break
        else:
            raise OSError("all bridges gpn0 to gpn63 are there: remove those that are of no use, by ip link")
        _ip(f"address add {self.outside}/{_PREFIX_LENGTH} dev {self.bridge}", f"link set {self.bridge} up")

    @property
    def outside(self) -> str:
        """Where containers reach this machine."""
        return f"{self._block}.1"

    def address(self, number: int) -> str:
        """Return one of its addresses."""
        start, third = self._block.rpartition(".")[::2]
        return f"{start}.{int(third) + number // 256 % 8}.{number % 256}"

    def join(self, pid: int, number: int) -> None:
        """Give the network namespace of a process an address."""
        host, hardware = self._link(number), f"02:67:70:00:{number // 256 % 256:02x}:{number % 256:02x}"
        address = self.address(number)
        _ip(
            f"link add {host} type veth peer name eth0 address {hardware} netns {pid}",
            f"link set {host} master {self.bridge} up",
            # Never asked for, so that it is never missed: what is sent there when it has gone just vanishes.
            f"neigh replace {address} lladdr {hardware} dev {self.bridge} nud permanent",
        )
        _ip(
            "link set lo up",
            f"address add {address}/{_PREFIX_LENGTH} dev eth0",
            "link set eth0 up",
            f"route add default via {self.outside}",
            inside=pid,
        )

    def leave(self, number: int) -> None:
        """Cut an address off; nobody who talks to it is told."""
        subprocess.run(["ip", "link", "delete", self._link(number)], capture_output=True)

    def close(self) -> None:
        """Remove it."""
        subprocess.run(["ip", "link", "delete", self.bridge], capture_output=True)

    def _link(self, number: int) -> str:
        return f"{self.bridge}-{number % 2048}"


def _ip(*commands: str, inside: int = 0) -> None:
    enter = ["nsenter", "--target", str(inside), "--net"] if inside else []
    done = subprocess.run(
        [*enter, "ip", "-batch", "-"], input="\n".join(commands), capture_output=True, text=True
    )
    if done.returncode:
        raise OSError(f"ip: {done.stderr.strip()}")


class Image:
    """What all containers find besides this machine's files: a user with a home, and folders of their own."""

    def __init__(self, uid: int, gid: int, user: str = "jovyan") -> None:
        """Make it; ``folder`` holds what belongs to containers, in memory, until it is closed."""
        self.uid, self.gid, self.home = uid, gid, f"/home/{user}"
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-pool-nodes-", dir="/dev/shm"))
        self.folder.chmod(0o755)
        self.layer = self.folder / "image"
        self.layer.mkdir()
        for name in _EMPTIED:
            made = _made(self.layer / name, 0o1777 if name == "tmp" else 0o755)
            os.setxattr(made, "trusted.overlay.opaque", b"y")
        self._open(Path(sys.prefix), Path(sys.base_prefix), _ROOT)
        os.chown(_made(self.layer / self.home.lstrip("/"), 0o755), uid, gid)
        etc = _made(self.layer / "etc", 0o755)
        users = f"root:x:0:0:root:/root:/bin/sh\n{user}:x:{uid}:{gid}::{self.home}:/bin/sh\n"
        (etc / "passwd").write_text(users)
        (etc / "group").write_text(f"root:x:0:\nusers:x:{gid}:\n")

    def _open(self, *paths: Path) -> None:
        """Let every user find what lies in these folders."""
        elsewhere = []
        for path in paths:
            for parent in reversed(path.parents[:-1]):
                mode = parent.stat().st_mode & 0o7777
                _made(self.layer / str(parent).lstrip("/"), mode | 0o055)
            is_hidden = path.parts[1] in _EMPTIED or path.stat().st_dev != Path("/").stat().st_dev
            elsewhere += [str(path)] if is_hidden else []
        #: What lies on other disks than the rest, and is to be mounted.
        self.bound = elsewhere

    def home_of(self, uid: int) -> str:
        """Return the home of a user, as containerd finds it."""
        return {0: "/root", self.uid: self.home}.get(uid, "/")

    def group_of(self, uid: int) -> int:
        """Return the main group of a user."""
        return self.gid if uid == self.uid else 0

    def close(self) -> None:
        """Remove it, and what containers left."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _made(folder: Path, mode: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(mode)
    return folder


class Sandbox:
    """What the containers of a pod share."""

    def __init__(self, process: Process, pid: int, shm: Path, *, shares_processes: bool) -> None:
        """See :meth:`made`."""
        self.pid, self.shm, self.shares_processes = pid, shm, shares_processes
        self._process = process

    @classmethod
    async def made(cls, name: str, folder: Path, *, shares_processes: bool) -> Sandbox:
        """Make one whose containers have this host name."""
        shm = folder / "shm"
        shm.mkdir(parents=True)
        namespaces = ["--mount", "--net", "--ipc", "--uts"]
        namespaces += ["--pid", "--fork"] if shares_processes else []
        process = await asyncio.create_subprocess_exec(
            "unshare", *namespaces, "sh", "-c", _SANDBOX, "pause", name, shm,
            stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        if await process.stdout.readline() != b"ready\n":
            raise OSError((await process.communicate())[1].decode())
        pid = await _child_of(process.pid) if shares_processes else process.pid
        return cls(process, pid, shm, shares_processes=shares_processes)

    def processes(self) -> Iterator[int]:
        """Yield the processes of its containers."""
        return (pid for pid in _sharing("net", self.pid) if pid not in (self.pid, self._process.pid))

    async def end(self) -> None:
        """End it, and whatever of its containers is left."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        await self._process.communicate()


class Running:
    """A container that was started, and what became of it."""

    def __init__(self, process: Process, pid: int, layer: Path, mounts: int | None) -> None:
        """See :func:`start`."""
        self._process, self._pid, self._layer = process, pid, layer
        #: Its mount namespace, where that alone tells its processes from others. It is held: what it is
        #: called would be another's next.
        self._mounts = mounts

    def send(self, signum: int) -> None:
        """Send its first process a signal."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signum)

    async def wait(self) -> int:
        """Return its exit status, 128 and more for a signal; all its processes are gone then."""
        code = await self._process.wait()
        if self._mounts is not None:
            for pid in _with("mnt", f"mnt:[{os.fstat(self._mounts).st_ino}]"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.close(self._mounts)
        return code if code >= 0 else 128 - code

    async def has_begun(self) -> bool:
        """Whether its own command has begun, once that is known."""
        while self._process.returncode is None:
            if (self._layer / "started").exists():
                return True
            await asyncio.sleep(0.005)
        return (self._layer / "started").exists()

    def start_error(self) -> str:
        """Return why nothing was started, if so."""
        file = self._layer / "not-found"
        if not file.exists():
            return ""
        return f'exec: "{file.read_text().strip()}": executable file not found in $PATH: unknown'


async def start(container: Container, sandbox: Sandbox, image: Image, layer: Path, log: Path) -> Running:
    """Start a container; ``layer`` is an empty folder in memory for what it writes."""
    for name in ("upper", "work", "root"):
        _made(layer / name, 0o755)
    enter = ["nsenter", "--target", str(sandbox.pid), "--mount", "--net", "--ipc", "--uts"]
    enter += ["--pid"] if sandbox.shares_processes else []
    enter += ["unshare", "--mount"]
    enter += ["sh", "-c"] if sandbox.shares_processes else ["--pid", "sh", "-c", _FIRST]
    script = _script(container, sandbox, image, layer)
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *enter, script, *(["sh"] if sandbox.shares_processes else []), *container.argv,
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            cwd="/",
        )  # fmt: skip
    pid = await _child_of(process.pid)
    mounts = await _mounts_of(process, pid, layer) if sandbox.shares_processes else None
    return Running(process, pid, layer, mounts)


async def _mounts_of(process: Process, pid: int, layer: Path) -> int | None:
    """Return the mount namespace of a container, opened; None where it is gone already."""
    while process.returncode is None:
        if (layer / "begun").exists():
            with suppress(OSError):
                return os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
            return None
        await asyncio.sleep(0.005)
    return None


def _script(container: Container, sandbox: Sandbox, image: Image, layer: Path) -> str:
    values = {
        "layer": str(layer),
        "image": str(image.layer),
        "bound": " ".join(image.bound),
        "shm": str(sandbox.shm),
        "folder": container.folder,
        "path": container.environment.get("PATH", os.defpath),
        "readonly": "yes" if container.read_only_root else "no",
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    mounts = [
        shlex.join(["mounted", str(each.source), each.target, "ro" if each.read_only else "rw"])
        for each in sorted(container.mounts, key=lambda mount: mount.target)
    ]
    become = shlex.join(
        # Signals that whoever runs the tests ignores, as nohup does, are no container's affair.
        [*_privileges(container), "env", "-i", "--default-signal", "-C", container.folder]
        + [f"{name}={value}" for name, value in container.environment.items()]
    )
    return "\n".join([*lines, _FILES, *mounts, _RUN, f'exec chroot "$root" {become} "$@"'])


def _privileges(container: Container) -> list[str]:
    left = ",".join(["-all", *(f"+{each}" for each in sorted(container.capabilities))])
    groups = ",".join(map(str, container.groups))
    found = ["setpriv", f"--reuid={container.uid}", f"--regid={container.gid}", f"--bounding-set={left}"]
    found += [f"--groups={groups}" if groups else "--clear-groups", "--inh-caps=-all"]
    return [*found, "--no-new-privs"] if container.no_new_privileges else found


async def _child_of(pid: int) -> int:
    """Return the process that a program has started to do its work; the program itself where it is gone."""
    with suppress(OSError):
        while _state(pid) != "Z":
            if found := _children(pid):
                return int(found[0])
            await asyncio.sleep(0.005)
    return pid


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _sharing(kind: str, pid: int) -> Iterator[int]:
    """Yield the processes in the namespace of a process."""
    found = _namespace(kind, pid)
    return _with(kind, found) if found else iter(())


def _with(kind: str, namespace: str) -> Iterator[int]:
    return (
        int(each.name)
        for each in Path("/proc").iterdir()
        if each.name.isdecimal() and _namespace(kind, int(each.name)) == namespace
    )


def _namespace(kind: str, pid: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    return ""
