"""A kernel's image on disk: what it says of itself, whether it is whole, and whether it can go on here."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import psutil

from gpu_pool_client import Lease, _procfs
from gpu_pool_provisioner.launchers.base import CannotWakeError, ImageGoneError

#: The folder of a whole image, in that of its kernel.
IMAGE: Final = "image"
_HEADER: Final = "header.json"
_VERSION: Final = 1
_BLOCK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Header:
    """What an image says of the kernel in it."""

    #: Its lease, by its id; whose it is, and what that user calls it.
    lease: str
    user: str
    kernel: str
    #: When it was stopped, in Unix seconds.
    since: float
    #: The pipe to which it wrote its output, by the system's number.
    output_pipe: int
    #: The start of this machine's system, as it was; and what its processor can do, by a digest.
    boot_id: str
    cpu: str
    #: Files that its processes have mapped (programs, libraries): bytes and time of the last change.
    mapped: dict[str, tuple[int, int]]
    #: Files that they have open, which must have as many bytes.
    opened: dict[str, int]
    #: The addresses of this machine at which they listen, each with its port.
    listens: list[tuple[str, int]]
    #: Bytes and digest of the image's own files.
    files: dict[str, tuple[int, str]]

    @property
    def size(self) -> int:
        """Bytes of the image's own files."""
        return sum(size for size, _ in self.files.values())


def found(parent: str) -> list[tuple[Path, Header]]:
    """Return the whole images in the folder where kernels sleep, oldest first; none where that is not there.

    Blocks. What cannot be read is left out. Raises ``OSError`` where the folder itself cannot be.
    """
    headers: list[tuple[Path, Header]] = []
    for folder in Path(parent).iterdir() if Path(parent).exists() else ():
        with suppress(CannotWakeError, OSError, ValueError, KeyError, TypeError):
            headers.append((folder / IMAGE, _read(folder / IMAGE)))
    return sorted(headers, key=lambda each: each[1].since)


def pids_with(pid: int) -> list[int]:
    """Return the processes in the pid namespace of one; none where it has ended."""
    mine = _namespace(pid)
    return [each for each in _procfs.pids() if mine is not None and _namespace(each) == mine]


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def needs_bytes(pid: int) -> int:
    """Return how many bytes of memory the processes of a kernel have, which its image takes at most."""
    pages = 0
    for each in pids_with(pid):
        with suppress(OSError, ValueError, IndexError):
            pages += int(Path(f"/proc/{each}/statm").read_bytes().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def finish(folder: Path, pid: int, output_pipe: int, lease: Lease, since: float) -> Header:
    """Make the image in ``folder`` of a stopped kernel whole: on the disk, with what it says of itself.

    Blocks. Returns that. Raises ``OSError``.
    """
    pids = pids_with(pid)
    mapped, opened = _files_of(pids)
    files = {each.name: _digest(each, sync=True) for each in _parts(folder)}
    header = Header(
        lease=lease.id,
        user=lease.holder.user,
        kernel=lease.holder.kernel or "",
        since=since,
        output_pipe=output_pipe,
        boot_id=_boot_id(),
        cpu=_cpu(),
        mapped=mapped,
        opened=opened,
        listens=_listens(pids),
        files=files,
    )
    with (folder / _HEADER).open("w") as file:
        json.dump({"version": _VERSION, **asdict(header)}, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
    return header


def checked(folder: Path) -> Header:
    """Return what an image says, once it is seen that it is whole and can go on here.

    Blocks. Raises ``CannotWakeError``.
    """
    if not folder.exists():
        raise ImageGoneError("its image was removed.")
    try:
        header = _read(folder)
        found = {each.name: _digest(each) for each in _parts(folder)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotWakeError(f"what is on disk cannot be read ({error}).") from error
    if found != {name: tuple(was) for name, was in header.files.items()}:
        raise CannotWakeError("what is on disk is damaged: it is not what was written.")
    if header.cpu != _cpu():
        raise CannotWakeError("this machine has another processor than the one on which it fell asleep.")
    changed = [path for path, was in header.mapped.items() if _identity(path) != tuple(was)]
    changed += [path for path, size in header.opened.items() if (_identity(path) or (-1,))[0] != size]
    if changed:
        raise CannotWakeError(f"{_named(changed)} changed, or went, while it slept.")
    return header


def _read(folder: Path) -> Header:
    """Return what an image says. Raises ``CannotWakeError``, ``OSError`` and what JSON raises."""
    read = json.loads((folder / _HEADER).read_text())
    if read.pop("version") != _VERSION:
        raise CannotWakeError("another version of this program has written it.")
    return Header(**read)


def _named(paths: Iterable[str]) -> str:
    first, *others = sorted(set(paths))
    return (
        f"the file {first}" if not others else f"{len(others) + 1} files that it uses (such as {first}) have"
    )


def sync_folder(folder: Path) -> None:
    """Return once the names in a folder are on the disk. Raises ``OSError``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(folder: str) -> int:
    """Return how many bytes can be written beside a folder. Raises ``OSError``."""
    return shutil.disk_usage(folder).free


def taken_bytes(folder: str) -> int:
    """Return how many bytes a folder takes with all that is in it; what goes meanwhile may count or not."""
    taken = 0
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as found:
        for each in found:
            with suppress(FileNotFoundError):
                is_folder = each.is_dir(follow_symlinks=False)
                taken += taken_bytes(each.path) if is_folder else each.stat(follow_symlinks=False).st_size
    return taken


def _parts(folder: Path) -> list[Path]:
    """Return the image's files, without what CRIU says besides and writes again."""
    return sorted(each for each in folder.iterdir() if each.suffix == ".img")


def _digest(path: Path, *, sync: bool = False) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _files_of(pids: Iterable[int]) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Return the files that processes have mapped, and the regular ones that they have open."""
    mapped: dict[str, tuple[int, int]] = {}
    opened: dict[str, int] = {}
    for pid in pids:
        # As bytes, and split at line ends alone: a name may hold any other character.
        for line in Path(f"/proc/{pid}/maps").read_bytes().split(b"\n"):
            path = os.fsdecode(line.split(b" ", 5)[-1].strip(b" "))
            if path.startswith("/") and (found := _identity(path)) is not None:
                mapped[path] = found
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            path = os.readlink(descriptor)
            if path.startswith("/") and Path(path).is_file():
                opened[path] = Path(path).stat().st_size
    return mapped, opened


def _listens(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Return where processes listen for connections over the network, of this machine or from others."""
    found: set[tuple[str, int]] = set()
    for pid in pids:
        with suppress(psutil.Error):  # it has ended
            process = psutil.Process(pid)
            # Before psutil 6 it has another name.
            connections = getattr(process, "net_connections", None) or process.connections
            for each in connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.add((each.laddr.ip, each.laddr.port))
    return sorted(found)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _cpu() -> str:
    """Return a digest of what the processor can do."""
    lines = Path("/proc/cpuinfo").read_bytes().split(b"\n")
    features = next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
    return hashlib.sha256(platform.machine().encode() + b" ".join(sorted(features.split()))).hexdigest()
