"""What a notebook is told whose kernel is not on disk any more, by a real CRIU."""

from __future__ import annotations

import pytest

from gpu_pool_provisioner.hibernation.calling import Program
from gpu_pool_provisioner.hibernation.left import kernels_on_disk
from support.frontend import frontend, printed
from support.jupyter_env import JupyterEnv, Managers, eventually
from support.kernels_on_disk import (
    CRIU,
    NEEDS_CRIU,
    images,
    install_keeper,
    left_one,
    notebook,
    started,
)

pytestmark = NEEDS_CRIU


def remove(env: JupyterEnv) -> None:
    """Remove what sleeps, as an administrator does, or the program itself after days."""
    by = Program(CRIU, str(env.folder / "asleep"))
    for kernel, _ in kernels_on_disk(by):
        by.call("remove", kernel)
    assert not images(env)


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
async def test_one_that_was_removed_meanwhile_is_told_of_in_its_notebook_once(
    jupyter_env: JupyterEnv, manager: Managers, is_killed: bool
) -> None:
    if is_killed:
        kernel = install_keeper(jupyter_env, hibernate_after=0.3)
        await (await started(jupyter_env, kernel, "kept = 1")).wait()
        await eventually(jupyter_env.is_empty)
    else:
        kernel = await left_one(jupyter_env, manager)
    remove(jupyter_env)
    async with notebook(jupyter_env, manager, kernel) as km, frontend(km) as found:
        told = " ".join((await printed(found, "print('kept' in globals())")).split())
        assert "False" in told
        assert "Your kernel from today " in told
        assert "(1 variable, " in told
        why = "it is no longer on disk: it was removed, or nobody had asked for it for too long."
        assert f"is gone: {why}" in told
        assert "is gone" not in await printed(found, "print(1)")
    async with notebook(jupyter_env, manager, kernel) as km, frontend(km) as found:
        assert await printed(found, "print(2)") == "2\n"


@pytest.mark.parametrize("how", ["woken", "restarted", "shut down", "renamed"])
async def test_of_one_that_was_not_removed_nobody_is_told(
    jupyter_env: JupyterEnv, manager: Managers, how: str
) -> None:
    kernel = await left_one(jupyter_env, manager)
    async with notebook(jupyter_env, manager, kernel) as km, frontend(km) as found:
        if how == "woken":
            assert "1\n" in await printed(found, "print(kept)")
            await eventually(lambda: not images(jupyter_env))
        elif how == "restarted":
            await km.restart_kernel()
            assert await printed(found, "print('kept' in globals())") == "False\n"
        elif how == "renamed":
            now = jupyter_env.folder / "notebooks" / "week2.ipynb"
            assert await km.provisioner.leave_image(str(now)) == ""
        await km.shutdown_kernel()
    async with notebook(jupyter_env, manager, kernel) as km, frontend(km) as found:
        assert await printed(found, "print(2)") == "2\n"
