"""The service by its chart beside the Hub's, as docs/administrator/helm.md says, and a student meanwhile."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tornado.httpclient import AsyncHTTPClient

from support import installation
from support.installation import NAMESPACE, Installation, installing
from support.jupyter_env import eventually
from support.kubelet import RealCluster
from support.notebook import NAMES
from support.student import Visit

# Images are built and everything is installed before the first of them.
pytestmark = pytest.mark.timeout(1800)

KERNEL = NAMES[0]


@pytest.fixture(scope="module")
def installed(own_cluster: RealCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Install everything, the service by its chart."""
    if why := installation.missing():
        pytest.skip(why)
    with installing(own_cluster, tmp_path_factory.mktemp("helm"), by_helm=True) as made:
        yield made


def token(installed: Installation) -> str:
    """Return the service's token, as the Hub's chart has it."""
    data = installed.cluster.get("secret", "-n", NAMESPACE, "hub")["data"]
    return base64.b64decode(data["hub.services.gpu-pool.apiToken"]).decode()


async def knows(installed: Installation, token: str) -> bool:
    """Whether the Hub says whose token it is."""
    where, headers = f"{installed.url}/hub/api/user", {"Authorization": f"token {token}"}
    answer = await AsyncHTTPClient().fetch(where, headers=headers, raise_error=False, request_timeout=120)
    assert answer.code in (200, 403), answer.body
    return answer.code == 200


async def test_a_new_token_is_the_only_one_and_kernels_go_on(installed: Installation, visit: Visit) -> None:
    student = await visit("ada")
    await student.start_server("intro-ml")
    old = token(installed)
    assert await knows(installed, old)
    async with student.notebook(KERNEL) as notebook:
        assert await notebook.prints("x = 41") == ""
        *at_the_hub, restart = installed.helm.commands("The token")
        for each in at_the_hub:
            await asyncio.to_thread(installed.helm.type, each, installed.folder)
        await asyncio.to_thread(installed.wait)
        new = token(installed)
        assert new != old
        assert [await knows(installed, each) for each in (old, new)] == [False, True]
        # The service still has the old one, which only logins at the dashboard need.
        refused = await student.open("/services/gpu-pool/")
        assert (refused.code, "must be restarted" in refused.body.decode()) == (500, True)
        async with student.notebook(KERNEL) as meanwhile:
            assert await meanwhile.prints("print(6 * 7)") == "42\n"
        await asyncio.to_thread(installed.helm.type, restart, installed.folder)
        await asyncio.to_thread(installed.wait)

        async def shows_the_slice() -> bool:
            with suppress(asyncio.TimeoutError):
                page = await asyncio.wait_for(student.open("/services/gpu-pool/"), 10)
                return "2%" in page.body.decode()
            return False

        # A connection that the Hub's proxy begins while there is no pod is dropped by kube-router, and
        # given up after more than two minutes: people load the page again.
        await eventually(shows_the_slice, within=60)
        # The upgrade has replaced the Hub's proxy, through which the page was connected.
        async with student.again(notebook) as page:
            assert await page.prints("print(x + 1)") == "42\n"
        status = json.loads(await asyncio.to_thread(installed.pool, "status --json"))
        assert "ada" in {lease["user"] for lease in status["leases"]}
        async with student.notebook(KERNEL) as later:
            assert await later.prints("print(6 * 7)") == "42\n"


def test_it_is_removed_and_its_store_stays(installed: Installation) -> None:
    installed.helm.follow("Remove it", installed.folder)
    claims = installed.cluster.get("pvc", "-n", NAMESPACE)["items"]
    assert "gpu-pool-store" in {each["metadata"]["name"] for each in claims}
    deployments = installed.cluster.get("deployments", "-n", NAMESPACE)["items"]
    assert "gpu-pool" not in {each["metadata"]["name"] for each in deployments}
