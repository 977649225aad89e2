"""Start ``-m MODULE ARGUMENTS`` as Python itself would, with our extension loaded.

``python launch.py -m ipykernel_launcher -f FILE`` runs in place of
``python -m ipykernel_launcher -f FILE``. The module sees the same ``sys.path``
and ``sys.argv``, except that the arguments ask IPython for our extension. If
ours cannot be loaded, the kernel starts without it.

``python launch.py template ...`` runs ``template.py`` of this folder, ``prepared`` its ``prepared.py``,
``trial`` its ``trial.py``, ``supervisor`` its ``supervisor.py`` and ``job`` its ``job.py``.
"""

import importlib
import runpy
import sys
from pathlib import Path

#: What may be named in place of ``-m``: the modules of this folder that are programs.
PROGRAMS = ("template", "prepared", "trial", "supervisor", "job")
#: The name of this folder's package inside the kernel. Private, so that it
#: neither hides nor is hidden by a module of the environment.
PACKAGE = "_gpu_pool_inkernel"


def register(folder: Path) -> None:
    """Make the package in ``folder`` known as ``PACKAGE``, with no entry on ``sys.path``."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(
        PACKAGE, str(folder / "__init__.py"), submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[PACKAGE] = module


def extension_arguments(folder: Path) -> "list[str]":
    """Return the arguments by which IPython loads our extension; none if it cannot be."""
    try:
        register(folder)
    except Exception as error:  # noqa: BLE001 - nothing of ours may keep a kernel from starting
        print(f"gpu-pool: no %gpu in this kernel: {error!r}", file=sys.stderr)
        return []
    return ["--ext", PACKAGE]


def first_path() -> str:
    """Return what ``python -m`` puts first on ``sys.path``."""
    try:
        return str(Path.cwd()) if sys.version_info >= (3, 7) else ""
    except OSError:  # the folder has been deleted
        return ""


def main() -> None:
    """Run the module named on the command line, or a program of this folder."""
    folder = Path(__file__).resolve().parent
    is_ours = sys.argv[1] in PROGRAMS
    # With -I, -P or PYTHONSAFEPATH Python puts neither this folder nor the other there.
    if sys.path and sys.path[0] and Path(sys.path[0]).resolve() == folder:
        # What a template imports is found from no folder but those that all its kernels have.
        sys.path[:1] = [] if is_ours else [first_path()]
    if is_ours:
        register(folder)
        importlib.import_module(PACKAGE + "." + sys.argv[1]).main()
        return
    module, arguments = sys.argv[2], sys.argv[3:]
    # First, so that an --ext of the kernelspec's own wins in an IPython that takes only one.
    sys.argv[:] = [module, *extension_arguments(folder), *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
