"""How an IPython kernel is started so that it knows of its slice.

The provisioner finds :func:`wrap_argv` through the entry-point group
``gpu_pool.kernel_launchers``, since a kernelspec must hold no path of this
package: the same kernelspec outlives an upgrade, and a move, of it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpu_pool_kernels.inkernel.commands import EXTENSION, LAUNCHER, launched, module_option, template_argv

__all__ = ["LAUNCHER", "TEMPLATE", "supervisor_files", "template_argv", "trial_argv", "wrap_argv"]

#: What the launcher is told in place of a module: to fork kernels that have imported modules already.
TEMPLATE: Final = "template"
#: And to try if it could.
_TRIAL: Final = "trial"
#: As "python -m ipykernel install" writes it into kernelspecs. Without it the debugger, which every
#: kernel loads when it is asked what it can do, warns of breakpoints that it cannot set.
_DEBUGGABLE: Final = "-Xfrozen_modules=off"


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
    if not installed:
        return launched(argv)
    position = module_option(argv)
    if position is None:
        return argv
    options = argv[1:position]
    if not any("frozen_modules" in word for word in options):
        options.insert(0, _DEBUGGABLE)
    return [argv[0], *options, *argv[position : position + 2], "--ext", EXTENSION, *argv[position + 2 :]]


def supervisor_files() -> Mapping[str, str | bytes]:
    """Return what must lie in one folder of a pod, by its path there, to supervise the pod's kernel.

    ``python3 -I -S launch.py supervisor --connection FILE -- python3 -m ipykernel_launcher ...``, with
    ``launch.py`` of that folder, is then the pod's main process; see ``inkernel/supervisor.py``.

    Bytes are what this Python has compiled, below ``__pycache__``: one of the same version need not do it
    again at every start, where nothing can be kept. All others read the texts.
    """
    paths = sorted(LAUNCHER.parent.glob("*.py"))
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
    return {**texts, **{importlib.util.cache_from_source(path.name): _compiled(path) for path in paths}}


def _compiled(path: Path) -> bytes:
    """Return a module's code for whoever has the very same text, whenever that was written."""
    # Imported here because nobody else needs it.
    import py_compile
    import tempfile

    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "code")
        py_compile.compile(str(path), str(made), path.name, doraise=True, invalidation_mode=unchecked)
        return made.read_bytes()


def trial_argv(python: str, modules: Sequence[str], control: int) -> list[str]:
    """Return the command by which a Python imports modules and says if kernels could be forked from it then.

    ``control`` is the number of a descriptor, an ``AF_UNIX`` socket of ``SOCK_SEQPACKET``, to which it writes
    one JSON: ``{"ready": [...]}``, or ``{"failed": why}``.
    """
    return [python, str(LAUNCHER), _TRIAL, str(control), ",".join(modules)]
