"""Servers whose courses have namespaces of their own: where they and their homes are. No cluster, no Hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tornado.web import HTTPError
from traitlets.config import Config

from support.kube_profiles import TEXT
from support.spawner_without_cluster import Reached, SpawnerWithoutCluster, connect_to_none

COURSES = {"art": "home: 1GiB", "bio": "home: 1GiB", "brief": "home: none"}


class Api:
    """Takes claims for homes as a cluster does, and keeps in mind which."""

    def __init__(self) -> None:
        self.homes: list[str] = []
        self.deleted: list[str] = []

    async def create_namespaced_persistent_volume_claim(self, namespace: str, body: Any) -> None:
        assert body.metadata.name
        self.homes.append(namespace)

    async def delete_namespaced_persistent_volume_claim(self, name: str, namespace: str) -> None:
        assert name
        self.deleted.append(namespace)


class Spawner(SpawnerWithoutCluster):
    async def get_pod_manifest(self) -> Any:
        raise Reached


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    connect_to_none(monkeypatch)
    for name, said in COURSES.items():
        (tmp_path / f"{name}.yaml").write_text(TEXT.format(said))
    settings = {"course_namespace": "course-{course}", "courses_dir": str(tmp_path), "course_required": False}
    return Config({"Spawner": {**settings, "namespace": "hub", "storage_pvc_ensure": True}})


def made(config: Config, state: dict[str, Any] | None = None) -> Any:
    """Return a user's spawner as a Hub makes it that has just started."""
    spawner = Spawner(config=config, _mock=True)
    spawner.api = Api()
    spawner.load_state(state or {})
    return spawner


async def start(spawner: Any, course: str | None) -> str:
    """Start as the Hub does; return the namespace in which the pod would be made."""
    spawner.user_options = {"course": course} if course else {}
    spawner.clear_state()
    with pytest.raises(Reached):
        await spawner.start()
    return str(spawner.namespace)


async def test_a_home_is_made_in_the_namespace_of_each_course(config: Config) -> None:
    spawner = made(config)
    for course in ("art", "bio"):
        assert await start(spawner, course) == f"course-{course}"
        assert spawner.api.homes.pop() == f"course-{course}"
    assert await start(spawner, None) == "hub"
    assert spawner.api.homes == ["hub"]


async def test_a_home_is_made_in_another_namespace_when_the_hub_has_started_anew(config: Config) -> None:
    before = made(config)
    await start(before, "art")
    spawner = made(config, before.get_state())
    assert await start(spawner, "bio") == "course-bio"
    assert spawner.api.homes == ["course-bio"]


async def test_a_home_is_made_in_the_namespace_of_each_profile(config: Config) -> None:
    del config.Spawner["course_namespace"]
    there = {"kubespawner_override": {"namespace": "there"}}
    config.Spawner.profile_list = [{"display_name": "Here"}, {"display_name": "There", **there}]
    spawner = made(config)
    spawner.orm_spawner = SimpleNamespace(name="", server=None, user_options={})
    for profile, namespace in (("here", "hub"), ("there", "there"), ("here", "hub")):
        spawner.user_options = {"profile": profile}
        spawner.clear_state()
        with pytest.raises(Reached):
            await spawner.start()
        assert (spawner.namespace, spawner.api.homes.pop()) == (namespace, namespace)


async def test_a_server_without_a_course_is_where_none_is_when_the_hub_has_started_anew(
    config: Config,
) -> None:
    before = made(config)
    await start(before, "art")
    spawner = made(config, before.get_state())
    assert spawner.namespace == "course-art", "where its server may still run"
    assert await start(spawner, None) == "hub"


async def test_a_home_is_deleted_where_the_last_server_had_it(config: Config) -> None:
    before = made(config)
    await start(before, "art")
    before._stop_pending = True
    before.clear_state()
    before._stop_pending = False
    for spawner in (before, made(config, before.get_state())):
        await spawner.delete_forever()
        assert spawner.api.deleted.pop() == "course-art"
        assert await start(spawner, None) == "hub"


async def test_the_name_of_a_home_is_kept_where_none_was_needed_or_nothing_started(config: Config) -> None:
    """It may be that of an earlier ``pvc_name_template``, and would be another one without."""
    spawner = made(config)
    await start(spawner, "art")
    spawner.pvc_name = "claim-of-old"
    await start(spawner, "brief")
    assert spawner.get_state()["pvc_name"] == "claim-of-old"
    spawner.user_options = {"course": "gone"}
    with pytest.raises(HTTPError):
        await spawner.start()
    assert spawner.get_state()["pvc_name"] == "claim-of-old"
