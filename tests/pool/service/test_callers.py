"""Who is at the other end of a connection, though they would be somebody else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_pool.audit.callers import Caller, Peer
from gpu_pool.service.callers import AccountNames, PeerIdentity, peer_of, verify_process
from gpu_pool_client import NotAllowed, Process
from support.pools import identity, running
from support.users import NOBODY

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")

CONNECT = """
import os, socket, sys
os.seteuid({uid})
connection = socket.socket(socket.AF_UNIX)
connection.connect({path!r})
sys.stdin.read()
"""


@only_root
@pytest.mark.parametrize("uid", [0, NOBODY])
def test_a_process_that_connects_in_anothers_name_is_nobody(folder: Path, uid: int) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o666)
        folder.chmod(0o755)
        listener.listen()
        with running(CONNECT.format(uid=uid, path=str(folder / "socket"))) as process:
            with listener.accept()[0] as accepted:
                peer = peer_of(accepted)
            assert peer == Peer(uid, identity(process) if uid == 0 else None, contained=uid != 0)


#: In a pid namespace of its own, where no others take pids: who connects ends, and another has its pid.
USED_AGAIN = """
import os, socket, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from gpu_pool.service.callers import peer_of

with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as connection:
    listener.bind(sys.argv[1])
    listener.listen()
    pid = os.fork()
    if pid == 0:
        connection.connect(sys.argv[1])
        os._exit(0)
    os.waitpid(pid, 0)
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    with subprocess.Popen(["sleep", "600"]) as victim:
        print(victim.pid == pid, peer_of(listener.accept()[0]).process)
        victim.kill()
"""


@only_root
def test_who_has_got_the_pid_of_one_that_connected_is_not_taken_for_it(folder: Path) -> None:
    alone = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", USED_AGAIN]
    done = subprocess.run([*alone, str(folder / "socket")], capture_output=True, text=True, check=False)
    if "ns_last_pid" in done.stderr:
        pytest.skip("no pid can be chosen here")
    assert (done.stdout, done.stderr) == ("True None\n", "")


@only_root
def test_a_caller_whose_process_is_anothers_attaches_nothing() -> None:
    with running() as process:
        found = identity(process)
        caller = Caller("nobody", False, str(NOBODY), found, Peer(NOBODY, found, contained=False))
        with pytest.raises(NotAllowed, match="is not yours"):
            verify_process(caller, found)


def test_ones_own_process_may_be_attached() -> None:
    me = Process.current()
    assert verify_process(Caller("me", False, "me", me, Peer(os.getuid(), me, contained=False)), me) == me


def test_a_user_whom_the_directory_did_not_know_for_a_moment_is_themselves_again() -> None:
    directory: dict[int, str] = {}
    identity = PeerIdentity(0, [], accounts=AccountNames(account=directory.get))
    peer = Peer(4711, Process.current(), contained=False)
    assert identity.caller(peer).user == "uid-4711"
    directory[4711] = "ada"
    assert identity.caller(peer).user == "ada"


def test_who_gets_anothers_uid_does_not_keep_their_name() -> None:
    now, directory = 100.0, {4711: "ada"}
    identity = PeerIdentity(0, [], accounts=AccountNames(lambda: now, directory.get))
    peer = Peer(4711, Process.current(), contained=False)
    assert identity.caller(peer).user == "ada"
    directory[4711] = "grace"
    now += 59
    assert identity.caller(peer).user == "ada"
    now += 2
    assert identity.caller(peer).user == "grace"
