"""How an IPython kernel is started so that it knows of its slice.

The provisioner finds :func:`wrap_argv` through the entry-point group
``gpu_pool.kernel_launchers``, since a kernelspec must hold no path of this
package: the same kernelspec outlives an upgrade, and a move, of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

#: Run by path, with the kernel's own interpreter.
LAUNCHER: Final = Path(__file__).parent / "inkernel" / "launch.py"

#: What it is told in place of a module: to fork kernels that have imported modules already.
TEMPLATE: Final = "template"
#: And to try if it could.
_TRIAL: Final = "trial"

#: What a kernel loads where this project is installed beside it.
EXTENSION: Final = "gpu_pool_kernels.inkernel"

_PYTHON: Final = re.compile(r"python[0-9.]*t?(\.exe)?|pypy[0-9.]*(\.exe)?")
_MODULES: Final = ("ipykernel_launcher", "ipykernel")
#: Options of the interpreter whose value is the next word.
_WITH_VALUE: Final = ("-W", "-X", "--check-hash-based-pycs")
#: As "python -m ipykernel install" writes it into kernelspecs. Without it the debugger, which every
#: kernel loads when it is asked what it can do, warns of breakpoints that it cannot set.
_DEBUGGABLE: Final = "-Xfrozen_modules=off"
#: By how many bytes another kernel's connection file may have the longer name.
_LONGER_NAMES: Final = 256


def wrap_argv(argv: list[str], *, installed: bool = False) -> list[str]:
    """Return ``argv`` with our launcher in front of ``-m ipykernel_launcher``.

    ``python -X opt -m ipykernel_launcher -f FILE`` becomes
    ``python -X opt LAUNCHER -m ipykernel_launcher -f FILE``. Whatever does not
    start an IPython kernel in that way is returned unchanged.

    With ``installed`` the kernel runs elsewhere, where it may find our
    extension by its name: ``… -m ipykernel_launcher --ext NAME -f FILE``. If it
    does not, IPython says so in its log and goes on. It is started as an
    installation of ipykernel there would start it, unless the command says
    otherwise.
    """
    position = _module_option(argv)
    if position is None or not LAUNCHER.is_file():
        return argv
    if installed:
        options = argv[1:position]
        if not any("frozen_modules" in word for word in options):
            options.insert(0, _DEBUGGABLE)
        return [argv[0], *options, *argv[position : position + 2], "--ext", EXTENSION, *argv[position + 2 :]]
    return [*argv[:position], str(LAUNCHER), *argv[position:]]


def template_argv(
    argv: list[str], modules: Sequence[str], control: int, idle_timeout: float
) -> tuple[list[str], list[str]] | None:
    """Return what all commands of a template's kernels begin with, and the template's own command.

    ``argv`` is a kernel's command as :func:`wrap_argv` returns it; None for any other.
    ``control`` is the number of a descriptor by which the template is asked. After
    ``idle_timeout`` seconds without a question it ends.
    """
    if str(LAUNCHER) not in argv or not LAUNCHER.is_file():
        return None
    position = argv.index(str(LAUNCHER))
    # A kernel writes its own command over the template's, which therefore must not be shorter.
    padding = "-" * (sum(len(word.encode()) + 1 for word in argv[position:]) + _LONGER_NAMES)
    own = [str(LAUNCHER), TEMPLATE, str(control), ",".join(modules), f"{idle_timeout:.0f}", padding]
    return argv[:position], [*argv[:position], *own]


def trial_argv(python: str, modules: Sequence[str], control: int) -> list[str]:
    """Return the command by which a Python imports modules and says if kernels could be forked from it then.

    ``control`` is the number of a descriptor, an ``AF_UNIX`` socket of ``SOCK_SEQPACKET``, to which it writes
    one JSON: ``{"ready": [...]}``, or ``{"failed": why}``.
    """
    return [python, str(LAUNCHER), _TRIAL, str(control), ",".join(modules)]


def _module_option(argv: list[str]) -> int | None:
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
