"""Ports for the programs that tests start."""

from __future__ import annotations

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
