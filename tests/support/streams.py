"""Connections of asyncio that tests open, and close."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def closing(writer: asyncio.StreamWriter) -> AsyncIterator[asyncio.StreamWriter]:
    """Close a connection in the end, and wait until it is closed.

    One that is left to the garbage collector warns in whatever test runs then.
    """
    try:
        yield writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
