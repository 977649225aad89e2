"""``kernels install``, ``list`` and ``remove``: the kernels that people pick in Jupyter."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpu_pool.cli import completing, screen
from gpu_pool.cli.formatting import safe
from gpu_pool.cli.session import CommandSession, json_option, pool_options, verb
from gpu_pool_client import (
    BadRequest,
    GpuPoolError,
    Holder,
    NeverFits,
    NotAllowed,
    OverQuota,
    Pool,
    SliceRequest,
    parse_request,
)
from gpu_pool_client._pool import COURSE_VARIABLE
from gpu_pool_client._processes import account_of

if TYPE_CHECKING:
    from gpu_pool_kernels.installer import InstalledKernel, Removal


_COLUMNS = ("Name", "In the launcher", "Slice", "Base", "Folder")


@click.group("kernels", no_args_is_help=False)
@pool_options
def kernels() -> None:
    """Install, list and remove GPU kernels for Jupyter."""


@verb(
    "install",
    "gpu-pool kernels install 2% 10% 50% 1",
    "gpu-pool kernels install 1.5GiB --base ir --user",
    "gpu-pool kernels install 2% --preload numpy,torch",
    "gpu-pool kernels install 2% --wrap --user",
    "gpu-pool kernels install 2% --batch",
)
@click.argument("sizes", nargs=-1, required=True)
@click.option(
    "--base",
    default="python3",
    show_default=True,
    shell_complete=completing.base_kernels,
    help="The kernelspec to build on.",
)
@click.option("--user", is_flag=True, help="Install for this user, in every environment.")
@click.option("--sys-prefix", is_flag=True, help="Install for this Python environment (the default).")
@click.option(
    "--prefix",
    type=click.Path(file_okay=False, path_type=Path),
    help="Install below this folder, in share/jupyter/kernels.",
)
@click.option("--wrap", is_flag=True, help="For frontends that ignore kernel provisioners, such as VS Code.")
@click.option(
    "--preload",
    metavar="MODULES",
    help="Start warm kernels, in which these modules are imported already, such as numpy,torch.",
)
@click.option(
    "--with-server",
    is_flag=True,
    help="Import them when a Jupyter server starts, and not only after its first such kernel.",
)
@click.option("--batch", is_flag=True, help="For graders and the like: they come after all other kernels.")
@json_option
def install(
    session: CommandSession,
    sizes: tuple[str, ...],
    base: str,
    user: bool,
    sys_prefix: bool,
    prefix: Path | None,
    wrap: bool,
    preload: str | None,
    with_server: bool,
    batch: bool,
) -> int:
    """Install a GPU kernel for each size, based on an existing kernel.

    A size that the pool would refuse is installed anyway, with a message.
    Named by --pool, that pool is the kernels' own; else it is the one that is
    set where they are started.
    """
    from gpu_pool_kernels.installer import install as install_kernels

    if user + sys_prefix + (prefix is not None) > 1:
        raise BadRequest(
            "Several places to install to were given.", "Give one of --user, --sys-prefix and --prefix."
        )
    requests = [parse_request(size) for size in sizes]
    where = sys.prefix if sys_prefix else prefix
    modules = None if preload is None else [name.strip() for name in preload.split(",") if name.strip()]
    made = install_kernels(
        requests,
        base=base,
        user=user,
        prefix=where,
        wrap=wrap,
        preload=modules,
        with_server=with_server,
        batch=batch,
        pool_url=session.url or "",
    )
    refused = refusals(session, requests)
    if session.as_json:
        never = [
            {"slice": str(each), "message": error.message, "remedy": error.remedy}
            for each, error in refused.items()
        ]
        screen.show_json({"kernels": _plain(made), "refused": never})
        return 0
    _say(made, "Installed {display_name!r} in {path}")
    for each, error in refused.items():
        screen.note(f"the pool would refuse a kernel of {each}: {error}")
    return 0


@verb("list", "gpu-pool kernels list", "gpu-pool kernels list --json | jq -r '.kernels[].name'")
@json_option
def list_(session: CommandSession) -> int:
    """List the GPU kernels that Jupyter finds."""
    from gpu_pool_kernels.installer import installed

    found = installed()
    if session.as_json:
        screen.show_json({"kernels": _plain(found)})
        return 0
    rows = [[safe(text) for text in _cells(kernel)] for kernel in found]
    none = "None is installed. Install some with: gpu-pool kernels install 2% 10% 50% 1"
    screen.show(screen.table(_COLUMNS, rows) if rows else none)
    return 0


@verb("remove", "gpu-pool kernels remove python3-gpu-2pct", "gpu-pool kernels remove --all")
@click.argument("names", nargs=-1, shell_complete=completing.kernels)
@click.option("--all", "everything", is_flag=True, help="Remove all GPU kernels.")
@json_option
def remove(session: CommandSession, names: tuple[str, ...], everything: bool) -> int:
    """Remove GPU kernels from all folders that Jupyter searches.

    These are your own, this environment's and the system's, and those of
    JUPYTER_PATH. The kernels they were built on stay. Exit status 1 if some
    could not be removed.
    """
    from gpu_pool_kernels import installer

    if bool(names) == everything:
        raise BadRequest("Which kernels?", "Name them (see gpu-pool kernels list), or give --all.")
    removal = installer.remove_all() if everything else installer.remove(names)
    foreign = installer.foreign() if everything else []
    if session.as_json:
        _show_removal(removal, foreign)
    else:
        _say(removal.gone, "Removed {display_name!r} from {path}")
        for kernel, why in removal.left:
            owner = f"Repeat this as {_owner(kernel.path)}, who owns it."
            screen.note(f"{str(kernel.path)!r} was not removed: {why}. {owner}")
        for path in foreign:
            what = "is a GPU kernel, but was not created by gpu-pool kernels install"
            screen.note(f"{safe(str(path), 300)!r} {what}. It stays: remove it yourself if it is not needed.")
    return 1 if removal.left else 0


for _command in (install, list_, remove):
    kernels.add_command(_command)


def _show_removal(removal: Removal, foreign: list[Path]) -> None:
    left = [{**_plain([kernel])[0], "why": why} for kernel, why in removal.left]
    screen.show_json(
        {"kernels": _plain(removal.gone), "left": left, "foreign": [str(path) for path in foreign]}
    )


def _owner(path: Path) -> str:
    """Name the user who may remove what is in the folder above."""
    try:
        return path.parent.owner()
    except (OSError, KeyError):
        return "the user"


def _say(kernels: Iterable[InstalledKernel], sentence: str) -> None:
    for kernel in kernels:
        click.echo(sentence.format(display_name=safe(kernel.display_name), path=kernel.path))


def _plain(kernels: Iterable[InstalledKernel]) -> list[dict[str, str]]:
    keys = ("name", "display_name", "slice", "base", "path")
    return [dict(zip(keys, _cells(kernel), strict=True)) for kernel in kernels]


def _cells(kernel: InstalledKernel) -> tuple[str, str, str, str, str]:
    return kernel.name, kernel.display_name, kernel.slice, kernel.base, str(kernel.path)


def refusals(session: CommandSession, requests: Iterable[SliceRequest]) -> dict[SliceRequest, GpuPoolError]:
    """Return those of the requests that the pool would refuse, with its reasons.

    Nothing is asked for. A pool that cannot be asked now, or has no GPU now, is not
    held to refuse anything. This user's own pool is not opened, since that would
    make one where there is none; its arithmetic is done here.
    """
    try:
        if session.is_served:
            return session.ask(lambda pool: _by_service(pool, requests))
        return _by_rules(requests)
    except GpuPoolError:
        return {}


def _by_rules(requests: Iterable[SliceRequest]) -> dict[SliceRequest, GpuPoolError]:
    from gpu_pool.devices import discover
    from gpu_pool.policy import admission
    from gpu_pool.settings import load_settings

    rules, devices = load_settings().rules, discover().devices

    def refusal(request: SliceRequest) -> GpuPoolError | None:
        try:
            admission.check_rules(request, rules)
            admission.check(request, devices, rules)
        except (NeverFits, NotAllowed) as error:
            return error
        return None

    found = ((request, refusal(request)) for request in requests) if devices else ()
    return {request: error for request, error in found if error is not None}


async def _by_service(pool: Pool, requests: Iterable[SliceRequest]) -> dict[SliceRequest, GpuPoolError]:
    if not (await pool.status()).devices:
        return {}
    found = [(request, await _answer(pool, request)) for request in requests]
    return {request: error for request, error in found if error is not None}


async def _answer(pool: Pool, request: SliceRequest) -> GpuPoolError | None:
    """Return why the pool would refuse this user, and None where it would not, but perhaps let them wait."""
    try:
        await pool.forecast(request, Holder(account_of(os.getuid()), os.environ.get(COURSE_VARIABLE)))
    except (NeverFits, NotAllowed) as error:
        return error
    except OverQuota:  # of what is held now
        pass
    return None
