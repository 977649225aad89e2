"""Whatever the description of the API allows, and much that it does not, is answered as it says."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from support.hub import ADMIN, Hub, serving_hub
from support.service import ForkServer

_PROGRAM = shutil.which("st")
_CHECKS = "not_a_server_error,ignored_auth,content_type_conformance,response_schema_conformance"


@pytest.mark.long
@pytest.mark.skipif(_PROGRAM is None, reason="schemathesis is not installed")
@pytest.mark.parametrize("user", ["ada", ADMIN])
async def test_no_request_makes_an_error_or_does_something_for_nobody(
    children: ForkServer, hub: Hub, folder: Path, user: str
) -> None:
    # A stream that goes on for ten minutes is no answer to wait for.
    settings = "c.ServeApp.max_decisions = c.ServeApp.max_requests = 1_000_000"
    async with serving_hub(children, hub, folder / "pool", settings) as behind:
        command = [str(_PROGRAM), "run", f"{behind.url}/api/v1/openapi.json", "--checks", _CHECKS]
        command += ["-H", f"Authorization: Bearer {await hub.token(user)}", "--max-examples", "40"]
        ran = await asyncio.to_thread(subprocess.run, command, cwd=folder, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout
        assert "Traceback" not in behind.service.log
