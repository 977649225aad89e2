"""A local provisioner that reserves its kernel's ports, see :mod:`gpu_pool_provisioner.ports`."""

from __future__ import annotations

from typing import Any

from jupyter_client.connect import port_names
from jupyter_client.localinterfaces import is_local_ip
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from gpu_pool_provisioner.ports import SUPPORTED, PortReservation


class ReservingProvisioner(LocalProvisioner):
    """The stock provisioner, with ports that nobody else is given meanwhile."""

    _ports: PortReservation | None = None

    @property
    def _manager(self) -> Any:
        """The kernel manager. jupyter_client gives every provisioner one."""
        return self.parent

    def _reserve_ports(self) -> None:
        """Choose the kernel's ports where the stock provisioner would, and keep them reserved."""
        manager = self._manager
        theirs = manager.transport != "tcp" or not manager.cache_ports or not is_local_ip(manager.ip)
        if theirs or not SUPPORTED or (self._ports and 0 not in manager.ports):
            return
        self._close_ports()
        manager.cleanup_connection_file()  # of a start that failed, with other ports in it
        self._ports = PortReservation(manager.ip, len(port_names))
        for name, port in zip(port_names, self._ports.ports, strict=True):
            setattr(manager, name, port)
        self.ports_cached = True

    def _close_ports(self) -> None:
        if self._ports is not None:
            self._ports.close()
            self._ports = None
            self.ports_cached = False
