"""What a service answers to node agents, and to those who say that they are some, over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import AsyncHTTPClient

from gpu_pool_client import Activity, connect
from support.clusters import hami
from support.fake_kubernetes import FakeKubernetes
from support.hub import HubService
from support.kernel_pods import command, held, running
from support.pools import eventually
from support.service import ForkServer
from support.stand_in_hub import behind_stand_in

GPU = "GPU-n1-0"
USE = {"pod": "uid-1", "container": "", "device": GPU}
#: The tokens that the cluster knows, and the nodes of the agents that have them.
TOKENS = {"of-n1": "n1", "of-n2": "n2"}
#: What is no report, and a part of what is said of it.
NONSENSE: tuple[tuple[object, str], ...] = (
    ({}, "devices: Field required"),
    ({"devices": "GPU", "uses": []}, "devices"),
    ({"devices": [GPU], "uses": [{**USE, "memory_mib": "much"}]}, "uses.0.memory_mib"),
    ({"devices": [GPU], "uses": [{**USE, "memory_mib": -1}]}, "is -1 MiB"),
    ({"devices": [GPU], "uses": [{**USE, "processes": 0}]}, "0 processes"),
    ({"devices": [GPU], "uses": [{**USE, "device": "x"}]}, "was not looked at"),
    ({"devices": [GPU], "uses": [{**USE, "memory_mib": 1e30}]}, "memory_mib"),
    ({"devices": [GPU], "uses": [{**USE, "memory_mib": float("nan")}]}, "memory_mib"),
    ({"devices": [GPU], "uses": [{**USE, "utilisation": float("nan")}]}, "utilisation"),
    ({"devices": [GPU], "uses": [{**USE, "utilisation": float("inf")}]}, "utilisation"),
    ({"devices": [GPU], "uses": [USE, USE]}, "is told twice"),
    ([], "is not valid"),
)


@dataclass
class Agents:
    """A service, the cluster behind it, and what agents say."""

    service: HubService
    fake: FakeKubernetes

    async def say(
        self, token: str, body: object, path: str = "node/use", method: str = "POST"
    ) -> tuple[int, Any]:
        """Return the status and the answer."""
        text = None if method == "GET" else json.dumps(body)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        answer = await AsyncHTTPClient().fetch(
            f"{self.service.url}/api/v1/{path}", method=method, headers=headers, body=text, raise_error=False
        )
        return answer.code, json.loads(answer.body or "null")

    def log(self) -> str:
        return self.service.service.log


def report(*uses: tuple[str, int]) -> dict[str, Any]:
    """Return what an agent says of these pods, by uid and MiB."""
    told = [{"pod": uid, "container": "", "device": GPU, "memory_mib": mib} for uid, mib in uses]
    return {"devices": [GPU], "uses": told}


def known(node: str) -> dict[str, Any]:
    """Return what the cluster says of the token of a node's agent."""
    told = {"pod-name": ["agent"], "pod-uid": ["1"], "node-name": [node]}
    extra = {f"authentication.kubernetes.io/{name}": each for name, each in told.items()}
    user = {"username": "system:serviceaccount:agents:agent", "extra": extra}
    return {"authenticated": True, "audiences": ["gpu-pool"], "user": user}


@asynccontextmanager
async def serving(children: ForkServer, fake: FakeKubernetes, folder: Path) -> AsyncIterator[Agents]:
    settings = f"""
c.KubernetesSettings.kubeconfig = "{fake.kubeconfig(folder / "kubeconfig")}"
c.KubernetesSettings.namespace = "hub"
c.KubernetesSettings.node_agent = "agents/agent"
c.PoolSettings.audit_log = "{folder / "audit.log"}"
"""
    async with behind_stand_in(children, folder / "service", settings, "--kubernetes") as (hub, service):
        hub.users["of-ada"] = "ada"
        yield Agents(service, fake)


@pytest.fixture
async def agents(
    cluster_children: ForkServer, fake: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Agents]:
    fake.put("nodes", hami("n2"))
    fake.tokens = {token: known(node) for token, node in TOKENS.items()}
    monkeypatch.setenv("GPU_POOL_TOKEN", "of-ada")
    async with serving(cluster_children, fake, tmp_path) as agents:
        yield agents


