"""Mistakes of ours: no cell waits for ever, and the next one runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpu_pool_provisioner.proxy.relay import Relay
from gpu_pool_provisioner.session import TABLE, State, events
from gpu_pool_provisioner.session.table import Rule
from support.frontend import page_of
from support.jupyter_env import JupyterEnv, Managers, eventually


async def test_what_fails_as_a_kernel_has_just_answered_is_told_in_the_cell(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, failures = Relay.begin, iter([ValueError("no such thing")])

    def fails_once(relay: Relay) -> None:
        for failure in failures:
            raise failure
        begin(relay)

    monkeypatch.setattr(Relay, "begin", fails_once)
    held = await jupyter_env.fill("1")
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        cell = page.run("1")
        await cell.shows("Waiting")
        await jupyter_env.pool.release(held.id)
        assert "The kernel proxy failed: ValueError('no such thing')" in (await cell.done()).outputs[0]
        await km.restart_kernel(now=True)
        assert (await page.run("print('well')").done()).outputs == ["well\n"]
    await km.shutdown_kernel(now=True)
    await eventually(jupyter_env.is_empty)


async def test_a_rule_that_fails_fails_the_start_and_keeps_no_slice(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("no such thing")

    monkeypatch.setitem(TABLE[State.ASKING], events.Granted, Rule(fails, (State.HELD,)))
    km = manager(jupyter_env.install("two"))
    with pytest.raises(RuntimeError, match="no such thing"):
        await km.start_kernel()
    await eventually(jupyter_env.is_empty)


async def test_what_is_cancelled_by_something_in_it_fails_the_start(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled(*_: Any) -> Any:
        raise asyncio.CancelledError

    monkeypatch.setattr(jupyter_env.pool, "request", cancelled)
    with pytest.raises(RuntimeError, match="Ask was cancelled"):
        await manager(jupyter_env.install("two")).start_kernel()
