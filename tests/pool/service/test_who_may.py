"""Who may use an operation is what its row says: every row, for whoever may ask."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from gpu_pool.audit.callers import Caller
from gpu_pool.service.heartbeats import Heartbeats, remote_process
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool.service.served_pool import ServedPool
from gpu_pool_client import (
    GpuPoolError,
    Hibernation,
    Holder,
    KernelCommand,
    LeaseGone,
    NotAllowed,
    Pool,
    PreparedStatus,
    Process,
    parse_request,
)
from gpu_pool_client._operations import ADMINISTRATORS, NODE_AGENTS, Operation, Principal, Sight, operation_of
from gpu_pool_client._pool import OPERATIONS
from support.pools import embedded

LOG = logging.getLogger("who-may-test")
#: Each from a process of their own.
ADA, EVE, ROOT, TURING, SERVICE = (
    Caller(name, name == "root", name, remote_process(name, "", name, ""), is_service=name == "/hub")
    for name in ("ada", "eve", "root", "turing", "/hub")
)
AGENT = Caller("node/n1", False, "node/n1", remote_process("node/n1", "", "", ""), node="n1")
#: Nobody else may do what these may.
FOR_SOME_ALONE: Final = (ADMINISTRATORS, NODE_AGENTS)
COURSE: Final = """
title: Machine learning
who: {users: [ada]}
instructors: [turing]
slices: [{name: Small, request: 2%}]
"""
ARGUMENTS: Final[Mapping[str, Any]] = {
    "request": parse_request("2%"),
    "key": "another",
    "device": "0",
    "process": Process.current(),
    "kernel": KernelCommand(("python3",), {}),
    "message": "The exam begins.",
    "timeout": 0,
    "spans": ((1000.0, 60.0),),
    "hibernation": Hibernation(),
    "devices": ("GPU-1",),
    "uses": (),
    "unmovable": {},
}
by_name = pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: row.name)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedPool]:
    folder = tmp_path / "courses"
    folder.mkdir()
    (folder / "ml.yaml").write_text(COURSE)
    async with embedded(tmp_path / "store.db", courses_dir=str(folder)) as pool:
        heartbeats = Heartbeats(60.0, LOG)
        yield ServedPool(pool, LeaseChanges(pool, LOG, heartbeats), heartbeats, LOG)


@pytest.fixture
async def lease(served: ServedPool) -> str:
    """A lease of Ada's, in a course that Turing teaches."""
    return (await served.for_caller(ADA).request(parse_request("2%"), Holder("ada", "ml"), "key")).id


async def refusal(row: Operation, pool: Pool, lease: str, holder: Holder) -> GpuPoolError | None:
    """Do what the row is about; return what stands against it, None for nothing."""
    known = {**ARGUMENTS, "lease_id": lease, "holder": holder}
    arguments = {
        name: known[name]
        for name, each in row.signature.parameters.items()
        if each.default is each.empty or name == "timeout"
    }
    try:
        asked = getattr(pool, row.name)(**arguments)
        await (anext(asked) if inspect.isasyncgen(asked) else asked)
    except GpuPoolError as error:
        return error
    return None


def is_refused(error: GpuPoolError | None, row: Operation) -> bool:
    """Whether it was refused because of who asks, and not because it cannot be done."""
    return (error is not None and error.message == row.refusal[0]) or (
        isinstance(error, LeaseGone) and "There is no lease" in str(error)
    )


@by_name
async def test_of_a_lease_that_is_another_s_there_is_none(
    row: Operation, served: ServedPool, lease: str
) -> None:
    error = await refusal(row, served.for_caller(EVE), lease, Holder("eve"))
    may_not = row.may in FOR_SOME_ALONE or (row.is_of_lease and row.name != "release")
    assert is_refused(error, row) == may_not
    # To end it is silent about what is not there, and does nothing.
    assert (await served.pool.get_lease(lease)).ended_at is None


@by_name
async def test_its_user_may_what_is_not_for_administrators_alone(
    row: Operation, served: ServedPool, lease: str
) -> None:
    error = await refusal(row, served.for_caller(ADA), lease, Holder("ada"))
    assert is_refused(error, row) == (row.may in FOR_SOME_ALONE)


@by_name
async def test_its_process_alone_may_what_only_it_knows_the_consequences_of(
    row: Operation, served: ServedPool, lease: str
) -> None:
    other = replace(ADA, process=remote_process("ada", "", "another", ""))
    for caller in (other, ROOT):
        error = await refusal(row, served.for_caller(caller), lease, Holder(caller.user))
        is_not_its_process = isinstance(error, NotAllowed) and "only the process that asked" in str(error)
        assert is_not_its_process == (row.may == {Principal.PROCESS})


