"""The one file that root installs: its bytes, what it imports and when, and where it looks for that."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_pool_provisioner.hibernation import program
from gpu_pool_provisioner.hibernation.program import archive
from support.hibernating import COUNTS, PYTHON, Installation, User, said, why_no_users

_WHY = why_no_users()
#: The oldest Python that the administrator's page promises.
OLDEST = (3, 9)
SOURCES = sorted(Path(program.FOLDER, "gpu_pool_hibernation").glob("*.py"))
WRITES = [sys.executable, "-m", archive.__name__]
#: Notes what is imported, and which code is opened, once the program has forked or called the C library.
NOTES = """
import os
begun, noting = [], []
def note(event, arguments):
    if event in ("os.fork", "ctypes.dlopen"):
        begun.append(event)
    if not begun or noting or event not in ("import", "open"):
        return
    what = str(arguments[0])
    if event == "open" and not what.endswith((".py", ".pyc", ".so", "archive")):
        return
    noting.append(event)
    seen = os.open({seen!r}, os.O_WRONLY | os.O_APPEND)
    os.write(seen, f"{{event}} {{what}}\\n".encode())
    os.close(seen)
    noting.clear()
sys.addaudithook(note)
"""


def test_it_is_the_same_bytes_whoever_writes_it_and_wherever(tmp_path: Path) -> None:
    there = tmp_path / "gpu_pool_provisioner" / "hibernation"
    shutil.copytree(program.FOLDER, there / "program", ignore=shutil.ignore_patterns("__pycache__"))
    for each in (there, there.parent):
        (each / "__init__.py").touch()
    for n, each in enumerate(sorted(there.rglob("*.py"))):
        each.chmod(0o600 if n % 2 else 0o755)
        os.utime(each, (1e9 + n, 1e9 + n))
    written = tmp_path / "written"
    done = subprocess.run(
        [*WRITES, str(written)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"},
        umask=0o077,
        capture_output=True,
        text=True,
        check=True,
    )
    assert written.read_bytes() == archive.archive()
    assert done.stdout == f"{hashlib.sha256(archive.archive()).hexdigest()}  {written}\n"
    assert written.stat().st_mode & 0o777 == 0o755
    assert written.read_bytes().startswith(b"#!/usr/bin/python3 -IS\n")
    with zipfile.ZipFile(written) as file:
        names = [f"gpu_pool_hibernation/{each.name}" for each in SOURCES]
        assert file.namelist() == ["__main__.py", *names]


@pytest.mark.parametrize(
    ("given", "why"), [((), "Name one file"), (("-h",), "Name one file"), (("missing/x",), "No such file")]
)
def test_where_it_cannot_be_written_it_is_said(tmp_path: Path, given: tuple[str, ...], why: str) -> None:
    done = subprocess.run([*WRITES, *given], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode != 0
    assert why in done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_it_is_written_for_the_oldest_python_and_needs_the_standard_library_alone(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=OLDEST)
    imports = [each for each in ast.walk(tree) if isinstance(each, (ast.Import, ast.ImportFrom))]
    # What is imported in a function is imported later, in mounts that may be the user's.
    assert [each for each in imports if each not in tree.body] == []
    named = {each.module for each in imports if isinstance(each, ast.ImportFrom) and not each.level}
    named |= {each.name for node in imports if isinstance(node, ast.Import) for each in node.names}
    assert {str(each).partition(".")[0] for each in named} <= sys.stdlib_module_names


@pytest.mark.skipif(os.geteuid() != 0, reason="to others it does nothing.")
def test_nothing_of_it_is_looked_for_in_folders_or_variables_of_its_callers(tmp_path: Path) -> None:
    installed, theirs = tmp_path / "gpu-pool-hibernation", tmp_path / "theirs"
    installed.write_bytes(archive.archive())
    installed.chmod(0o755)
    (theirs / "gpu_pool_hibernation").mkdir(parents=True)
    for name in ("gpu_pool_hibernation/__init__", "json", "syslog", "sitecustomize", "usercustomize"):
        (theirs / f"{name}.py").write_text("open('called', 'w')\n")
    variables = {"PYTHONPATH": str(theirs), "PYTHONHOME": str(theirs), "PYTHONUSERBASE": str(theirs)}
    done = subprocess.run(
        [installed, "list"],
        input=b"{}\n",
        capture_output=True,
        cwd=theirs,
        env={"PATH": os.environ["PATH"], **variables},
        check=False,
    )
    assert done.stdout.startswith(b'{"ok": true'), done.stderr
    assert not (theirs / "called").exists()


@pytest.fixture
def seen(installation: Installation) -> Iterator[Path]:
    """Return the file in which the program notes what it imports too late."""
    file = installation.folder / "seen"
    file.touch()
    file.chmod(0o666)
    installation.install(NOTES.format(seen=str(file)))
    yield file
    installation.install()


@pytest.mark.hibernation
@pytest.mark.skipif(bool(_WHY), reason=f"no user can: {_WHY}")
def test_nothing_is_imported_in_namespaces_or_with_the_users_rights(ada: User, seen: Path) -> None:
    """Neither of its own nor of the standard library, whose modules import others when they are used."""
    assert ada.call("check")["why"] == ""
    kernel = ada.launch([PYTHON, "-c", COUNTS])
    said(ada)
    assert not ada.launch(["/nowhere/python"]).answer["ok"]
    assert ada.call("dump", kernel.id, note={"of": "ä"})["ok"]
    again = ada.restore(kernel.id)
    assert again.answer["ok"]
    assert ada.call("note", kernel.id, note={})["ok"]
    assert ada.call("list")["kernels"]
    assert ada.call("remove", kernel.id)["ok"]
    again.close()
    assert seen.read_text() == ""
