"""Every command on every page does what the page says, with the output that the page shows."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gpu_pool.cli.app import cli, subcommands
from support.shell_blocks import ROOT, Shell, blocks, missing, pages


def _until(line: str) -> str:
    """Return the command that waits until ``gpu-pool status`` has a line of this kind."""
    return f"for n in $(seq 100); do gpu-pool status | grep -q '{line}' && break; done"


_END_ALL = "kill $(jobs -p) 2> /dev/null; gpu-pool release --all-mine"
#: The whole GPU is taken, by $lease.
_TAKE_ALL = f"""
    {_END_ALL}
    taken=$(gpu-pool request 1 --keeper $$)
    lease=$(grep -o '[0-9]*-[0-9a-f]\\{{8\\}}' <<< "$taken")
"""
_R = '{"argv": ["R", "{connection_file}"], "display_name": "R", "language": "R"}'
#: What has happened before some blocks, as commands of a shell.
SITUATIONS = {
    "a free GPU": _END_ALL,
    "one lease": f"{_END_ALL}; gpu-pool request 2% > /dev/null",
    "a waiting lease": f"""
        {_TAKE_ALL}
        gpu-pool run 2% -- true 2> /dev/null &
        {_until("1st in the queue")}
    """,
    # The GPU is taken and two wait for it, until a third one does.
    "a queue": f"""
        {_TAKE_ALL}
        for n in 1 2; do gpu-pool run 1 -- true 2> /dev/null & done
        {_until("2nd in the queue")}
        ({_until("3rd in the queue")}; gpu-pool release "$lease") > /dev/null &
    """,
    "a short longest lease": """
        echo 'c.PoolSettings.default_course = {"longest_lease": "3s"}' >> .jupyter/gpu_pool_config.py
        echo 'import time; time.sleep(60)' > train.py
    """,
    "no longest lease": "sed -i '/longest_lease/d' .jupyter/gpu_pool_config.py; echo > train.py",
    "a kernel for R": f"""
        mkdir -p .local/share/jupyter/kernels/ir
        echo '{_R}' > .local/share/jupyter/kernels/ir/kernel.json
    """,
    "a course file": "gpu-pool courses new cs101 > cs101.yaml",
    "mistakes": "sed -i 's/2%/2GB/; s/^longest_lease/wieght/' cs101.yaml",
}
TYPED = [page for page in pages() if any(block.is_typed for block in blocks(page))]


def test_every_block_of_commands_is_run_or_says_why_not() -> None:
    found = [block for page in pages() for block in blocks(page)]
    assert len(found) > 100
    assert [f"{block}: {block.wrong()}" for block in found if block.wrong()] == []
    named = {name for block in found for name in block.named("with")}
    assert named == SITUATIONS.keys()


@pytest.fixture(scope="module")
def installed() -> Iterator[Path]:
    """Return a Python environment with our program, into which pages may install kernels."""
    with tempfile.TemporaryDirectory(prefix="gpu-pool-docs-") as name:
        folder, ours = Path(name), Path(sys.prefix)
        for each in ("bin", "lib", "share/jupyter/kernels"):
            shutil.copytree(ours / each, folder / each, symlinks=True)
        shutil.copy(ours / "pyvenv.cfg", folder)
        for script in filter(lambda each: not each.is_symlink(), (folder / "bin").iterdir()):
            script.write_bytes(script.read_bytes().replace(os.fsencode(ours), os.fsencode(folder)))
        yield folder


@pytest.fixture
def shell(installed: Path) -> Iterator[Shell]:
    """Return a shell of somebody who has the files that the pages are about, and a simulated GPU."""
    for kernel in (installed / "share/jupyter/kernels").glob("*-gpu-*"):
        shutil.rmtree(kernel)
    # A socket's path may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="gpu-pool-docs-") as name:
        folder = Path(name)
        _provide(folder)
        shell = Shell(folder, _environment(folder, installed))
        yield shell
        shell.close()


def _provide(folder: Path) -> None:
    for name in ("charts", "examples"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "examples/courses", folder / "courses")
    shutil.copytree(ROOT / "examples/courses", folder / "etc/gpu-pool/courses")
    (folder / "run/gpu-pool").mkdir(parents=True, mode=0o700)
    (folder / "train.py").write_text("")
    (folder / ".jupyter").mkdir()
    # Nothing of the whole machine is used.
    socket = folder / "run/gpu-pool/gpu-pool.sock"
    (folder / ".jupyter/gpu_pool_config.py").write_text(f"c.ServeApp.socket = {str(socket)!r}\n")


def _environment(folder: Path, installed: Path) -> dict[str, str]:
    return {
        "PATH": os.pathsep.join([str(installed / "bin"), os.environ["PATH"]]),
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(folder / "run"),
        "GPU_POOL_DEVICES": "V100-SXM2-32GB:1",
        "LC_ALL": "C.UTF-8",
    }


@pytest.mark.long
@pytest.mark.xdist_group("commands")  # one process, and so one environment
@pytest.mark.parametrize("page", TYPED)
def test_commands_print_what_the_page_shows(page: str, shell: Shell) -> None:
    left_out = []
    for block in filter(lambda each: each.is_typed, blocks(page)):
        for name in block.named("with"):
            shell.type(SITUATIONS[name])
        if missing(block):
            left_out.append(f"{block} needs {', '.join(missing(block))}")
        else:
            shell.follow(block)
    if left_out:
        pytest.skip(f"all but these passed: {'; '.join(left_out)}")


def _named_in_sentences(page: str) -> list[str]:
    """Return the commands of ours that stand in a page's sentences."""
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`gpu-pool ([^`…|]+?)(?: …)?`", text.replace("\n", " "))


def test_commands_in_sentences_exist() -> None:
    """Each verb and each option that is named; what they are given may be a placeholder."""
    found = [(page, words) for page in pages() for words in _named_in_sentences(page)]
    assert len(found) > 100
    assert [f"{page}: gpu-pool {words}: {_wrong(words)}" for page, words in found if _wrong(words)] == []


def _wrong(words: str) -> str:
    """Return which word of a command is unknown; nothing if all are known."""
    command: click.Command = cli
    words = re.sub(r"--pool [^ ]+", "", words)
    for word in itertools.takewhile(lambda word: word != "--", shlex.split(words)):
        if isinstance(command, click.Group) and word in subcommands(command):
            command = subcommands(command)[word]
        elif word.partition("=")[0] not in _options(command) and (command is cli or word.startswith("--")):
            return word
    return ""


def _options(command: click.Command) -> set[str]:
    known = {name for each in (cli, command) for option in each.params for name in option.opts}
    return known | {"--help", "--json", "--version"}
