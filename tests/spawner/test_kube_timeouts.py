"""Servers that KubeSpawner itself gives up: what their users read. No cluster, no Hub."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tornado.web import HTTPError
from traitlets.config import Config

from gpu_pool_spawner import kube_messages
from support.kube_profiles import TEXT
from support.spawner_without_cluster import SpawnerWithoutCluster, connect_to_none

WAITING = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image example.org/ml:1"}}


class Spawner(SpawnerWithoutCluster):
    """Has a pod of which the test says how it is."""

    pod: dict[str, Any] | None = None
    #: KubeSpawner ends its wait at random, somewhat before or after; here always before we do.
    gives_up_before = -60.0

    async def get_pod_manifest(self) -> Any:
        return SimpleNamespace(metadata=SimpleNamespace(name="jupyter-ada"))

    @property
    def pod_reflector(self) -> Any:
        return SimpleNamespace(pods={f"{self.namespace}/{self.pod_name}": self.pod} if self.pod else {})


class Api:
    """Takes every pod, or none in time."""

    def __init__(self, *, takes: bool) -> None:
        self.takes = takes

    async def create_namespaced_pod(self, namespace: str, pod: Any) -> None:
        if not self.takes:
            raise asyncio.TimeoutError(f"{namespace}/{pod.metadata.name}")


def made(folder: Path, monkeypatch: pytest.MonkeyPatch, api: Api, **settings: Any) -> Spawner:
    connect_to_none(monkeypatch)
    (folder / "ml.yaml").write_text(TEXT.format(""))
    config = Config({"Spawner": {"courses_dir": str(folder), "namespace": "secret-namespace", **settings}})
    spawner = Spawner(config=config, _mock=True)
    spawner.api = api
    spawner.user_options = {"course": "ml"}
    return spawner


async def refused(spawner: Spawner) -> str:
    with pytest.raises(HTTPError) as caught:
        await spawner.start()
    said = str(caught.value.jupyterhub_message)
    assert said.endswith("Nothing was started. Try again later.")
    assert "secret-namespace" not in said
    return said


@pytest.mark.parametrize(
    ("metadata", "state", "words"),
    [
        ({}, WAITING, "The course's software cannot be fetched."),
        ({}, {}, "The server was not ready within 1s."),
        # That of the last start, on a node that does not answer any more.
        ({"deletionTimestamp": "2026-10-12T10:00:00Z"}, WAITING, kube_messages.ENDING),
    ],
)
async def test_a_pod_that_kubespawner_gives_up_is_refused_in_the_words_of_the_pod(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    metadata: dict[str, str],
    state: dict[str, Any],
    words: str,
) -> None:
    spawner = made(tmp_path, monkeypatch, Api(takes=True), start_timeout=1)
    status = {"phase": "Pending", "podIP": None, "containerStatuses": [{"ready": False, "state": state}]}
    spawner.pod = {"metadata": metadata, "spec": {"nodeName": "one"}, "status": status}
    assert (await refused(spawner)).startswith(words)
    assert "did not start in 1 seconds" in caplog.text


async def test_a_pod_that_the_cluster_does_not_take_in_time_is_refused_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spawner = made(tmp_path, monkeypatch, Api(takes=False), k8s_api_request_retry_timeout=1)
    assert (await refused(spawner)).startswith(kube_messages.NO_ANSWER)
    assert "Could not create pod" in caplog.text
