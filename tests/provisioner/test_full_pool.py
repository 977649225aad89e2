"""What a student is told when there is nothing free."""

from __future__ import annotations

import asyncio

import pytest

from gpu_pool_client import NeverFits, TimedOut
from support.jupyter_env import JupyterEnv, Managers, eventually


async def test_the_message_names_what_is_free_what_would_start_and_who_to_ask(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    await jupyter_env.fill("85%")
    for name, size in [("GPU 2%", "2%"), ("GPU 10%", "10%"), ("GPU 20%", "20%")]:
        jupyter_env.install(name, size)
    km = manager(
        jupyter_env.install("GPU 50%", "50%", kernel_proxy=False, wait_timeout=0, contact="Ada in room 12")
    )
    with pytest.raises(TimedOut) as refused:
        await km.start_kernel()
    assert refused.value.largest_now == "15%"
    words = str(refused.value).replace("\n", " ")
    assert words.startswith("No GPU slice of 50 percent is free now.")
    assert words.endswith(
        'These kernels would start now: "GPU 10 percent" or "GPU 2 percent". '
        "If you need more, ask Ada in room 12."
    )


async def test_the_kernel_that_is_named_does_start(jupyter_env: JupyterEnv, manager: Managers) -> None:
    await jupyter_env.fill("95%")
    jupyter_env.install("small", "2%")
    with pytest.raises(TimedOut, match='This kernel would start now:\\s"small"'):
        await manager(jupyter_env.install("large", "50%", kernel_proxy=False, wait_timeout=0)).start_kernel()
    await manager("small").start_kernel()


@pytest.mark.parametrize("broken", ["pool", "kernelspecs"])
async def test_advice_that_cannot_be_had_hides_no_refusal(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    await jupyter_env.fill("1")
    km = manager(jupyter_env.install("two", kernel_proxy=False, wait_timeout=0))

    def fail(*_: object) -> None:
        raise RuntimeError(broken)

    if broken == "pool":
        monkeypatch.setattr(type(jupyter_env.pool), "status", fail)
    else:
        monkeypatch.setattr(type(km.kernel_spec_manager), "get_all_specs", fail)
    with pytest.raises(TimedOut, match=r"(?s)No GPU slice of 2 percent is free now.*If you need more"):
        await km.start_kernel()


async def test_a_slice_that_becomes_free_within_the_wait_is_taken(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    held = await jupyter_env.fill("1")
    km = manager(jupyter_env.install("two", kernel_proxy=False, wait_timeout=30))
    start = asyncio.create_task(km.start_kernel())
    await eventually(jupyter_env.has_queue)
    await jupyter_env.pool.release(held.id)
    await start
    assert (await jupyter_env.only_lease()).holder.kernel.startswith("two")


async def test_a_slice_that_can_never_fit_is_refused_without_percent_signs(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = manager(jupyter_env.install("tiny", "0.5%"))
    with pytest.raises(NeverFits, match="Ask for at least\\s1.1 percent here") as refused:
        await km.start_kernel()
    assert "%" not in str(refused.value)
