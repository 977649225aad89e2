"""A slice that its user gives back: what they were promised is kept, whatever the kernel does until then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gpu_pool_client import Activity, Holder, Lease, LeaseState, parse_request
from gpu_pool_provisioner.proxy.supervisor import IdleCuller
from gpu_pool_provisioner.session.expiry_policy import ExpiryAction

UNUSED = Activity(initialised=False, working=False)
USED = Activity(initialised=True, working=False)
LEASE = Lease("one", "one", parse_request("2%"), Holder("ada"), LeaseState.HELD, 0.0)


def culler(activity: Activity, told: list[str]) -> Any:
    """Return what watches a kernel that does so with its device, and is idle."""

    async def now(value: object) -> object:
        return value

    client: Any = SimpleNamespace(
        lease=lambda: now(LEASE), activity=lambda: now(activity), last_activity=activity
    )
    relay: Any = SimpleNamespace(messages={}, busy=False, last_activity=0.0, tell=told.append)
    found: Any = IdleCuller(LEASE, relay, client)
    found._idle_since -= 3600
    return found


async def test_one_that_can_be_parked_is_parked() -> None:
    watch = culler(UNUSED, [])
    assert "its variables are kept" in watch.give_back(UNUSED)
    assert watch.idle_state.gives_back_when_idle
    assert (await watch.time_is_up()).act is ExpiryAction.PARK


async def test_one_whose_user_knows_that_it_ends_is_ended() -> None:
    watch = culler(USED, [])
    assert "with its variables" in watch.give_back(USED)
    step = await watch.time_is_up()
    assert (step.act, step.if_idle) == (ExpiryAction.END, True)


async def test_one_that_has_begun_to_use_the_device_is_not_ended_and_says_so() -> None:
    told: list[str] = []
    watch = culler(USED, told)
    watch.give_back(UNUSED)
    assert (await watch._look()).act is ExpiryAction.NOTHING
    assert "keeps its GPU slice" in told[0]
    assert not watch.idle_state.gives_back_when_idle


async def test_what_is_kept_is_not_given_back() -> None:
    watch = culler(UNUSED, [])
    watch.give_back(UNUSED)
    assert "however long it is idle" in watch.keep(60)  # its course has no idle limit
    assert not watch.idle_state.gives_back_when_idle
    assert (await watch._look()).act is ExpiryAction.NOTHING
