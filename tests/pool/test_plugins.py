"""Tiers and dialects of other packages: found by their entry points, and told of where they are broken."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_pool import plugins
from gpu_pool.cluster.dialects import Cluster, choose, dialect_names, installed_dialects
from gpu_pool.enforcement.machine import find_tier, unowned
from gpu_pool.settings import PoolSettings
from gpu_pool_client import BadRequest

CODE = """
from dataclasses import replace
from gpu_pool.cluster.dialects.device_plugin import DevicePlugin
from gpu_pool.enforcement.tiers import Accounting

class Acme(DevicePlugin):
    table = replace(DevicePlugin.table, name="acme", rank=1)

class Counted(Accounting):
    name = "acme"
"""
Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package ``acme`` with these entry points; nobody knows of it before, or after."""

    def install(points: str) -> None:
        (tmp_path / "acme_gpu.py").write_text(CODE)
        (tmp_path / "acme_broken.py").write_text("import a_library_that_nobody_has")
        info = tmp_path / "acme-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(points)
        monkeypatch.syspath_prepend(tmp_path)
        _forget()

    yield install
    monkeypatch.undo()
    for module in ("acme_gpu", "acme_broken"):
        sys.modules.pop(module, None)
    _forget()


def _forget() -> None:
    plugins.offers.cache_clear()
    installed_dialects.cache_clear()


def gpu_node() -> Cluster:
    status = {"allocatable": {"nvidia.com/gpu": "1"}}
    return Cluster.read([{"metadata": {"name": "a", "labels": {}}, "status": status}])


def test_a_dialect_of_another_package_is_chosen_by_its_rank(install: Install) -> None:
    install("[gpu_pool.dialects]\nacme = acme_gpu:Acme\n")
    assert "acme" in dialect_names()
    assert choose(gpu_node()).seen == ("acme", "device-plugin")
    assert choose(gpu_node(), name="acme").seen == ("acme",)


@pytest.mark.parametrize(
    ("offered", "why"),
    [
        ("acme_broken:Acme", "acme of package acme cannot be loaded: ModuleNotFoundError"),
        ("acme_gpu:Missing", "acme of package acme cannot be loaded: AttributeError"),
        (
            "acme_gpu:Counted",
            "acme of package acme is not a subclass of gpu_pool.cluster.dialects.base.Dialect",
        ),
        ("gpu_pool.cluster.dialects.hami:Hami", "acme has no table, or one of another name"),
    ],
)
def test_a_broken_dialect_is_told_and_left_out(install: Install, offered: str, why: str) -> None:
    install(f"[gpu_pool.dialects]\nacme = {offered}\n")
    choice = choose(gpu_node())
    assert choice.seen == ("device-plugin",)
    assert f"The dialect {why}" in str(choice)
    assert str(choice).endswith("It is left out.")
    with pytest.raises(BadRequest, match="'acme' is not a dialect that can be used: acme "):
        choose(gpu_node(), name="acme")


def test_no_package_takes_the_name_of_one_of_ours(install: Install) -> None:
    install("[gpu_pool.dialects]\nhami = acme_gpu:Acme\n[gpu_pool.tiers]\naccounting = acme_broken:Tier\n")
    assert not installed_dialects()[1]
    assert find_tier("accounting").__module__ == "gpu_pool.enforcement.tiers"


def test_a_tier_of_another_package_is_found_and_says_that_it_was_not_seen(install: Install) -> None:
    install("[gpu_pool.tiers]\nacme = acme_gpu:Counted\n")
    assert find_tier("acme").__module__ == "acme_gpu"
    unowned(PoolSettings(tier="acme"))


def test_a_broken_tier_is_refused_by_name_and_disturbs_no_other(install: Install) -> None:
    install("[gpu_pool.tiers]\nacme = acme_broken:Tier\n")
    with pytest.raises(
        BadRequest, match="c.PoolSettings.tier is 'acme'.*cannot be loaded.*Accepted: auto, acc"
    ):
        unowned(PoolSettings(tier="acme"))
    unowned(PoolSettings())


def test_a_tier_that_is_not_installed_is_refused_with_those_that_are() -> None:
    with pytest.raises(BadRequest, match="no installed package has it.*accounting, cgroups, hami, mps"):
        find_tier("mpss")
