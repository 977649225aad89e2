"""Kernels of a server that an ordinary user runs: they sleep on disk by sudo, a real CRIU, and wake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.hibernating import (
    PYTHON,
    Installation,
    User,
    installed,
    python_for_users,
    users,
    why_no_users,
)

_WHY = why_no_users() or python_for_users()
pytestmark = [
    pytest.mark.hibernation,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(_WHY), reason=f"no user can: {_WHY}"),
]
ROOT = Path(__file__).parents[2]
#: Where the system's Python finds what this environment has, and this project.
PACKAGES = [path for path in sys.path if path.endswith("-packages")]
PROJECT = [str(ROOT / each) for each in ("kernels", "pool", "pool_client", "provisioner", "spawner")]
#: A server's part: runs cells in the kernel of a notebook, and lets it sleep between them.
SERVER = """
import asyncio, json, os, sys
from jupyter_client.manager import AsyncKernelManager
from gpu_pool_provisioner.session import State

async def main(cells):
    km = AsyncKernelManager(kernel_name="sleeper")
    await km.start_kernel(env={**os.environ, "JPY_SESSION_NAME": os.path.expanduser("~/week1.ipynb")})
    client = km.client()
    client.start_channels()
    await client.wait_for_ready(timeout=120)
    said = []
    def keep(message):
        if message["msg_type"] in ("stream", "error"):
            said[-1] += message["content"].get("text") or message["content"].get("evalue", "")
    for cell in cells:
        said.append("")
        await client.execute_interactive(cell, output_hook=keep, timeout=120)
        while cell is not cells[-1] and km.provisioner.session.state is not State.HIBERNATED:
            await asyncio.sleep(0.02)
    why = await km.provisioner.leave_image()
    await km.shutdown_kernel()
    print(json.dumps({"said": said, "why": why}))

asyncio.run(main(json.loads(sys.argv[1])))
"""
#: The same once a kernel was prepared, which the notebook's is to be.
PREPARING = SERVER.replace(
    "async def main(cells):\n",
    """from gpu_pool_provisioner import templates as module

async def main(cells):
    module.STARTS_AFTER = module.PAUSES_WITHIN = 0.0; module._ANSWERS_WITHIN = 20.0
    first = AsyncKernelManager(kernel_name="sleeper")
    await first.start_kernel()
    while not module.templates().all(): await asyncio.sleep(0.01)
    (prepared,) = module.templates().all()
    assert await asyncio.to_thread(prepared.wait_until_ready, 60)
    await first.shutdown_kernel(now=True)
""",
)


@pytest.fixture(scope="module")
def installation() -> Iterator[Installation]:
    with installed() as found:
        yield found


@pytest.fixture
def ada(installation: Installation) -> Iterator[User]:
    with users(installation, "ada") as (made,):
        yield made
        made.end()


def environment(user: User) -> dict[str, str]:
    home = user.home
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "USER": user.name,
        "PYTHONPATH": os.pathsep.join((*PROJECT, *PACKAGES)),
        "JUPYTER_PATH": f"{home}/jupyter",
        "GPU_POOL_URL": f"embedded:{home}/pool/store.db",
        "GPU_POOL_DEVICES": "A100-SXM4-80GB:1",
    }


def install(user: User, installation: Installation, **more: Any) -> None:
    """Write a kernelspec of the user's, with more settings, and a notebook."""
    config = {
        "slice": "50%",
        "unattended": False,
        "hibernate_after": 0.5,
        "hibernate_with_server": True,
        "hibernation_program": str(installation.program),
        **more,
    }
    spec = {
        "argv": [PYTHON, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Sleeper",
        "language": "python",
        "metadata": {"kernel_provisioner": {"provisioner_name": "gpu-pool", "config": config}},
    }
    folder = user.home / "jupyter" / "kernels" / "sleeper"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))
    (user.home / "week1.ipynb").write_text("{}")
    os.chown(user.home / "week1.ipynb", user.entry.pw_uid, user.entry.pw_gid)


