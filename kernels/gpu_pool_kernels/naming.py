"""A kernelspec's folder: how a size is named and drawn in it, and what is copied into it.

Nothing in a kernelspec says where a list has it: JupyterLab's extension puts the cards of the launcher
in the order of sizes, and other lists of kernels are sorted by name, letter by letter.

A kernelspec may bring the script that starts its kernel (``{resource_dir}/helper.sh``), so what
may be executed there stays so, and links lead where they led.
"""

from __future__ import annotations

import os
import shutil
import stat
from html import escape
from pathlib import Path
from typing import Final

from gpu_pool_client import WHOLE, Filters, SliceRequest, format_memory
from gpu_pool_client._requests import format_length, memory_in_words

#: What ipykernel adds to the name of its own kernelspec.
_SUFFIX: Final = " (ipykernel)"
_RADIUS: Final = 27.0
_LOGO: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64" role="img" aria-label="{label}">
  <circle cx="32" cy="32" r="32" fill="#17324d"/>
  <circle cx="32" cy="32" r="{radius}" fill="none" stroke="#44617d" stroke-width="6"/>
{ring}{lines}</svg>
"""
_RING: Final = """\
  <circle cx="32" cy="32" r="{radius}" fill="none" stroke="{colour}" stroke-width="6" pathLength="1000"
    stroke-dasharray="{milli} {rest}" transform="rotate(-90 32 32)"/>
"""
_LINE: Final = """\
  <text x="32" y="{y}" font-family="sans-serif" font-size="{size}" font-weight="bold" fill="#ffffff"
    text-anchor="middle" dominant-baseline="central">{text}</text>
