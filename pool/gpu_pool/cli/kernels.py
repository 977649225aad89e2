"""``kernels install``, ``list`` and ``remove``: the kernels that people pick in Jupyter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpu_pool.cli import screen
from gpu_pool.cli.session import Session, json_option, pool_options, verb
from gpu_pool.cli.words import safe
from gpu_pool_client import BadRequest, parse_request

if TYPE_CHECKING:
    from gpu_pool_kernels.installer import InstalledKernel

_COLUMNS = ("Name", "In the launcher", "Slice", "Base", "Folder")


@click.group("kernels", no_args_is_help=False)
@pool_options
def kernels() -> None:
    """Install, list and remove the kernels that people pick in Jupyter."""


@verb(
    "install",
    "gpu-pool kernels install 2% 10% 50% 1",
    "gpu-pool kernels install 1.5GiB --base ir --user",
    "gpu-pool kernels install 2% --wrap --user",
)
@click.argument("sizes", nargs=-1, required=True)
@click.option("--base", default="python3", show_default=True, help="The kernelspec to build on.")
@click.option("--user", is_flag=True, help="Install for this user, in every environment.")
@click.option("--sys-prefix", is_flag=True, help="Install for this Python environment (the default).")
@click.option(
    "--prefix",
    type=click.Path(file_okay=False, path_type=Path),
    help="Install below this folder, in share/jupyter/kernels.",
)
@click.option("--wrap", is_flag=True, help="For frontends that ignore kernel provisioners, such as VS Code.")
@json_option
def install(
    session: Session,
    sizes: tuple[str, ...],
    base: str,
    user: bool,
    sys_prefix: bool,
    prefix: Path | None,
    wrap: bool,
) -> int:
    """Install a kernel for each size over a kernel that is there already."""
    from gpu_pool_kernels.installer import install as install_kernels

    if user + sys_prefix + (prefix is not None) > 1:
        raise BadRequest(
            "Several places to install to were given.", "Give one of --user, --sys-prefix and --prefix."
        )
    requests = [parse_request(size) for size in sizes]
    where = sys.prefix if sys_prefix else prefix
    made = install_kernels(requests, base=base, user=user, prefix=where, wrap=wrap)
    return _report(session, made, "Installed {display_name!r} in {path}")


@verb("list", "gpu-pool kernels list", "gpu-pool kernels list --json | jq -r '.kernels[].name'")
@json_option
def list_(session: Session) -> int:
    """List the kernels on slices that Jupyter finds."""
    from gpu_pool_kernels.installer import installed

    found = installed()
    if session.as_json:
        return _report(session, found, "")
    rows = [[safe(text) for text in _cells(kernel)] for kernel in found]
    none = "None is installed. Install some with: gpu-pool kernels install 2% 10% 50% 1"
    screen.show(screen.table(_COLUMNS, rows) if rows else none)
    return 0


@verb("remove", "gpu-pool kernels remove python3-gpu-2pct", "gpu-pool kernels remove --all")
@click.argument("names", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Remove every kernel on a slice that Jupyter finds.")
@json_option
def remove(session: Session, names: tuple[str, ...], everything: bool) -> int:
    """Remove kernels on slices. The kernels they were built on stay."""
    from gpu_pool_kernels.installer import installed
    from gpu_pool_kernels.installer import remove as remove_kernels

    if bool(names) == everything:
        raise BadRequest("Which kernels?", "Name them (see gpu-pool kernels list), or give --all.")
    gone = remove_kernels([kernel.name for kernel in installed()] if everything else names)
    return _report(session, gone, "Removed {display_name!r} from {path}")


for _command in (install, list_, remove):
    kernels.add_command(_command)


def _report(session: Session, found: list[InstalledKernel], sentence: str) -> int:
    if session.as_json:
        keys = ("name", "display_name", "slice", "base", "path")
        screen.show_json({"kernels": [dict(zip(keys, _cells(kernel), strict=True)) for kernel in found]})
    else:
        for kernel in found:
            click.echo(sentence.format(display_name=safe(kernel.display_name), path=kernel.path))
    return 0


def _cells(kernel: InstalledKernel) -> tuple[str, str, str, str, str]:
    return kernel.name, kernel.display_name, kernel.slice, kernel.base, str(kernel.path)
