"""A kernelspec's folder, copied so that a command in it works as it does in the original.

A kernelspec may bring the script that starts its kernel (``{resource_dir}/helper.sh``), so what
may be executed there stays so, and links lead where they led.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Final

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
