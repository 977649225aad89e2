"""What an audit log says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def lines(path: Path) -> list[dict[str, Any]]:
    """Every line of the log, each of which must be whole."""
    text = path.read_bytes()
    assert text.endswith(b"\n")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def content(path: Path) -> bytes:
    return path.read_bytes()


def told(path: Path, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(line.get(name) for name in ("event", *names)) for line in lines(path)]
