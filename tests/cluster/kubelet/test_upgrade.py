"""From an earlier version's installation to this one, by both charts, while kernels run.

The earlier one is 32d9930, the last whose kernels are the first process of their pods. All of it is from that
commit: pages, images, examples and chart.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from support import installation
from support.earlier import source_of
from support.images import name_of
from support.installation import Installation, installing
from support.jupyter_env import eventually
from support.kubelet import RealCluster
from support.notebook import NAMES
from support.student import LONG, Visit

# Images are built twice, and everything is installed before the first of them.
pytestmark = [pytest.mark.timeout(2400), pytest.mark.long]

EARLIER, TAG = "32d9930", "upgraded"
KERNEL = NAMES[0]
#: Ends as soon as its home has the file.
UNTIL_TOLD = """
import pathlib, time
print('begun', flush=True)
while not pathlib.Path('go-on').exists():
    time.sleep(0.1)
print(x + 1)
"""


@pytest.fixture(scope="module")
def installed(own_cluster: RealCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Install the earlier version."""
    if why := installation.missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("upgrade")
    source, own, kept = source_of(EARLIER, folder / "earlier"), name_of("notebook"), "localhost/kept:1"
    # The earlier images have the names of those with which the cluster began.
    own_cluster.ctr("images", "tag", own, kept)
    try:
        with installing(own_cluster, folder, by_helm=True, source=source) as made:
            yield made
    finally:
        own_cluster.ctr("images", "tag", "--force", kept, own)
        own_cluster.ctr("images", "rm", kept)


def uids(installed: Installation) -> set[str]:
    return {pod["metadata"]["uid"] for pod in installed.kernels()}


def is_supervised(pod: Any) -> bool:
    """Whether a kernel's pod has the supervisor's files."""
    names = [volume.get("configMap", {}).get("name", "") for volume in pod["spec"]["volumes"]]
    return any(name.startswith("gpu-pool-supervisor-") for name in names)


async def held(installed: Installation) -> set[str]:
    """Return the leases that are held, as the administrator reads in the service's container."""
    status = json.loads(await asyncio.to_thread(installed.pool, "status --json"))
    return {lease["id"] for lease in status["leases"]}


async def test_kernels_go_on_through_an_upgrade_restart_after_it_and_end_well(
    installed: Installation, visit: Visit
) -> None:
    ada = await visit("ada")
    await ada.start_server("intro-ml")
    # Its name had two spaces then, so that those of all sizes are in order.
    (kernel,) = (each for each in await ada.kernels() if " ".join(each.split()) == KERNEL)
    async with ada.notebook(kernel) as runs, AsyncExitStack() as earlier:
        rests = await earlier.enter_async_context(ada.notebook(kernel))
        for each in (runs, rests):
            assert await each.prints("x = 41") == ""
        cell = runs.run(UNTIL_TOLD)
        await cell.shows("begun")
        pods, leases = await asyncio.to_thread(uids, installed), await held(installed)
        assert len(pods) == len(leases) == 2
        assert not [pod for pod in await asyncio.to_thread(installed.kernels) if is_supervised(pod)]

        await asyncio.to_thread(installed.upgrade, TAG)
        # No kernel noticed, whether it had something to do or not.
        assert await rests.prints("print(x)") == "41\n"
        await ada.write("go-on", "")
        assert "".join((await cell.done(within=LONG)).outputs) == "begun\n42\n"
        assert await asyncio.to_thread(uids, installed) == pods
        assert await held(installed) == leases

        # A server that knows nothing of supervisors restarts its kernel, and starts another.
        await ada.restart(rests)
        async with ada.again(rests) as anew:
            assert await anew.prints("print('x' in globals())") == "False\n"
        assert await held(installed) == leases
        # A course lets nobody have more than two.
        await earlier.aclose()
        await eventually(lambda: held(installed), lambda seen: len(seen) == 1, within=LONG)
        async with ada.notebook(kernel) as third:
            assert await third.prints("print(6 * 7)") == "42\n"

        await asyncio.to_thread(installed.upgrade_hub, TAG)
        # Its server has gone on as well, and the page connects again, since the Hub's proxy was another one.
        async with ada.again(runs) as on:
            assert await on.prints("print(x)") == "41\n"
        # Who comes now has the new images.
        grace = await visit("grace")
        await grace.start_server("intro-ml")
        async with grace.notebook(KERNEL) as new:
            assert await new.prints("print(6 * 7)") == "42\n"
            before = await asyncio.to_thread(uids, installed)
            assert [each for each in await asyncio.to_thread(installed.kernels) if is_supervised(each)]
            await grace.restart(new)
            async with grace.again(new) as anew:
                assert await anew.prints("print(6 * 7)") == "42\n"
            assert await asyncio.to_thread(uids, installed) == before

    async def nothing_is_left() -> bool:
        return not await asyncio.to_thread(installed.kernels) and not await held(installed)

    await eventually(nothing_is_left, within=LONG)
