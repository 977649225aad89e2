"""A spawner of KubeSpawner's with profiles and courses, without a cluster and a Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes_asyncio.client import ApiClient
from tornado.web import HTTPError
from traitlets.config import Config

from gpu_pool_spawner import pool_view
from gpu_pool_spawner.kube_cluster import ClusterSupply
from support.kube_profiles import HAMI
from support.spawner_without_cluster import Reached, SpawnerWithoutCluster, connect_to_none

SERVER = """\
title: '<b>ML</b> & more'
who: {groups: [ml]}
slices: [{name: Small, request: 2%}, {name: "A \\"large\\" one", request: 50%}]
kubernetes: {kernels: server, cpu: 2, start_within: 10min}
"""
#: Its title as it is shown: nothing in it is HTML.
TITLE = "\u2039b\u203aML\u2039/b\u203a & more"
OTHER = "title: {}\nwho: {{groups: [{}]}}\nslices: [{{name: Small, request: 2%}}]\n"
COURSES = {
    "ml": SERVER,
    "art": OTHER.format("Art", "ml"),
    "bio": OTHER.format("Biology", "bio"),
    "later": OTHER.format("Later", "ml") + "weeks: {from: 2101-01-03, to: 2101-02-01}\ntime_zone: UTC\n",
}
SIZES = {
    "display_name": "GPU",
    "choices": {
        "little": {"display_name": "A little", "slice": "Small", "kubespawner_override": {"mem_limit": "1G"}},
        "much": {"display_name": "Much", "slice": "50%"},
    },
}
IMAGES = {
    "display_name": "Image",
    "choices": {
        "slim": {"display_name": "Slim", "kubespawner_override": {"image": "example.org/slim:1"}},
        "full": {
            "display_name": "Full",
            "default": True,
            "kubespawner_override": {"image": "example.org/full:1"},
        },
    },
    "unlisted_choice": {
        "enabled": True,
        "display_name": "Another",
        "validation_regex": r"^example\.org/",
        "kubespawner_override": {"image": "{value}"},
    },
}
PROFILES: list[dict[str, Any]] = [
    {
        "display_name": "CPU only",
        "slug": "cpu",
        "kubespawner_override": {"cpu_limit": 8, "extra_labels": {"kind": "cpu"}},
        "profile_options": {"image": IMAGES},
    },
    {
        "display_name": "Machine learning",
        "slug": "ml",
        "course": "ml",
        "kubespawner_override": {"cpu_limit": 8, "image": "example.org/ml:1", "environment": {"KIND": "ml"}},
        "profile_options": {"size": SIZES},
    },
    {"display_name": "Biology", "slug": "bio", "course": "bio"},
]


class Spawner(SpawnerWithoutCluster):
    supply = ClusterSupply(HAMI)
    groups = frozenset({"ml"})
    manifest: Any = None

    async def get_pod_manifest(self) -> Any:
        self.manifest = await super().get_pod_manifest()
        raise Reached


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    connect_to_none(monkeypatch)
    pool_view.log_once.cache_clear()
    for name, text in COURSES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def made(folder: Path, profiles: Any = (), **settings: Any) -> Any:
    """Return a user's spawner as a Hub makes it."""
    settings = {"courses_dir": str(folder), "pool_url": f"unix:{folder}/nobody.sock", **settings}
    config = Config({"Spawner": {**settings, "profile_list": profiles or [], "storage_pvc_ensure": False}})
    spawner = Spawner(config=config, _mock=True)
    spawner.api = SimpleNamespace(api_client=ApiClient.__new__(ApiClient))
    spawner.orm_spawner = SimpleNamespace(name="", server=None, user_options={})
    return spawner


async def start(spawner: Any, options: Mapping[str, object]) -> dict[str, Any]:
    """Start as the Hub does; return the notebook's container, or raise what the user reads."""
    spawner.user_options = dict(options)
    spawner.clear_state()
    await spawner._run_apply_user_options(spawner.user_options)
    with pytest.raises(Reached):
        await spawner.start()
    (container,) = spawner.manifest.spec.containers
    return dict(ApiClient.sanitize_for_serialization(spawner.api.api_client, container))


async def refused(spawner: Any, options: Mapping[str, object]) -> str:
    with pytest.raises(HTTPError) as raised:
        await start(spawner, options)
    assert raised.value.status_code in (400, 403)
    return str(raised.value.jupyterhub_message)  # type: ignore[attr-defined]


def share(container: dict[str, Any]) -> str | None:
    """Return which percentage of a GPU a container has."""
    found = container.get("resources", {}).get("limits", {}).get("nvidia.com/gpucores")
    return None if found is None else str(found)


async def rendered(spawner: Any) -> list[dict[str, Any]]:
    """Return the profiles as a template such as that of jupyterhub-fancy-profiles hands them to a script."""
    spawner.profile_form_template = "{{ profile_list | tojson }}"
    return list(json.loads(await spawner.get_options_form()))
