"""Ports for the programs that tests start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jupyter_client.connect import port_names, write_connection_file

from gpu_pool_provisioner.ports import PortReservation

_KEPT: list[PortReservation] = []


def free_ports(number: int, address: str = "127.0.0.1") -> tuple[int, ...]:
    """Return ports of an address that no other process is given for as long as this one lives.

    They stay bound here; the program that is told to use them can bind them all
    the same, see :mod:`gpu_pool_provisioner.ports`.
    """
    _KEPT.append(PortReservation(address, number))
    return _KEPT[-1].ports


def free_port() -> int:
    """Return one such port."""
    return free_ports(1)[0]


def write_connection(path: Path, key: bytes = b"") -> tuple[str, dict[str, Any]]:
    """Write a kernel's connection file, with ports that nobody else is given; return its name and content."""
    ports = dict(zip(port_names, free_ports(len(port_names)), strict=True))
    name, info = write_connection_file(str(path), key=key, **ports)
    return name, dict(info)


def keepalive_of(port: int) -> list[float | None]:
    """Return of each end on this machine of a port's connections when it looks whether the other still is.

    In seconds from now; None for one that does not look, or has something else to do first.
    """
    found: list[float | None] = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, here, there, state, _, timer = line.split()[:6]
        if state == "01" and f":{port:04X}" in here + there:  # it is established
            kind, _, ticks = timer.partition(":")
            found.append(int(ticks, 16) / os.sysconf("SC_CLK_TCK") if kind == "02" else None)
    return found
