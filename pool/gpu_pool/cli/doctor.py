"""``health`` and ``doctor``: whether the pool works, and what to do where it does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain

import click

from gpu_pool.cli import screen
from gpu_pool.cli.checks import Check, check_jupyter, check_machine, check_pool, check_store, is_served
from gpu_pool.cli.session import CommandSession, json_option, verb

_STYLES = {"ok": "green", "note": "yellow", "broken": "bold red"}


@verb("health", "gpu-pool health && echo all is well")
@json_option
def health(session: CommandSession) -> int:
    """Say in a few lines whether the pool works. Exit status 1 if it does not."""
    return _report(session, check_pool(session))


@verb("doctor", "gpu-pool doctor", "gpu-pool doctor --json", "gpu-pool doctor --kubernetes")
@click.option("--kubernetes", is_flag=True, help="Look at the cluster that KUBECONFIG names instead.")
@json_option
def doctor(session: CommandSession, kubernetes: bool) -> int:
    """Find what is broken, and what mends it.

    Looks at everything that a slice needs: Python and Jupyter, driver and
    GPUs, the store, the pool, the kernels. Exit status 1 if something is broken.
    """
    if kubernetes:
        from gpu_pool.cli.cluster import check_cluster

        return _report(session, check_cluster())
    # Imported here because health, which is asked often, does not need it.
    from gpu_pool.cli.isolation_checks import check_isolation

    pool = [*check_pool(session)]
    has_gpus = any(check.name == "devices" and check.state == "ok" for check in pool)
    machine = check_machine(is_client=is_served(session) and has_gpus)
    return _report(
        session, chain(check_jupyter(session), machine, check_isolation(), check_store(session), pool)
    )


def _report(session: CommandSession, checks: Iterable[Check]) -> int:
    found = list(checks)
    healthy = all(check.state != "broken" for check in found)
    if session.as_json:
        screen.show_json({"healthy": healthy, "checks": [asdict(check) for check in found]})
    else:
        _show(found)
    return 0 if healthy else 1


def _show(checks: list[Check]) -> None:
    from rich.text import Text

    out = screen.console()
    for check in checks:
        mark = Text(f"{check.state:<7}", _STYLES[check.state])
        out.print(Text.assemble(mark, f"{check.name}: {check.text}"))
        if check.mend:
            out.print(Text(f"       -> {check.mend}"))
