"""Services that everybody on the machine may ask."""

from __future__ import annotations

from support.service import open_folder, pool, service

__all__ = ["open_folder", "pool", "service"]
