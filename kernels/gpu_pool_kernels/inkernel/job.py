"""The main process of a kernel's job in a batch system: it says where it listens, and is the supervisor then.

Run as ``python3 launch.py job FOLDER``. In ``FOLDER``, which the server sees as well, ``kernel.json`` says
what is to run; ``address.json`` is written there, with the node, and the ports at which kernel and supervisor
listen: whichever are free, since a node runs many jobs. A server that cannot connect to these is connected to
instead. The connection file, with its keys, is on the node's
own disk, in a folder that is removed at the end. Batch systems also kill all processes of a job: what these
leave is removed by the next one on that node, where its disk has locks.
"""

import contextlib
import fcntl
import importlib
import json
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

#: Seconds until a tunnel is begun: by then the server has connected to this node where it can, and the kernel
#: has started without that process beside it.
_TUNNEL_AFTER = 1.0
#: How the names of folders on the node's own disk begin, and the file in them that its process has locked.
_FOLDER, _LOCK = "gpu-pool-kernel-", "lock"
#: Seconds after which a folder without that file is left over: its process was killed before it made it.
_UNLOCKED_FOR = 24 * 3600.0
_PORTS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port", "supervisor")


def hold_ports() -> "tuple[dict[str, int], list[socket.socket]]":
    """Return ports that nobody has, by what is to listen there, and what keeps them until it is closed.

    Nobody is given one of them meanwhile who asks for any port, or connects from one; who asks for this very
    port, and would use it again (``SO_REUSEADDR``), can listen there, as kernels and their supervisor do.
    """
    sockets = [socket.socket() for _ in _PORTS]
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind(("", 0))
        # In this process alone: a template that has open what it does not know forks no kernel.
        os.register_at_fork(after_in_child=each.close)
    ports = {name: each.getsockname()[1] for name, each in zip(_PORTS, sockets)}  # noqa: B905 - Python 3.8
    return ports, sockets


def own_folder() -> Path:
    """Return a new folder of this process's for temporary files; remove those of killed ones on this node.

    Nodes that share it may not see each other's locks, so that each looks at its own folders alone.
    """
    prefix = f"{_FOLDER}{zlib.crc32(os.uname().nodename.encode()):08x}-"
    _remove_leftovers(Path(tempfile.gettempdir()), prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    # Locked before it has its name: without that nobody takes the folder for left over, for long enough.
    draft = folder / "draft"
    lock = draft.open("wb")
    with contextlib.suppress(OSError):  # without locks nobody can tell that it is left over: it is left alone
        fcntl.flock(lock, fcntl.LOCK_EX)
    draft.rename(folder / _LOCK)
    # Closed in forked processes as ports are, above, which also keeps it open for as long as this one lives.
    os.register_at_fork(after_in_child=lock.close)
    return folder


def _remove_leftovers(base: Path, prefix: str) -> None:
    for folder in base.glob(prefix + "*"):
        with contextlib.suppress(OSError):  # it is gone meanwhile, in use, or without locks
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            try:
                lock = os.open(str(folder / _LOCK), os.O_WRONLY | os.O_NOFOLLOW)
            except FileNotFoundError:
                if found.st_mtime < time.time() - _UNLOCKED_FOR:
                    shutil.rmtree(str(folder), ignore_errors=True)
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(str(folder), ignore_errors=True)
            finally:
                os.close(lock)


def begin_tunnel(told: "dict[str, Any]") -> None:
    """Be the job's end of a reverse tunnel, in a process of its own, for as long as this one lives.

    This one must not have begun another thread.
    """
    parent = os.getpid()
    if os.fork():
        return
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nowhere, standard)
        time.sleep(_TUNNEL_AFTER)
        # Imported here, with asyncio, since most jobs need neither.
        import asyncio

        from .reverse_tunnel import run

        asyncio.run(run(told, parent))
    finally:
        os._exit(0)


def main() -> None:
    """Be the kernel's supervisor."""
    folder, me = Path(sys.argv[2]), os.getpid()
    order = folder / "kernel.json"
    told = json.loads(order.read_text())
    order.unlink()
    own = own_folder()
    try:
        ports, _held = hold_ports()  # for as long as this process lives: kernels are restarted
        connection = own / "connection.json"
        with open(os.open(str(connection), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({**told["connection"], **ports}, file)
        draft = folder / "address.draft"
        # With the node, its server need not wait until Slurm is asked again.
        draft.write_text(json.dumps({**ports, "node": os.environ.get("SLURMD_NODENAME", "")}))
        if told["folder"] and Path(told["folder"]).is_dir():
            os.chdir(told["folder"])
        argv = [word.replace("{connection_file}", str(connection)) for word in told["argv"]]
        options = ["--port", str(ports["supervisor"]), "--alone", str(told["alone"])]
        options += ["--preload", ",".join(told["preload"])]
        sys.argv[1:] = ["supervisor", "--connection", str(connection), *options, "--", *argv]
        if told["tunnel"]:
            begin_tunnel({**told["tunnel"], "ports": ports})
        draft.rename(folder / "address.json")
        importlib.import_module(__package__ + ".supervisor").main(told["environment"])
    finally:
        if os.getpid() == me:  # and not the template, which is forked from it
            shutil.rmtree(str(own), ignore_errors=True)
