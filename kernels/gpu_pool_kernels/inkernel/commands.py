"""The commands and variables of IPython kernels, and of the template that forks them."""

import os
import re
from pathlib import Path
from typing import Sequence  # noqa: UP035 - for Python 3.8

#: Run by path, with the kernel's own interpreter.
LAUNCHER = Path(__file__).parent / "launch.py"
#: What a kernel loads where this project is installed beside it.
EXTENSION = "gpu_pool_kernels.inkernel"
#: The variable in whose place a template's kernels show their own, for who reads ``/proc/PID/environ``.
PLACE = "GPU_POOL_TEMPLATE"

_PYTHON = re.compile(r"python[0-9.]*t?(\.exe)?|pypy[0-9.]*(\.exe)?")
_MODULES = ("ipykernel_launcher", "ipykernel")
#: Options of the interpreter whose value is the next word.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
#: By how many bytes another kernel's connection file may have the longer name.
_LONGER_NAMES = 256


def module_option(argv: "Sequence[str]") -> "int | None":
    """Return where ``-m ipykernel_launcher`` stands, or None if that is not what is run."""
    if not argv or not _PYTHON.fullmatch(Path(argv[0]).name):
        return None
    position = 1
    while position + 1 < len(argv) and argv[position] != "-m":
        word = argv[position]
        if not word.startswith("-") or word in ("-", "-c"):
            return None
        position += 2 if word in _WITH_VALUE else 1
    return position if argv[position + 1 : position + 2] and argv[position + 1] in _MODULES else None


def launched(argv: "list[str]") -> "list[str]":
    """Return a kernel's command with our launcher in front of ``-m ipykernel_launcher``.

    It loads our extension, so the command need not. Any other command is returned unchanged.
    """
    position = module_option(argv)
    if position is None or not LAUNCHER.is_file():
        return argv
    after = position + 2
    if argv[after : after + 2] == ["--ext", EXTENSION]:
        argv = argv[:after] + argv[after + 2 :]
    return [*argv[:position], str(LAUNCHER), *argv[position:]]


def template_argv(
    argv: "list[str]", modules: "Sequence[str]", control: "int | str", idle_timeout: float
) -> "tuple[list[str], list[str]] | None":
    """Return what all commands of a template's kernels begin with, and the template's own command.

    ``argv`` is a kernel's command as :func:`launched` returns it; None for any other.
    ``control`` is the number of a descriptor by which the template is asked; or of a process that
    becomes its only kernel, the path of a socket. After ``idle_timeout`` seconds without a question it ends.
    """
    if str(LAUNCHER) not in argv or not LAUNCHER.is_file():
        return None
    position = argv.index(str(LAUNCHER))
    # A kernel writes its own command over the template's, which therefore must not be shorter.
    padding = "-" * (sum(len(word.encode()) + 1 for word in argv[position:]) + _LONGER_NAMES)
    program = "prepared" if isinstance(control, str) else "template"
    own = [str(LAUNCHER), program, str(control), ",".join(modules), f"{idle_timeout:.0f}", padding]
    return argv[:position], [*argv[:position], *own]


def starts_alike(argv: "Sequence[str]", other: "Sequence[str]") -> bool:
    """Whether kernels of both commands can be forked from one template, as :func:`launched` returns them."""
    if str(LAUNCHER) not in argv:
        return False
    stem = list(argv[: argv.index(str(LAUNCHER)) + 1])
    return list(other[: len(stem)]) == stem


def given_variables() -> "dict[str, str]":
    """Return the variables that this process was started with, whatever has become of them.

    Python itself adds one where no language is set, and every Python that it starts would do so by itself
    (``LC_CTYPE``, PEP 538).
    """
    lines = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    return {name: value for name, equals, value in (line.partition("=") for line in lines) if equals}
