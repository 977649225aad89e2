"""Writes the program as the one file that root installs: ``python -m …program.archive FILE``.

A zip archive that Python runs (:mod:`zipapp`), of the sources that stand beside this file and of nothing
else. It has no times and no owners, and is not compressed: the same sources are the same bytes, whoever
writes them, wherever.
"""

from __future__ import annotations

import hashlib
import io
import sys
import zipapp
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpu_pool_provisioner.hibernation.program import FOLDER

#: What runs it: nothing of its caller's environment or folders is looked at (-I), nor what is installed (-S).
_INTERPRETER: Final = "/usr/bin/python3 -IS"
_PACKAGE: Final = "gpu_pool_hibernation"
_RIGHTS: Final = 0o100644
#: The oldest time that an archive can say.
_TIME: Final = (1980, 1, 1, 0, 0, 0)
#: The system of its names, as zipfile writes it on Linux.
_UNIX: Final = 3


def archive() -> bytes:
    """Return the file that is installed."""
    root = Path(FOLDER)
    archived, made = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(archived, "w", zipfile.ZIP_STORED) as file:
        for path in (root / "__main__.py", *sorted((root / _PACKAGE).glob("*.py"))):
            entry = zipfile.ZipInfo(path.relative_to(root).as_posix(), _TIME)
            entry.create_system, entry.external_attr = _UNIX, _RIGHTS << 16
            file.writestr(entry, path.read_bytes())
    archived.seek(0)
    zipapp.create_archive(archived, made, _INTERPRETER)
    return made.getvalue()


def main(arguments: Sequence[str]) -> int:
    """Write it to the file that is named, and say its digest; return the exit status."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("Name one file, which is written: gpu-pool-hibernation", file=sys.stderr)
        return 2
    path, written = Path(arguments[0]), archive()
    try:
        path.write_bytes(written)
        path.chmod(0o755)
    except OSError as error:
        print(f"{path} was not written ({error.strerror}): name a file of yours.", file=sys.stderr)
        return 1
    print(f"{hashlib.sha256(written).hexdigest()}  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
