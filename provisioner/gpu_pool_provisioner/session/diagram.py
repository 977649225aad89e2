"""Draws the table of a session: ``python -m gpu_pool_provisioner.session.diagram``."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_pool_provisioner.session.session import State
from gpu_pool_provisioner.session.table import TABLE


def diagram() -> str:
    """Return each state with the events that change it and the states to which they may lead, as text.

    Events that change no state are left out.
    """
    return "\n\n".join("\n".join(_of(state)) for state in State)


def _of(state: State) -> Iterator[str]:
    yield state.value
    leads = {
        event.__name__: [to for to in rule.to if to is not state] for event, rule in TABLE[state].items()
    }
    wide = max(map(len, leads))
    for name, to in sorted(leads.items()):
        if to:
            yield f"   {name.ljust(wide)} -> {' | '.join(each.value for each in to)}"


if __name__ == "__main__":
    print(diagram())