def served(user: User, *cells: str, hidden: bool = False, server: str = SERVER) -> list[str]:
    """Run cells in the kernel of a server of the user's, which sleeps after each, and end that server.

    With ``hidden`` it sees no other user's processes in ``/proc``.
    """
    environ = environment(user)
    ready = subprocess.run(
        [PYTHON, "-c", "import gpu_pool_provisioner.provisioner, ipykernel"],
        cwd=user.home,
        env=environ,
        capture_output=True,
        check=False,
        **user.identity,
    )
    if ready.returncode:
        pytest.skip(f"other users cannot read this environment: {ready.stderr.decode()[-300:]}")
    command, identity = [PYTHON, "-c", server, json.dumps(cells)], user.identity
    if hidden:
        become = f"setpriv --reuid {user.name} --regid {user.entry.pw_gid} --init-groups"
        mount = f'mount -t proc -o hidepid=2 proc /proc && exec {become} "$@"'
        command, identity = ["unshare", "--mount", "sh", "-c", mount, "sh", *command], {}
    done = subprocess.run(
        command,
        cwd=user.home,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        **identity,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["why"] == "", done.stderr[-3000:]
    said: list[str] = told["said"]
    return said


def test_a_users_kernel_sleeps_wakes_and_goes_on_with_the_next_server(
    ada: User, installation: Installation
) -> None:
    install(ada, installation)
    first, second = served(
        ada,
        "import os, subprocess, threading, time\n"
        "kept, file = list(range(1000)), open('notes', 'w+')\n"
        "child = subprocess.Popen(['sleep', '600']); _ = file.write('one')",
        "print(sum(kept), child.poll(), file.tell(), os.getuid(), os.readlink('/proc/self'), os.getpid())",
    )
    assert first == ""
    assert second.splitlines()[0] == f"499500 None 3 {ada.entry.pw_uid} 3 3"
    (image,) = installation.asleep.glob("*/image")
    assert image.stat().st_uid == 0
    (again,) = served(ada, "print(sum(kept), child.poll())")
    assert "499500 None" in again
    assert "This is your kernel from " in again


def test_a_users_kernel_sleeps_and_wakes_where_proc_hides_others_processes(
    ada: User, installation: Installation
) -> None:
    install(ada, installation)
    assert served(ada, "kept = 1", "print(kept)", hidden=True) == ["", "1\n"]


def test_a_users_kernel_was_prepared_and_sleeps_wakes_and_goes_on_with_the_next_server(
    ada: User, installation: Installation
) -> None:
    install(ada, installation, preload=["colorsys"])
    first, second = served(
        ada,
        "import os, sys; kept = 'colorsys' in sys.modules\n"
        "print(kept, os.getuid(), os.getpid(), os.getgroups())",
        "print(kept, os.getuid())",
        server=PREPARING,
    )
    groups = os.getgrouplist(ada.name, ada.entry.pw_gid)
    assert first == f"True {ada.entry.pw_uid} 3 {groups}\n"
    assert second == f"True {ada.entry.pw_uid}\n"
    assert len(ada.call("list")["kernels"]) == 1
    (again,) = served(ada, "print(kept)")
    assert "True" in again


def test_a_user_sees_and_removes_their_own(ada: User, installation: Installation) -> None:
    """The machine's usual paths are taken by nobody: the list is asked for by the program of the settings."""
    install(ada, installation)
    served(ada, "kept = 1")
    (found,) = ada.call("list")["kernels"]
    assert (found["note"]["user"], found["note"]["record"]["owner"]["uid"]) == (ada.name, ada.entry.pw_uid)
    # Where it listens nobody else can make anything meanwhile.
    folder = Path(found["note"]["record"]["sockets"]).parents[1]
    assert folder.is_relative_to(ada.home)
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (ada.entry.pw_uid, 0o700)
    assert ada.call("remove", found["id"])["ok"]
    (said,) = served(ada, "print('kept' in globals())")
    assert "is gone: it is no longer on disk: it was removed" in said
    assert said.endswith("False\n")
