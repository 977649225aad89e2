"""Ports for the programs that tests start."""

from __future__ import annotations

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
