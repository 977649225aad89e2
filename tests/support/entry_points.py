"""The entry points of this project where it is not installed, and runs from its sources."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

_SETTINGS: Final = Path(__file__).resolve().parents[2] / "pyproject.toml"
#: The table of one group, and one line of it. Not tomllib, which Python 3.10 does not have.
_TABLE: Final = re.compile(r'^\[project\.entry-points\."([^"]+)"\]\n((?:(?!\[).*\n)*)', re.M)
_LINE: Final = re.compile(r'^([\w-]+) = "([^"]+)"$', re.M)


def are_there() -> bool:
    """Whether Python finds them already."""
    return bool(entry_points(group="jupyter_client.kernel_provisioners", name="gpu-pool"))


def write(folder: Path) -> None:
    """Write them to a folder as an installation would; on ``sys.path`` it makes them known."""
    info = folder / "jupyter_gpu_pool-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jupyter-gpu-pool\nVersion: 0\n")
    tables = _TABLE.findall(_SETTINGS.read_text(encoding="utf-8"))
    lines = [
        f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in _LINE.findall(table)) for group, table in tables
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
