"""Services that everybody on the machine may ask."""

from __future__ import annotations

from support.service import children, open_folder, pool, service

__all__ = ["children", "open_folder", "pool", "service"]