@by_name
async def test_an_administrator_may_all_else(row: Operation, served: ServedPool, lease: str) -> None:
    error = await refusal(row, served.for_caller(ROOT), lease, Holder("root"))
    assert is_refused(error, row) == (row.may == NODE_AGENTS)


@by_name
async def test_a_node_s_agent_may_nothing_but_say_what_is_used_there(
    row: Operation, served: ServedPool, lease: str
) -> None:
    error = await refusal(row, served.for_caller(AGENT), lease, Holder(AGENT.user))
    # This pool has no nodes, and says so in the same words.
    assert is_refused(error, row)
    assert (await served.pool.get_lease(lease)).ended_at is None


@by_name
async def test_an_instructor_may_read_of_their_courses_leases_what_the_row_says(
    row: Operation, served: ServedPool, lease: str
) -> None:
    error = await refusal(row, served.for_caller(TURING), lease, Holder("turing"))
    may_not = row.is_of_lease and Principal.INSTRUCTOR not in row.may and row.name != "release"
    assert is_refused(error, row) == (may_not or row.may in FOR_SOME_ALONE)
    assert (await served.pool.get_lease(lease)).ended_at is None


async def test_whose_lease_it_is_not_waits_for_no_change_of_it(served: ServedPool, lease: str) -> None:
    for caller in (EVE, TURING):
        theirs = served.for_caller(caller)
        with pytest.raises(LeaseGone, match="There is no lease"):
            await served.held_within(theirs, lease, 0, last=True)
        with pytest.raises(LeaseGone, match="There is no lease"):
            await served.changed_within(theirs, lease, 0, "")
        with pytest.raises(LeaseGone, match="There is no lease"):
            await served.pod_within(theirs, lease, 0, "")
    for caller in (ADA, ROOT):
        told = await served.changed_within(served.for_caller(caller), lease, 0, "")
        assert told is not None
        assert told.id == lease


@by_name
def test_an_instructor_changes_nothing_of_others(row: Operation) -> None:
    assert not (Principal.INSTRUCTOR in row.may and row.decision)


@by_name
async def test_a_service_of_the_hub_s_may_what_its_row_says(
    row: Operation, served: ServedPool, lease: str
) -> None:
    error = await refusal(row, served.for_caller(SERVICE), lease, Holder(""))
    assert is_refused(error, row) == (Principal.SERVICE not in row.may)


@pytest.mark.parametrize(
    ("caller", "principal"),
    [
        (ADA, Principal.USER),
        (EVE, Principal.USER),
        (TURING, Principal.INSTRUCTOR),
        (ROOT, Principal.ADMINISTRATOR),
        (SERVICE, Principal.SERVICE),
    ],
)
async def test_each_sees_of_the_pool_what_its_row_says(
    served: ServedPool, lease: str, caller: Caller, principal: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = (PreparedStatus("ml", 1, {"n1": 1}),)
    monkeypatch.setattr(served.pool.backend, "prepared_pods", lambda: found)
    theirs = served.for_caller(EVE)
    held = (await theirs.request(parse_request("2%"), Holder("eve"), "key")).id
    waiting = (await theirs.request(parse_request("1"), Holder("eve"), "waiting")).id
    sight = operation_of(Pool.status).sees.get(principal, Sight.EVERYTHING)
    own = {ADA: ([lease], []), EVE: ([held], [waiting]), TURING: ([lease], [])}.get(caller, ([], []))
    seen = ([lease, held], [waiting]) if sight is Sight.EVERYTHING else own
    status = await served.for_caller(caller).status()
    assert ([each.id for each in status.leases], [each.id for each in status.queue]) == seen
    assert (status.store_bytes is not None) == (sight is Sight.EVERYTHING)
    assert status.prepared == (found if sight is Sight.EVERYTHING else ())
    assert status.devices[0].leases == 2


async def test_each_reads_of_the_history_what_its_row_says(served: ServedPool, lease: str) -> None:
    await served.for_caller(ADA).release(lease)
    sees = operation_of(Pool.history).sees
    assert (sees[Principal.USER], Principal.ADMINISTRATOR in sees) == (Sight.OWN, False)
    read = [len(await served.for_caller(caller).history()) for caller in (ADA, EVE, TURING, ROOT)]
    assert read == [1, 0, 0, 1]