"""


def display_name(base: str, request: SliceRequest, *, batch: bool = False) -> str:
    """Name a kernel for people: ``Python 3 (ipykernel)`` and 2% make ``Python 3 (GPU 2%)``.

    Of ``2%..10%`` that is ``Python 3 (GPU 2%, up to 10%)``.
    """
    length = [] if request.length is None else [f"for {format_length(request.length)}"]
    parts = [request.title, *_filters(request.filters), *length, *(["batch"] if batch else [])]
    return f"{base.removesuffix(_SUFFIX)} ({', '.join(parts)})"


def folder_name(base: str, request: SliceRequest, *, batch: bool = False) -> str:
    """Name a kernelspec's folder; different requests have different names.

    The model comes last because it is the only free text: what precedes it
    cannot be mistaken for a part of it. It is compared without case everywhere.
    """
    filters = request.filters
    parts = [base, "gpu", _slug(request), *(["batch"] if batch else [])]
    if request.length is not None:
        parts.append(f"for{format_length(request.length)}")
    if filters.memory_mib is not None:
        parts.append(f"memory{format_memory(filters.memory_mib)}")
    if filters.driver is not None:
        parts.append("driver" + ".".join(map(str, filters.driver)))
    if filters.index:
        parts.append("index" + "_".join(map(str, filters.index)))
    if filters.model is not None:
        parts += ["model", filters.model]
    return "-".join(parts).lower()


def by_size(request: SliceRequest) -> tuple[int, int, int, int, str, int]:
    """Return what sizes are sorted by: 2%, 2%..10%, 10%, 1, 2x75%, 4; amounts of memory; then filters."""
    amount, limit = request.milli or request.memory_mib or 0, request.limit_milli or request.limit_mib or 0
    size = int(request.milli is None), request.count * amount, request.count, limit
    return *size, str(request.filters), request.length or 0


def logo(request: SliceRequest) -> str:
    """Draw the size as SVG: a ring filled to the share, and paler to its limit, around the size in words.

    An amount of memory is no share of anything until a device is chosen: its
    ring stays empty.
    """
    ring = _ring(request.limit_milli, "#5b8a53") + _ring(request.milli, "#8fd14f")
    first, _, second = _logo_words(request).partition(" ")
    # Where the lower line stands, the ring leaves less room.
    two = _line(24, first, 20, 60) + _line(42, second, 14, 56) if second else ""
    lines = two or _line(32, first, 20, 72)
    return _LOGO.format(radius=_RADIUS, ring=ring, lines=lines, label=escape(request.title))


def _ring(milli: int | None, colour: str) -> str:
    """Draw the part of the ring that is so many thousandths."""
    return _RING.format(radius=_RADIUS, milli=milli, rest=WHOLE - milli, colour=colour) if milli else ""


def _amount(request: SliceRequest) -> str:
    """``2%``, ``1.5 GiB``: what is asked of each device."""
    if request.memory_mib:
        return memory_in_words(request.memory_mib, exact=True)
    return SliceRequest(milli=request.milli).size


def _slug(request: SliceRequest) -> str:
    if request.whole_devices:
        return f"{request.count}gpu"
    return request.size.replace("..", "-to-").replace("%", "pct")


def _filters(filters: Filters) -> list[str]:
    parts = []
    if filters.model is not None:
        parts.append(filters.model)
    if filters.memory_mib is not None:
        parts.append(f"≥ {memory_in_words(filters.memory_mib, exact=True)}")
    if filters.driver is not None:
        parts.append("driver ≥ " + ".".join(map(str, filters.driver)))
    if filters.index:
        parts.append("index " + ", ".join(map(str, filters.index)))
    return parts


def _logo_words(request: SliceRequest) -> str:
    """Return the size in one or two words: ``2%``, ``4 GPUs``, ``2× 50%``; with its limit, ``2% to 10%``."""  # noqa: RUF002
    if request.whole_devices:
        return "1 GPU" if request.count == 1 else f"{request.count} GPUs"
    amount = _amount(request)
    if request.has_limit:
        times = f"{request.count}×" if request.count > 1 else ""  # noqa: RUF001
        return f"{times}{amount.replace(' ', '')} to {request.limit.replace(' ', '')}"
    return f"{request.count}× {amount.replace(' ', '')}" if request.count > 1 else amount  # noqa: RUF001


def _line(y: int, word: str, largest: int, width: int) -> str:
    """Draw one line of text around ``y``; ``width`` is in units of about half a letter's height."""
    return _LINE.format(y=y, size=min(largest, width // len(word)), text=escape(word))


#: By which a program runs as its file's owner or group, which a copy's are not.
_SPECIAL_RIGHTS: Final = stat.S_ISUID | stat.S_ISGID
_RIGHTS: Final = 0o777
_NEW_FILE: Final = 0o644


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder to one that is not there yet, with its permissions.

    The copy can be changed and removed by its owner, also where the original is read-only, and
    gives nobody rights that new files do not give (umask). What cannot be copied is there as a
    link to the original: files that may not be read here, but perhaps by whoever uses the kernel;
    what is no file; and programs that run as their owner.

    Raises ``OSError`` where the copy cannot be written.
    """
    target.mkdir()
    given = target.stat().st_mode & _RIGHTS
    _copy_content(source.resolve(), source.resolve(), target, given)


def write_anew(file: Path, text: str) -> None:
    """Write a file of a copied folder, which keeps its permissions, and not what it may be a link to."""
    if file.is_symlink():
        mode = file.stat().st_mode & _RIGHTS if file.exists() else _NEW_FILE
        file.unlink()
        file.touch(mode | stat.S_IRUSR | stat.S_IWUSR)
    file.write_text(text, encoding="utf-8")


def _copy_content(root: Path, source: Path, target: Path, given: int) -> None:
    for entry in sorted(os.scandir(source), key=lambda each: each.name):
        place, copy = Path(entry.path), target / entry.name
        if entry.is_symlink():
            copy.symlink_to(_destination(root, place))
        elif entry.is_dir():
            _copy_subfolder(root, place, copy, given)
        elif not _copy_file(place, copy, given):
            copy.symlink_to(place)


def _copy_subfolder(root: Path, source: Path, target: Path, given: int) -> None:
    if not os.access(source, os.R_OK | os.X_OK):
        target.symlink_to(source)
        return
    target.mkdir()
    _copy_content(root, source, target, given)
    target.chmod(source.stat().st_mode & given | stat.S_IRWXU)


def _copy_file(source: Path, target: Path, given: int) -> bool:
    """Copy one file; False if it cannot be copied."""
    mode = source.stat().st_mode
    if not stat.S_ISREG(mode) or mode & _SPECIAL_RIGHTS or not os.access(source, os.R_OK):
        return False
    shutil.copyfile(source, target)
    target.chmod(mode & given | stat.S_IRUSR | stat.S_IWUSR)
    return True


def _destination(root: Path, link: Path) -> Path:
    """Return what a copied link is to name: relative while it stays within the copied folder."""
    named = link.readlink()
    # Unlike Path.resolve, it bears links that lead to themselves.
    is_within = Path(os.path.realpath(link)).is_relative_to(root)
    return named if is_within else link.parent / named
