"""A user whom no passwd file knows and who has no HOME, as containers have: no error is unexpected.

A user namespace stands in for such a container.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

UID = 1_000_930_000
AS = ("unshare", "--user", f"--map-user={UID}", "--map-group=0")


def _may_be_others() -> bool:
    try:
        return subprocess.run([*AS, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not _may_be_others(), reason="no user namespaces here")
NO_HOME = f"HOME is not set, and this machine knows no user with the id {UID}."


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {"PATH": os.environ["PATH"], "GPU_POOL_DEVICES": "V100-SXM2-32GB:1", **environment}
    return subprocess.run(
        [*AS, *command], env=given, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )


def gpu_pool(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "gpu_pool.cli", *words, **environment)


@pytest.mark.parametrize(
    ("words", "variables", "status", "said"),
    [
        (["status"], {}, 7, f"There is no folder for the pool's store: XDG_STATE_HOME is not set, {NO_HOME}"),
        (["kernels", "list"], {}, 2, f"Jupyter has no folder for this user: {NO_HOME}"),
        (["status"], {"GPU_POOL_URL": "unix:~/x"}, 2, f"'~/x' cannot be found: {NO_HOME}"),
        (["status"], {"GPU_POOL_URL": "embedded:~/x"}, 2, f"'~/x' cannot be found: {NO_HOME}"),
        (["serve", "--socket", "~/x"], {}, 2, f"'~/x' cannot be found: {NO_HOME}"),
        (["status"], {"GPU_POOL_URL": "unix:~nobody8/x"}, 2, "this machine knows no user 'nobody8'."),
    ],
)
def test_what_is_missing_is_said(
    tmp_path: Path, words: list[str], variables: dict[str, str], status: int, said: str
) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)} if words != ["status"] else {}
    done = gpu_pool(*words, **state, **variables)
    assert said in done.stderr
    assert done.returncode == status


def test_to_list_kernels_on_disk_needs_no_home() -> None:
    done = gpu_pool("hibernated")
    assert done.stdout == "No kernel sleeps on this machine's disk for you.\n", done.stderr
    assert done.returncode == 0


def test_a_slice_needs_no_home(tmp_path: Path) -> None:
    done = gpu_pool("run", "2%", "--", "id", "-u", XDG_STATE_HOME=str(tmp_path))
    assert done.stdout == f"{UID}\n"


def test_the_doctor_looks_at_everything_else() -> None:
    done = gpu_pool("doctor")
    assert done.returncode == 1
    assert f"broken kernels: Jupyter has no folder for this user: {NO_HOME}" in done.stdout.replace("\n", " ")
    assert "ok     gpus:" in done.stdout


KERNEL = """
import sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name=sys.argv[1])
def show(message):
    if message["msg_type"] == "stream":
        print(message["content"]["text"], end="")
client.execute_interactive("import os; print('ran on', os.environ['GPU_POOL_SLICE'])", output_hook=show)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("wrap", [False, True], ids=["provisioned", "wrapped"])
def test_a_kernel_starts_where_its_base_does(tmp_path: Path, wrap: bool) -> None:
    folders = {
        name: str(tmp_path / name)
        for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")
    }
    how = ["--wrap"] if wrap else []
    done = gpu_pool("kernels", "install", "2%", *how, "--user", **folders)
    assert done.returncode == 0, done.stderr
    state = str(tmp_path / "state")
    done = run(sys.executable, "-c", KERNEL, "python3-gpu-2pct", **folders, XDG_STATE_HOME=state)
    assert done.stdout == "ran on 2%\n", done.stderr