async def test_an_agent_is_believed_of_its_node_and_a_lie_is_refused_and_written_down(
    agents: Agents, fake: FakeKubernetes, tmp_path: Path
) -> None:
    async with connect(agents.service.url) as pool:
        await eventually(pool.status, lambda status: status.devices)
        lease = await held(pool)
        await pool.launch(lease.id, command())
        fake.run(f"gpu-pool-{lease.id}-1")
        await running(pool, lease.id)
        uid = fake.get("pods", f"gpu-pool-{lease.id}-1")["metadata"]["uid"]
        assert await agents.say("of-n1", report((uid, 412))) == (200, {})
        assert await pool.activity(lease.id) == Activity(initialised=True, memory_mib=412)
        status, problem = await agents.say("of-n2", report((uid, 30_000)))
        assert (status, problem["code"]) == (403, "not-allowed")
        assert f"The pod {uid} is not on node 'n2'" in problem["message"]
        assert (await pool.activity(lease.id)).memory_mib == 412
        # Its owner cannot say it either, nor whoever is an administrator somewhere else.
        status, problem = await agents.say("of-ada", report((uid, 1)))
        assert (status, "cluster does not know this token" in problem["message"]) == (401, True)
    assert "The agent of node 'n2' is not believed" in agents.log()
    (line,) = (line for line in (tmp_path / "audit.log").read_text().splitlines() if "node/n2" in line)
    assert "is not on node" in json.loads(line)["message"]


async def test_nonsense_is_refused_in_words(agents: Agents) -> None:
    for body, said in NONSENSE:
        status, problem = await agents.say("of-n1", body)
        assert (status, problem["code"]) == (400, "bad-request"), body
        assert said in problem["message"], body


async def test_neither_a_time_nor_a_node_that_an_agent_names_means_anything(
    agents: Agents, fake: FakeKubernetes
) -> None:
    async with connect(agents.service.url) as pool:
        await eventually(pool.status, lambda status: status.devices)
        lease = await held(pool)
        await pool.launch(lease.id, command())
        fake.run(f"gpu-pool-{lease.id}-1")
        await running(pool, lease.id)
        uid = fake.get("pods", f"gpu-pool-{lease.id}-1")["metadata"]["uid"]
        said = {**report((uid, 30_000)), "node": "n1", "at": 9e9, "time": "2999-01-01T00:00:00Z"}
        assert (await agents.say("of-n2", said))[0] == 403
        assert (await pool.activity(lease.id)).memory_mib is None
        assert (await agents.say("of-n1", {**said, **report((uid, 412))}))[0] == 200
        assert (await pool.activity(lease.id)).memory_mib == 412
        assert (await pool.get_lease(lease.id)).notice == ""


async def test_an_agent_is_heard_120_times_a_minute(agents: Agents) -> None:
    answers = [(await agents.say("of-n1", report()))[0] for _ in range(130)]
    assert answers[:120] == [200] * 120
    assert set(answers[120:]) <= {200, 429}, "a minute may have passed"
    assert (await agents.say("of-n2", report()))[0] == 200, "another node's agent is heard all the same"


async def test_an_agent_s_token_is_good_for_nothing_else(agents: Agents) -> None:
    for path in ("status", "history", "leases/1-00000000"):
        assert (await agents.say("of-n1", None, path, "GET"))[0] == 401
    assert (await agents.say("of-n1", {"drained": True}, "devices/0/drain"))[0] == 401


async def test_who_has_no_token_of_an_agent_is_told_so(agents: Agents) -> None:
    for token in ("", "made-up", "x" * 5_000):
        status, problem = await agents.say(token, report())
        assert status == 401
        assert "node agent" in problem["remedy"]
    # The cluster is asked once about each.
    before = agents.fake.asked("POST", "tokenreviews")
    assert (await agents.say("made-up", report()))[0] == 401
    assert (await agents.say("of-n1", report()))[0] == 200
    assert (await agents.say("of-n1", report()))[0] == 200
    assert agents.fake.asked("POST", "tokenreviews") == before + 1


async def test_a_body_that_is_too_large_is_not_taken(agents: Agents) -> None:
    try:
        status, _ = await agents.say("of-n1", report(*((f"uid-{each}", 1) for each in range(2_000))))
    except OSError:  # the connection is closed before all of it is sent
        return
    assert status in (400, 413)
