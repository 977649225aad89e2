"""Kernelspecs on slices: one per size, over any kernelspec that is installed.

Each is a copy of its base with another name and logo, and with our provisioner
in its metadata. It holds no path of this package. Those for frontends that
ignore provisioners name the kernel proxy as their command instead.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_core.paths import jupyter_data_dir

from gpu_pool_client import BadRequest, SliceRequest, parse_request
from gpu_pool_client._pool import BATCH_VARIABLE, CONNECTION_FILE, URL_VARIABLE, WRAPPED_CONNECTION_FILE
from gpu_pool_kernels.launching import wrap_argv
from gpu_pool_kernels.naming import by_size, copy_folder, display_name, folder_name, logo, write_anew

#: The provisioner's entry point in ``jupyter_client.kernel_provisioners``.
PROVISIONER: Final = "gpu-pool"
#: The key in a kernelspec's metadata by which ours are known.
MARKER: Final = "gpu_pool"
#: Tells the code in the kernel which kernelspecs are over the same base.
BASE_VARIABLE: Final = "GPU_POOL_KERNEL_BASE"

#: Commands for which jupyter_client takes the interpreter that it runs in itself.
_OWN_PYTHON: Final = ("python", f"python{sys.version_info[0]}", "python{}.{}".format(*sys.version_info[:2]))
#: The placeholder for a kernelspec's folder in its command.
RESOURCE_DIR: Final = "{resource_dir}"
#: What it replaces in a kernel's command, where it knows the name.
_PLACEHOLDER: Final = re.compile(r"\{[A-Za-z0-9_]+\}")

_KernelJSON = dict[str, Any]


@dataclass(frozen=True, slots=True)
class InstalledKernel:
    """One kernelspec on a slice."""

    #: The kernelspec's name, such as ``python3-gpu-2pct``.
    name: str
    #: The name in the launcher, such as ``Python 3 (GPU 2%)``.
    display_name: str
    #: The name of the kernelspec it was made from.
    base: str
    #: The slice request, as :func:`gpu_pool_client.parse_request` reads it.
    slice: str
    #: The kernelspec's folder.
    path: Path
    #: The modules that are imported when it starts, from a template; None where it starts without.
    preload: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Removal:
    """What came of removing kernelspecs."""

    gone: Sequence[InstalledKernel]
    #: Those that could not be removed, each with the system's reason.
    left: Sequence[tuple[InstalledKernel, str]]


def install(
    sizes: Sequence[SliceRequest],
    *,
    base: str = "python3",
    user: bool = False,
    prefix: str | Path | None = None,
    wrap: bool = False,
    preload: Sequence[str] | None = None,
    with_server: bool = False,
    batch: bool = False,
    pool_url: str = "",
) -> list[InstalledKernel]:
    """Install a kernelspec for each size over the kernelspec ``base``, replacing ours of that name.

    They go where the user's kernelspecs are with ``user``, else under
    ``prefix``, by default this environment's: the Jupyter of this environment
    is the one that finds our provisioner. With ``wrap`` their command is the
    kernel proxy, for frontends that start kernels without a provisioner. With
    ``preload`` they are warm: forked from a process that has imported these modules,
    which ``with_server`` starts with the Jupyter server. With ``batch`` they come after
    all that is not batch work, and have names of their own. With ``pool_url`` they ask that
    pool, and not the one that is set where they are started.

    Raises ``BadRequest``, before anything is written, if there is no such base,
    it cannot be one, or the name is taken by a kernelspec that is not ours;
    and if the folder cannot be written to.
    """
    kernels = (Path(jupyter_data_dir()) if user else Path(prefix or sys.prefix) / "share/jupyter") / "kernels"
    base, folder, spec = _base(base)
    if preload is not None:
        _check_preload(preload, base, spec, wrap=wrap)
    elif with_server:
        raise BadRequest("Nothing is to be preloaded with the server.", "Name modules with --preload.")
    wanted = {folder_name(base, size, batch=batch): size for size in sizes}
    for name, size in wanted.items():
        _check_free(kernels / name, base, size)
    try:
        contents = {
            name: kernel_json(
                spec,
                base,
                size,
                wrapped_in=kernels / name if wrap else None,
                preload=preload,
                with_server=with_server,
                batch=batch,
                pool_url=pool_url,
            )
            for name, size in wanted.items()
        }
        return [
            write_kernel(kernels / name, base, folder, contents[name], size) for name, size in wanted.items()
        ]
    except OSError as error:
        raise _unwritable(kernels, error) from error


def installed() -> list[InstalledKernel]:
    """Return our kernelspecs that Jupyter finds, by base and size."""
    folders = KernelSpecManager().find_kernel_specs()
    found = (_ours(name, Path(folder)) for name, folder in folders.items())
    return sorted((kernel for kernel in found if kernel is not None), key=_by_size)


def copies() -> list[InstalledKernel]:
    """Return our kernelspecs in all folders in which Jupyter looks, by base and size.

    Of several with one name Jupyter finds the first alone: a user's own hides this
    environment's, which hides the system's.
    """
    found = (_ours(path.name.lower(), path) for path in _all_kernels())
    return sorted((kernel for kernel in found if kernel is not None), key=_by_size)


def remove(names: Sequence[str]) -> Removal:
    """Remove every copy of our kernelspecs of these names, wherever Jupyter looks for kernels.

    Raises ``BadRequest``, before anything is removed, for a name that is not one of ours.
    """
    there = copies()
    ours = {kernel.name for kernel in there}
    for name in names:
        if name.lower() not in ours:
            raise BadRequest(
                f"There is no GPU kernel {name!r}.", _listed("Installed:", ours, "none are installed.")
            )
    wanted = {name.lower() for name in names}
    return _removed([kernel for kernel in there if kernel.name in wanted])


def remove_all() -> Removal:
    """Remove all our kernelspecs from all folders in which Jupyter looks."""
    return _removed(copies())


def foreign() -> list[Path]:
    """Return the folders of kernelspecs that name our provisioner, and were not made by :func:`install`.

    They are somebody's own work, which :func:`remove` leaves alone.
    """
    specs = ((path, _read(path)) for path in _all_kernels() if _ours(path.name, path) is None)
    return [path for path, spec in specs if spec and provisioner_of(spec) == PROVISIONER]


def _all_kernels() -> Iterator[Path]:
    """Yield the folder of every kernelspec in all folders in which Jupyter looks."""
    for folder in dict.fromkeys(Path(each).resolve() for each in KernelSpecManager().kernel_dirs):
        with contextlib.suppress(OSError):  # it is not there, or may not be read
            yield from sorted(folder.iterdir())


def _removed(kernels: Sequence[InstalledKernel]) -> Removal:
    tried = [(kernel, _try_to_remove(kernel.path)) for kernel in kernels]
    return Removal(
        gone=[kernel for kernel, why in tried if not why],
        left=[(kernel, why) for kernel, why in tried if why],
    )


def _try_to_remove(path: Path) -> str:
    """Remove a kernelspec's folder, or the link to it; return the system's reason if that fails."""
    try:
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _by_size(kernel: InstalledKernel) -> tuple[object, ...]:
    """Order by base, then by size; what is no slice, in a file that somebody changed, comes last."""
    try:
        size: tuple[object, ...] = (0, *by_size(parse_request(kernel.slice)))
    except BadRequest:
        size = (1,)
    return kernel.base, size, kernel.name, str(kernel.path)


def _base(name: str) -> tuple[str, Path, _KernelJSON]:
    """Return name, folder and content of the kernelspec to build on, if it can be one."""
    manager = KernelSpecManager()
    folders = manager.find_kernel_specs()
    name = name.lower()
    if name not in folders:
        others = [other for other, folder in folders.items() if _ours(other, Path(folder)) is None]
        raise BadRequest(
            f"There is no kernel {name!r} to build on.",
            _listed("Installed:", others, "none are. Install one first: pip install ipykernel."),
        )
    folder = Path(folders[name])
    # The kernelspec that comes with ipykernel has no file until it is installed.
    has_file = Path(folder, "kernel.json").exists()
    spec = _read(folder) if has_file else manager.get_kernel_spec(name).to_dict()
    if spec is None:
        raise BadRequest(f"{folder}/kernel.json cannot be read.", "Install that kernel again.")
    _check_base(name, folder, spec)
    return name, folder, spec


def _check_base(name: str, folder: Path, spec: _KernelJSON) -> None:
    ours = _ours(name, folder)
    if ours is not None:
        raise BadRequest(
            f"{name!r} is itself a GPU kernel, made from {ours.base!r}.", f"Use --base {ours.base}."
        )
    provisioner = provisioner_of(spec)
    if provisioner not in (None, "local-provisioner"):
        raise BadRequest(
            f"The kernel {name!r} is started by another provisioner, {provisioner!r}, "
            "which a GPU kernel would replace.",
            "Choose a base that runs on this machine.",
        )


def _check_preload(modules: Sequence[str], base: str, spec: _KernelJSON, *, wrap: bool) -> None:
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise BadRequest(
                f"{module!r} is not the name of a Python module.",
                "Write names such as numpy,matplotlib.pyplot.",
            )
    if wrap:
        raise BadRequest(
            "Wrapped kernels cannot preload modules.", "Leave out --wrap, or leave out --preload."
        )
    if not can_preload(spec):
        raise BadRequest(
            f"The kernel {base!r} cannot preload modules: it is not started by python -m ipykernel_launcher.",
            "Leave out --preload, or choose a Python kernel with --base.",
        )


def can_preload(spec: Mapping[str, Any]) -> bool:
    """Whether the kernels of this kernelspec can have imported modules when they start."""
    command = [str(word) for word in spec.get("argv", ())]
    return wrap_argv(command) != command


def preloading_bases() -> dict[str, str]:
    """Return the kernels that Jupyter finds and a course's can be made from, with their Python, by name."""
    specs = KernelSpecManager().get_all_specs()
    return {
        name: str(entry["spec"]["argv"][0])
        for name, entry in specs.items()
        if can_preload(entry["spec"]) and provisioner_of(entry["spec"]) in (None, "local-provisioner")
    }


