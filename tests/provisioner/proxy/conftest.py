"""What the tests of proxies share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.fixtures import jupyter_env, manager

__all__ = ["jupyter_env", "manager"]


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the terms of those who name no course, before anybody asks for anything."""
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "settings"))

    def set_terms(**terms: str) -> None:
        (tmp_path / "settings").mkdir()
        content = {"PoolSettings": {"default_course": terms}}
        (tmp_path / "settings" / "gpu_pool_config.json").write_text(json.dumps(content))

    return set_terms
