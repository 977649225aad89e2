"""The administrator's settings, from real files in Jupyter's configuration directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_pool.settings import Rules, load_settings
from gpu_pool_client import BadRequest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    return tmp_path


def test_without_files_the_defaults_hold(folder: Path) -> None:
    assert load_settings().rules == Rules()


def test_python_and_json_files_are_read(folder: Path) -> None:
    (folder / "gpu_pool_config.py").write_text("c.PoolSettings.max_share = 0.5")
    (folder / "gpu_pool_config.json").write_text('{"PoolSettings": {"context_mib": 300, "max_devices": 2}}')
    assert load_settings().rules == Rules(context_mib=300, max_milli=500, max_devices=2)


def test_compute_may_be_granted_more_than_once_over(folder: Path) -> None:
    (folder / "gpu_pool_config.py").write_text("c.PoolSettings.compute_overcommit = 2.5")
    assert load_settings().rules.device_milli == 2500


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpu_pool_config.py", "c.PoolSettings.max_share = = 1", "gpu_pool_config.py cannot be read: Syntax"),
        ("gpu_pool_config.py", "1 / 0", "cannot be read: ZeroDivisionError"),
        ("gpu_pool_config.json", "{", "gpu_pool_config.json cannot be read"),
        ("gpu_pool_config.py", "c.PoolSettings.max_share = 2", "max_share"),
        ("gpu_pool_config.py", "c.PoolSettings.context_mib = 'lots'", "context_mib"),
    ],
)
def test_a_wrong_file_is_named(folder: Path, name: str, text: str, words: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(BadRequest, match=words):
        load_settings()
