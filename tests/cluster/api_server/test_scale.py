"""What many kernels cost the API server, by what it has written down itself: counts, not times."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import api_server, control_plane
from support.clean_environment import GIVEN_KUBECONFIG
from support.school import NAMESPACE, School, burst, end_all, pool_of, school

NODES, USERS, KERNELS = 20, 20, 200
#: Requests that change something, for one kernel from its start to its end.
MOST_WRITES = 4

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[School]:
    if os.environ.get(GIVEN_KUBECONFIG):
        pytest.skip("nobody but the API server of the tests writes down what it is asked (KUBECONFIG)")
    if missing := [*api_server.missing_programs(), *control_plane.missing_programs()]:
        pytest.skip(f"no {' and no '.join(missing)} in {control_plane.ASSETS}")
    with school(tmp_path_factory.mktemp("school"), NODES, USERS) as known:
        yield known


async def test_many_kernels_at_once_cost_few_writes_and_nothing_is_listed_again(
    known: School, tmp_path: Path
) -> None:
    async with pool_of(known, tmp_path / "store.db") as pool:
        at_start = _lists(known)
        leases = await burst(pool, known, KERNELS, "many")
        assert len(leases) == KERNELS
        there = known.cluster.get("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=gpu-kernel")
        assert len(there["items"]) == KERNELS
        await end_all(pool, leases)
    asked = known.account.asked().items()
    written = sum(count for (verb, _), count in asked if verb in ("create", "update", "patch", "delete"))
    assert 3 * KERNELS <= written <= MOST_WRITES * KERNELS
    assert _lists(known) == at_start
    assert at_start == Counter(dict.fromkeys(at_start, 1))


def _lists(known: School) -> Counter[str]:
    return Counter({kind: count for (verb, kind), count in known.account.asked().items() if verb == "list"})