def _check_free(target: Path, base: str, size: SliceRequest) -> None:
    """Refuse to replace what is not the same kernel of ours."""
    if not target.exists() and not target.is_symlink():
        return
    ours = _ours(target.name, target)
    if ours is None or ours.base != base or ours.slice.lower() != str(size).lower():
        raise BadRequest(
            f"There is already another kernel in {target}.",
            "Move it away, or install elsewhere with --prefix.",
        )


def write_kernel(
    target: Path, base: str, folder: Path, content: _KernelJSON, size: SliceRequest
) -> InstalledKernel:
    """Write one kernelspec beside its place and move it there; ``folder`` is its base's.

    Raises ``OSError`` where it cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent.parent, prefix=".gpu-pool-") as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        copy_folder(folder, new)
        new.chmod(0o755)
        write_anew(new / "logo-svg.svg", logo(size))
        write_anew(new / "kernel.json", json.dumps(content, indent=1) + "\n")
        with _moved_away(target, old):
            new.rename(target)
    return InstalledKernel(target.name, content["display_name"], base, str(size), target)


@contextlib.contextmanager
def _moved_away(target: Path, old: Path) -> Iterator[None]:
    """Make room at ``target``; put what was there back if the body fails."""
    had_one = target.exists()
    if had_one:
        target.rename(old)
    try:
        yield
    except OSError:
        if had_one:
            old.rename(target)
        raise


def kernel_json(
    spec: _KernelJSON,
    base: str,
    size: SliceRequest,
    *,
    wrapped_in: Path | None = None,
    preload: Sequence[str] | None = None,
    with_server: bool = False,
    batch: bool = False,
    pool_url: str = "",
) -> _KernelJSON:
    """Return the ``kernel.json`` of a kernel on a slice over the kernel ``base``, whose own is ``spec``.

    With ``wrapped_in``, the folder that it is for, its command is the kernel proxy. The others
    are as for :func:`install`.
    """
    metadata = {
        **spec.get("metadata", {}),
        MARKER: {
            "base": base,
            "slice": str(size),
            # For the code in the kernel, which has no parser of slices.
            "count": size.count,
            "milli": size.milli,
            "memory_mib": size.memory_mib,
        },
    }
    content = {
        **spec,
        "display_name": display_name(spec.get("display_name") or base, size, batch=batch),
        "env": {**spec.get("env", {}), BASE_VARIABLE: base},
        "metadata": metadata,
    }
    if wrapped_in is not None:
        metadata.pop("kernel_provisioner", None)
        content["argv"] = _wrapped(content, size, wrapped_in)
        if batch:
            content["env"][BATCH_VARIABLE] = "1"
        if pool_url:
            content["env"][URL_VARIABLE] = pool_url
    else:
        config: dict[str, Any] = {"slice": str(size)}
        if preload is not None:
            config["preload"] = list(preload)
        if with_server:
            config["preload_with_server"] = True
        if batch:
            config["batch"] = True
        if pool_url:
            config["pool_url"] = pool_url
        metadata["kernel_provisioner"] = {"provisioner_name": PROVISIONER, "config": config}
    return content


def _wrapped(content: _KernelJSON, size: SliceRequest, folder: Path) -> list[str]:
    """Return the command of the proxy in front of a kernel; see ``gpu_pool_provisioner.wrap``.

    Of the placeholders that jupyter_client knows, frontends that ignore provisioners replace
    the connection file's alone, some of them only the first. So it is named once, as a word of
    its own, and the others are replaced here; ``folder`` is the kernelspec's.
    """
    debugger = ["--debugger"] if content["metadata"].get("debugger") else []
    places = {
        CONNECTION_FILE: WRAPPED_CONNECTION_FILE,
        RESOURCE_DIR: str(folder.absolute()),
        "{prefix}": sys.prefix,
    }
    first, *others = (
        _PLACEHOLDER.sub(lambda found: places.get(found[0], found[0]), word) for word in content["argv"]
    )
    return [
        *(sys.executable, "-m", "gpu_pool_provisioner.wrap"),
        *("--slice", str(size), "--name", content["display_name"]),
        *("--language", content.get("language") or "python", *debugger, "-f", CONNECTION_FILE, "--"),
        # As jupyter_client does, which here sees only the first word of the whole.
        *(sys.executable if first in _OWN_PYTHON else first, *others),
    ]


def _ours(name: str, folder: Path) -> InstalledKernel | None:
    """Return the kernelspec in ``folder`` if it is one of ours."""
    spec = _read(folder)
    marker = spec.get("metadata", {}).get(MARKER) if spec else None
    if not spec or not isinstance(marker, dict):
        return None
    base, size = str(marker.get("base", "")), str(marker.get("slice", ""))
    stanza = spec["metadata"].get("kernel_provisioner")
    config = stanza.get("config") if isinstance(stanza, dict) else None
    modules = config.get("preload") if isinstance(config, dict) else None
    preload = tuple(map(str, modules)) if isinstance(modules, list) else None
    return InstalledKernel(name, str(spec.get("display_name", name)), base, size, folder, preload)


def provisioner_of(spec: Mapping[str, Any]) -> object:
    """Return the name of the provisioner that a kernelspec names in its metadata, if any."""
    stanza = spec.get("metadata", {}).get("kernel_provisioner")
    return stanza.get("provisioner_name") if isinstance(stanza, dict) else None


def _read(folder: Path) -> _KernelJSON | None:
    """Return the content of ``kernel.json``; None if there is none that can be read."""
    try:
        spec = json.loads(Path(folder, "kernel.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return spec if isinstance(spec, dict) and isinstance(spec.get("metadata", {}), dict) else None


def _listed(start: str, names: Iterable[str], otherwise: str) -> str:
    return f"{start} {', '.join(sorted(names)) or otherwise}"


def _unwritable(folder: Path, error: OSError) -> BadRequest:
    return BadRequest(
        f"The kernels in {folder} cannot be changed: {error.strerror or error}.",
        "Use --user to install for yourself only, or --prefix for a folder that you may write to.",
    )
