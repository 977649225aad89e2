"""What the tests run in: a Python environment and variables in which nobody has installed or set anything.

Whoever has kernels, settings or a pool of their own on this machine must see the same tests pass. So the
tests, and every process that they start, run in a Python environment of their own, which has the packages
of the tester's and those files beside them that packages have installed: no kernelspec and no setting that
a person has put there. Home is an empty folder, and what jupyter_core reads for all users of the machine is
left out.
"""

from __future__ import annotations

import atexit
import compileall
import importlib.metadata
import importlib.util
import os
import shutil
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Final

#: What the pool, Jupyter and what they run read, by the beginnings of the names.
SETTINGS: Final = (
    *("GPU_POOL_", "JUPYTER", "JPY_", "IPYTHON", "CONFIGPROXY_", "KUBE", "XDG_", "SUDO_"),
    *("CONDA_", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_", "CUDA_MPS_"),
    *("CUPY_GPU_MEMORY", "PYTORCH_", "TF_", "XLA_"),
)
#: What the tests themselves are told, see CONTRIBUTING.md and docs/developer.
OF_THE_TESTS: Final = (
    *("GPU_POOL_REQUIRE_", "GPU_POOL_SCREENSHOTS", "GPU_POOL_MODEL_STEPS", "GPU_POOL_KERNEL_PYTHONS"),
    *("GPU_POOL_TEST_", "GPU_POOL_PROXY", "KUBEBUILDER_ASSETS"),
)
#: What the programs of the tests import.
_OURS: Final = (
    *("gpu_pool", "gpu_pool_client", "gpu_pool_kernels", "gpu_pool_provisioner", "gpu_pool_spawner"),
    "support",
)
#: A folder of thousands of files, which nobody writes to: linked. All others are copied, file by file, for
#: Jupyter serves nothing that leads out of its folders.
_LINKED: Final = "share/jupyterhub/static"
#: Names the folder of the environment to the processes that run in it.
MARK: Final = "FOLDER_OF_THE_TESTS_ENVIRONMENT"
#: A cluster that the tester wants the tests in tests/cluster/api_server to use; nobody else sees it.
GIVEN_KUBECONFIG: Final = "GPU_POOL_TEST_KUBECONFIG"

_HOOK: Final = """\
import sys
from importlib.machinery import PathFinder


class OfThisEnvironment:
    '''Leaves out of jupyter_core's folders those for all users of the machine.'''

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "jupyter_core.paths":
            return None
        spec = PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.SYSTEM_JUPYTER_PATH[:] = module.SYSTEM_CONFIG_PATH[:] = []

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, OfThisEnvironment)
"""
#: Files of ``site-packages`` that keep from an environment what is installed for all users of the machine.
HOOKS: Final = {"of_this_environment.py": _HOOK, "of_this_environment.pth": "import of_this_environment\n"}


def enter() -> None:
    """Make this process, and those that it starts, run in an environment that nobody has touched.

    The first process makes it and removes it at its end; those that pytest-xdist starts are already in it.
    """
    if sys.prefix != os.environ.get(MARK):
        folder = Path(tempfile.mkdtemp(prefix="gpu-pool-tests-")).resolve()
        atexit.register(_remove, folder, os.getpid())
        folder.chmod(0o755)  # other users run programs in it
        make(folder)
        _move(folder)
        _compile()
    clean(os.environ, Path(os.environ[MARK]))
    sys.dont_write_bytecode = False  # what pytest makes of the tests; see _compile


def _compile() -> None:
    """Compile our packages once: images of containers set ``PYTHONDONTWRITEBYTECODE``.

    Then each of the hundreds of programs that the tests start would compile all of them, and each process
    of pytest-xdist would rewrite every test.
    """
    for name in _OURS:
        found = importlib.util.find_spec(name)
        for folder in (found and found.submodule_search_locations) or ():
            compileall.compile_dir(folder, quiet=2)


def clean(variables: MutableMapping[str, str], folder: Path) -> None:
    """Take what somebody has set out of ``variables``; ``folder`` is where the environment is."""
    kubeconfig = variables.get("KUBECONFIG")
    for name in list(variables):
        if name.startswith(SETTINGS) and not name.startswith(OF_THE_TESTS):
            del variables[name]
    if kubeconfig:
        variables[GIVEN_KUBECONFIG] = kubeconfig
    # Packages that the tester has installed for himself, such as PyTorch, are found where they were.
    if site.ENABLE_USER_SITE:
        variables.setdefault("PYTHONUSERBASE", site.getuserbase())
    (folder / "home").mkdir(exist_ok=True)
    variables["HOME"] = str(folder / "home")
    scripts = str(folder / "bin")
    path = variables.get("PATH", os.defpath).split(os.pathsep)
    variables["PATH"] = os.pathsep.join([scripts, *(each for each in path if each != scripts)])


def make(folder: Path) -> None:
    """Make a Python environment in ``folder`` with the packages of this one, and their files."""
    (folder / "bin").mkdir(parents=True)
    for name in ("python", "python3", f"python3.{sys.version_info.minor}"):
        (folder / "bin" / name).symlink_to(sys.executable)
    (folder / "pyvenv.cfg").write_text(_configuration())
    packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    if sys.prefix != sys.base_prefix:
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            (packages / entry.name).symlink_to(entry)
    for name, text in HOOKS.items():
        (packages / name).unlink(missing_ok=True)
        (packages / name).write_text(text)
    for name, file in _installed_files():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if name.startswith("bin/"):
            _write_script(place, file)
        else:
            shutil.copyfile(file, place)
    if (there := Path(sys.prefix, _LINKED)).is_dir():
        (folder / _LINKED).parent.mkdir(parents=True, exist_ok=True)
        (folder / _LINKED).symlink_to(there)


def _configuration() -> str:
    """Return what ``pyvenv.cfg`` says."""
    if sys.prefix != sys.base_prefix:
        return Path(sys.prefix, "pyvenv.cfg").read_text()
    home = Path(sys.executable).resolve().parent
    return f"home = {home}\ninclude-system-site-packages = true\n"


def _installed_files() -> Iterator[tuple[str, Path]]:
    """Yield what packages have installed beside their modules: the name there, and the file."""
    for distribution in importlib.metadata.distributions():
        for name in distribution.files or ():
            parts = [part for part in name.parts if part != ".."]
            beside = name.parts[0] == ".." and parts[0] in ("bin", "etc", "share")
            short = "/".join(parts) if beside and name.suffix != ".map" else ""  # maps are for debuggers
            if short and not short.startswith(f"{_LINKED}/"):
                file = Path(str(distribution.locate_file(name)))
                if file.is_file():
                    yield short, file


def _write_script(place: Path, file: Path) -> None:
    """Copy a program, to be run by the Python of the new environment."""
    ours, theirs = f"{sys.prefix}/bin/python", f"{place.parent}/python"
    content = file.read_bytes().replace(os.fsencode(ours), os.fsencode(theirs))
    place.unlink(missing_ok=True)
    place.write_bytes(content)
    place.chmod(0o755)


def _move(folder: Path) -> None:
    """Let this process be one of the environment, as those are that it starts."""
    os.environ[MARK] = str(folder)
    sys.executable = str(folder / "bin/python")
    sys.prefix = sys.exec_prefix = str(folder)
    from jupyter_core import paths  # which plugins of pytest have imported already

    paths.ENV_JUPYTER_PATH[:] = [str(folder / "share/jupyter")]
    paths.ENV_CONFIG_PATH[:] = [str(folder / "etc/jupyter")]
    paths.SYSTEM_JUPYTER_PATH[:] = paths.SYSTEM_CONFIG_PATH[:] = []


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # and not in a child that was forked
        shutil.rmtree(folder, ignore_errors=True)
