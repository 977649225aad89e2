"""Advisory memory caps: the variables by which frameworks keep themselves within a slice.

They hold an honest program to its slice and turn what would be a neighbour's
failure into a readable out-of-memory error. Anybody can unset them.

Which variables a framework understands depends on its version, so that is read
first, from the names of the ``*.dist-info`` folders that the kernel's
interpreter would import from: that interpreter is never started, and nothing
of its environment is imported.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from gpu_pool_client._devices import Limit, Slice, Strength
from gpu_pool_client._home import home_folder
from gpu_pool_client._leases import Lease

#: Device memory that libraries such as cuBLAS take for their code, in MiB: PyTorch 2.11 took 158
#: on an H100 beside its context and beside what it hands out itself, once it had multiplied
#: matrices. Of a small slice no more than this part of what the context leaves is kept for it.
LIBRARIES_MIB: Final = 160
_PART_FOR_LIBRARIES: Final = 4
#: Least memory a cap leaves: the size of the blocks that PyTorch allocates.
_LEAST_MIB: Final = 20

#: The frameworks that hold themselves to a slice in a pod where nothing else does. Which ones its image has
#: is not known outside, so torch is limited by the kernel itself: a release that lacks the variable would
#: fail by it.
_OF_ANY_IMAGE: Final = {"torch": "2.0", "jax": "0.4", "tensorflow": "2.4", "cupy": "13.0"}
_DISTRIBUTIONS: Final = {
    "torch": "torch",
    # jaxlib, not jax, reads the variables.
    "jaxlib": "jax",
    "tensorflow": "tensorflow",
    "tensorflow_gpu": "tensorflow",
    "tf_nightly": "tensorflow",
}
#: Variables by which a framework takes memory as it needs it, and no limit.
_AS_NEEDED: Final = frozenset(("XLA_PYTHON_CLIENT_PREALLOCATE", "TF_FORCE_GPU_ALLOW_GROWTH"))
_TORCH_SETTINGS: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_FRACTION_KEY: Final = "per_process_memory_fraction"
_DIST_INFO: Final = re.compile(r"([A-Za-z0-9_.]+)-([0-9][^-]*)(?:-py[0-9.]+)?\.(?:dist|egg)-info")
#: Set in the kernel by gpu_pool_kernels.inkernel.caps, when the framework begins to use the GPU.
_TORCH_HOOK: Final = "GPU_POOL_TORCH_FRACTION"
_TENSORFLOW_HOOK: Final = "GPU_POOL_TENSORFLOW_MIB"
#: A released version; group 3 is the local part, such as ``cu128`` or ``cpu``.
_RELEASE: Final = re.compile(r"([0-9]+)\.([0-9]+)(?:\.[0-9]+)*(?:\.post[0-9]+)?(?:\+(.*))?", re.ASCII)
#: Other names than a Python's have no Python packages of their own.
_PYTHON: Final = re.compile(r"(python|pypy)[0-9.]*t?", re.ASCII)
_VERSIONED: Final = re.compile(r"python[0-9]+\.[0-9]+t?", re.ASCII)
#: What a virtual environment's ``pyvenv.cfg`` says where it also imports from its Python's own folders.
_SYSTEM_PACKAGES: Final = re.compile(r"^\s*include-system-site-packages\s*=\s*true\s*$", re.I | re.M)


def slice_environment(
    lease: Lease, python: str, environment: Mapping[str, str] | None = None, *, hook: bool = False
) -> dict[str, str]:
    """Return the variables that a process on ``lease`` needs: the lease's own, and framework caps.

    The caps suit the frameworks that the interpreter ``python`` would import,
    see :func:`installed_frameworks` and :func:`slice_caps`. Where the lease's
    tier holds the memory there are no fractions: CUDA may show no more than was
    granted, and a share of that would be a share of a share.
    """
    caps = slice_caps(installed_frameworks(python, environment), lease.slices, environment, hook=hook)
    if lease.enforcement.memory.strength is not Strength.NONE:
        caps = {name: value for name, value in caps.items() if name in _AS_NEEDED}
    elif caps:
        lease = with_caps(lease, caps)
    return {**lease.environment, **caps}


def installed_frameworks(python: str, environment: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """Return the versions of the frameworks that the interpreter ``python`` would import.

    The keys are ``torch``, ``jax`` (the version of jaxlib), ``tensorflow`` and
    ``cupy``. ``python`` is a path, or a name to be found on the ``PATH`` of
    ``environment``, which is the environment the interpreter will get (by
    default this process's). What cannot be told is left out; nothing is raised.
    """
    environment = os.environ if environment is None else environment
    found: dict[str, str] = {}
    for folder in _import_folders(python, environment):
        try:
            changed = Path(folder).stat().st_mtime_ns
            frameworks = _frameworks_in(folder, changed)
        except OSError:
            continue
        for name, version in frameworks.items():
            found.setdefault(name, version)
    return found


def slice_caps(
    versions: Mapping[str, str],
    slices: Sequence[Slice],
    environment: Mapping[str, str] | None = None,
    *,
    hook: bool = False,
) -> dict[str, str]:
    """Return the variables that hold frameworks of these versions within ``slices``, one lease's.

    A framework has one fraction and one amount for all devices, so where these
    differ it gets the smallest of each: then it exceeds the slice of none.
    ``environment`` is the one the variables will be added to (by default this
    process's): what the user has set there is kept. ``hook`` is whether what
    runs on the slice is an IPython kernel that sets limits as frameworks are
    imported, for those without a variable. Only a lease of whole devices gets no cap.

    A burst may be taken back while a framework runs, which torch alone follows, and
    only where the hook tells it: all others have what is granted.
    """
    if not versions or all(part.memory_mib >= part.device.memory_mib for part in slices):
        return {}
    environment = os.environ if environment is None else environment
    usable = [(usable_mib(part), part.device.memory_mib) for part in slices]
    least = min(mib for mib, _ in usable)
    fraction = _fraction(usable)
    found: dict[str, str] = {}
    if "torch" in versions:
        found |= _torch(versions["torch"], fraction, environment, hook=hook)
        can_follow = hook and found and _can_hook_torch(versions["torch"])
        if can_follow and any(part.limit_mib for part in slices):
            allowed = [(usable_mib(part, with_burst=True), part.device.memory_mib) for part in slices]
            found[_TORCH_HOOK] = _fraction(allowed)
    if "jax" in versions:
        found |= _jax(fraction, environment)
    if "tensorflow" in versions:
        found |= _tensorflow(versions["tensorflow"], least, environment, hook=hook)
    if "cupy" in versions:
        found |= _unless_set("CUPY_GPU_MEMORY_LIMIT", str(least * 2**20), environment)
    return found


def pod_caps(slices: Sequence[Slice], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hold the frameworks of any image within ``slices``, one lease's.

    ``environment`` is what its kernel has by itself.
    """
    return slice_caps(_OF_ANY_IMAGE, slices, environment, hook=True)


def _fraction(usable: Sequence[tuple[int, int]]) -> str:
    """Return the largest share that is within each of these amounts of memory, each with its device's."""
    # Rounded down, and in integers: the share of no slice adds up to more than the device.
    share = min(mib * 100_000 // total for mib, total in usable)
    return f"{share // 100_000}.{share % 100_000:05d}"


def usable_mib(part: Slice, *, with_burst: bool = False) -> int:
    """Return how much of a slice's memory a framework may hand out itself, in MiB.

    The slice, with its burst where that is to count, is all that its process may use,
    and a framework's limit does not count what CUDA and its libraries take.
    """
    left = (part.allowed_mib if with_burst else part.memory_mib) - part.device.context_mib
    return max(left - min(LIBRARIES_MIB, left // _PART_FOR_LIBRARIES), _LEAST_MIB)


def with_caps(lease: Lease, caps: Mapping[str, str]) -> Lease:
    """State in a lease whose memory nothing firmer holds that framework caps do."""
    words = limit_words(caps, may_burst=bool(lease.limit_mib))
    if not words:
        return lease
    memory = Limit(Strength.COOPERATIVE, words)
    return replace(lease, enforcement=replace(lease.enforcement, memory=memory))


def limit_words(caps: Mapping[str, str], *, may_burst: bool = False) -> str:
    """Say which frameworks ``caps`` limits: ``framework caps: torch, jax``, or nothing.

    Those that a kernel's hook limits are told apart, since a program that the
    kernel starts is not limited: ``framework caps: jax; tensorflow only in the
    kernel itself``. TensorFlow's own variable makes it take memory as it needs
    it, and sets no limit. Where it ``may_burst``, it is said which of them can.
    """
    has_fraction = any(_FRACTION_KEY in value for value in caps.values())
    limited = {
        "torch": has_fraction,
        "jax": "XLA_PYTHON_CLIENT_MEM_FRACTION" in caps,
        "cupy": "CUPY_GPU_MEMORY_LIMIT" in caps,
    }
    hooked = {"torch": _TORCH_HOOK in caps and not has_fraction, "tensorflow": _TENSORFLOW_HOOK in caps}
    everywhere, here = (", ".join(filter(found.get, found)) for found in (limited, hooked))
    follows = "torch in the kernel itself alone" if _TORCH_HOOK in caps else "none of them"
    burst = f"memory on top is for {follows}" if may_burst else ""
    parts = [everywhere, f"{here} only in the kernel itself" if here else "", burst]
    return f"framework caps: {'; '.join(filter(None, parts))}" if everywhere or here else ""


def _torch(version: str, fraction: str, environment: Mapping[str, str], *, hook: bool) -> dict[str, str]:
    """Add the fraction to the user's own settings, in the variable that torch reads.

    Of the two names, CUDA's part of torch 2.10 to 2.15 reads the older one
    first. Where neither is set, the older is also the one that code in a
    notebook overrides, whichever it sets. A torch that reads no fraction there is
    left to the kernel's hook.
    """
    if any(_FRACTION_KEY in environment.get(name, "") for name in _TORCH_SETTINGS):
        return {}
    if not _torch_takes_fraction(version):
        return {_TORCH_HOOK: fraction} if hook and _can_hook_torch(version) else {}
    name = next((name for name in _TORCH_SETTINGS if environment.get(name)), _TORCH_SETTINGS[0])
    theirs = environment.get(name, "").strip().rstrip(",")
    return {name: f"{theirs},{_FRACTION_KEY}:{fraction}".lstrip(",")}


def _can_hook_torch(version: str) -> bool:
    """Whether this torch can be given a limit while it runs: set_per_process_memory_fraction is 1.8's."""
    return _is_since((1, 8), version) and not version.endswith("+cpu")


def _torch_takes_fraction(version: str) -> bool:
    """Whether this torch knows the key; one that does not fails at its first use of CUDA.

    The key is in the binaries of 2.10.0 and absent from those of 2.9.1. A
    pre-release of 2.10 may lack it. Builds without CUDA register no such key.
    """
    match = _RELEASE.fullmatch(version)
    return match is not None and (int(match[1]), int(match[2])) >= (2, 10) and match[3] != "cpu"


def _tensorflow(version: str, least: int, environment: Mapping[str, str], *, hook: bool) -> dict[str, str]:
    """Let TensorFlow take memory as it needs it; it has no variable for a limit, which the hook sets."""
    found = _unless_set("TF_FORCE_GPU_ALLOW_GROWTH", "true", environment)
    # LogicalDeviceConfiguration has its name, and its place, since TensorFlow 2.4.
    if hook and _is_since((2, 4), version):
        found[_TENSORFLOW_HOOK] = str(least)
    return found


def _is_since(first: tuple[int, int], version: str) -> bool:
    """Whether a version, which may be a pre-release, is at least ``first``."""
    match = re.match(r"([0-9]+)\.([0-9]+)", version)
    return match is not None and (int(match[1]), int(match[2])) >= first


def _jax(fraction: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Set the older name of JAX's fraction, which every version reads.

    The newer one, ``XLA_CLIENT_MEM_FRACTION``, is unknown to jaxlib before
    0.4.32, and setting both is an error in later ones, on which JAX falls back
    to the CPU. Without preallocation the fraction still is the most it takes.
    """
    found = _unless_set("XLA_PYTHON_CLIENT_PREALLOCATE", "false", environment)
    if not environment.get("XLA_CLIENT_MEM_FRACTION"):
        found |= _unless_set("XLA_PYTHON_CLIENT_MEM_FRACTION", fraction, environment)
    return found


def _unless_set(name: str, value: str, environment: Mapping[str, str]) -> dict[str, str]:
    return {} if environment.get(name) else {name: value}


@functools.lru_cache(maxsize=256)
def _frameworks_in(folder: str, changed: int) -> Mapping[str, str]:  # noqa: ARG001 - part of the cache's key
    """Return the versions of the frameworks installed in one folder, which last ``changed`` then."""
    found = {}
    for name in os.listdir(folder):  # noqa: PTH208 - Path.iterdir takes ten times as long
        match = _DIST_INFO.fullmatch(name) if name.endswith("-info") else None
        if match is None:
            continue
        distribution = match[1].lower().replace(".", "_")
        framework = _DISTRIBUTIONS.get(distribution)
        if framework is None and (distribution == "cupy" or distribution.startswith("cupy_cuda")):
            framework = "cupy"
        if framework is not None:
            found[framework] = match[2]
    return found


def _import_folders(python: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the folders from which ``python`` imports, in its order; some may not exist."""
    located = shutil.which(python, path=environment.get("PATH"))
    if located is None or not _PYTHON.fullmatch(Path(located).name):
        return
    yield from filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    # Not resolved: a virtual environment is known by the folder its link lies in.
    prefix = Path(located).absolute().parent.parent
    base = Path(located).resolve()
    try:
        settings = (prefix / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
    except OSError:  # no virtual environment
        settings = None
    if settings is not None:
        yield from _site_folders(prefix, base)
        if not _SYSTEM_PACKAGES.search(settings):
            return
    if not environment.get("PYTHONNOUSERSITE"):
        own = _user_base(environment)
        yield from _site_folders(own, base) if own else ()
    yield from _site_folders(base.parent.parent, base)


def _user_base(environment: Mapping[str, str]) -> Path | None:
    base, home = environment.get("PYTHONUSERBASE"), environment.get("HOME") or home_folder()
    if base:
        return Path(base)
    return Path(home, ".local") if home else None


def _site_folders(prefix: Path, base: Path) -> Iterator[str]:
    """Yield the site folders under ``prefix`` of the Python whose executable is ``base``.

    Debian's ``dist-packages`` are among them. Where the executable's name does
    not tell its version and several are installed, none is yielded: a wrong
    guess could set a key that the right version rejects.
    """
    version = base.name if _VERSIONED.fullmatch(base.name) else _only_version(prefix)
    if version is None:
        return
    for folder in (f"lib/{version}", f"lib64/{version}", f"local/lib/{version}", "lib/python3"):
        yield str(prefix / folder / "site-packages")
        yield str(prefix / folder / "dist-packages")


def _only_version(prefix: Path) -> str | None:
    names = {path.name for path in prefix.glob("lib/python*.*") if _VERSIONED.fullmatch(path.name)}
    return names.pop() if len(names) == 1 else None
