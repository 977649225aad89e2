"""The API is as its description says."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from jsonschema import Draft4Validator

from gpu_pool_client import Holder, parse_request
from gpu_pool_provisioner.server import handlers
from support.jupyter_env import JupyterEnv
from support.server import TOKEN
from support.slice_pages import PagesServer

DESCRIPTION = files("gpu_pool_provisioner.server") / "openapi.yaml"
_PROGRAM = shutil.which("st")
_CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance"


def described() -> dict[str, Any]:
    return yaml.safe_load(DESCRIPTION.read_text())  # type: ignore[no-any-return]


def conforms(name: str, answer: Any) -> None:
    """Fail if an answer is not as a schema of the description says."""
    text = json.dumps(described()["components"]["schemas"])
    # What OpenAPI 3.0 says of null, as JSON Schema says it.
    schemas = _nullable(json.loads(text.replace("#/components/schemas/", "#/definitions/")))
    Draft4Validator({**schemas[name], "definitions": schemas}).validate(answer)


def _nullable(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_nullable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _nullable(value) for key, value in schema.items() if key != "nullable"}
    return {**plain, "type": [plain["type"], "null"]} if schema.get("nullable") is True else plain


def test_the_description_names_all_addresses_and_their_methods() -> None:
    added: list[Any] = []
    app = SimpleNamespace(settings={"base_url": "/"}, add_handlers=lambda _, rules: added.extend(rules))
    handlers.add_handlers(SimpleNamespace(web_app=app))
    served = {}
    for pattern, handler, _ in added:
        actions = re.search(r"\(\?P<action>(.*)\)", pattern)
        path = re.sub(r"\(\?P<kernel_id>.*?\)", "{kernel_id}", pattern)
        for action in actions.group(1).split("|") if actions else [""]:
            own = {each for each in ("get", "post", "put", "patch", "delete") if each in vars(handler)}
            served[re.sub(r"\(\?P<action>.*\)", action, path)] = own
    assert served == {path: set(what) - {"parameters"} for path, what in described()["paths"].items()}


@pytest.mark.long
async def test_answers_are_as_described(jupyter_env: JupyterEnv, pages: PagesServer) -> None:
    conforms("State", await pages.state())
    offers = json.loads((await pages.ask("GET", "gpu-pool/api/offers")).body)
    assert offers == {"kernels": {}, "message": ""}
    two, all_ = jupyter_env.install("two"), jupyter_env.install("all", "1")
    jupyter_env.install("memory", "1GiB")
    jupyter_env.install("eight", "8")
    jupyter_env.install("plain", "2%", pool_url="unix:/nowhere/pool.sock")
    async with pages.page() as page:
        kernel_id = await pages.start("one.ipynb", two)
        await pages.start("two.ipynb", all_)
        await page.sees_slice(state="held")
        await page.sees_slice(state="waiting", position=1)
        for state in page.states:
            conforms("State", state)
    jupyter_env.install("later", "1", batch=True)
    await jupyter_env.pool.request(parse_request("1"), Holder("grader", batch=True), "grader")
    offers = json.loads((await pages.ask("GET", "gpu-pool/api/offers")).body)
    conforms("Offers", offers)
    kernels = offers["kernels"]
    assert sorted(kernels) == ["all", "eight", "later", "memory", "plain", "two"]
    assert (kernels["two"]["free_now"], kernels["two"]["milli"]) == (49, 20)
    assert (kernels["all"]["free_now"], kernels["all"]["position"]) == (0, 2)
    assert kernels["later"]["position"] == 3  # batch work comes after all that is not
    assert (kernels["memory"]["memory_mib"], kernels["memory"]["milli"]) == (1024, 32)
    assert "this pool has one" in kernels["eight"]["message"]
    assert "does not answer" in offers["message"] or "gpu-pool serve" in offers["message"]
    assert kernels["plain"]["free_now"] is None
    answer = await pages.ask("GET", f"gpu-pool/api/slices/{kernel_id}/memory")
    conforms("Memory", json.loads(answer.body))
    conforms("Message", await pages.done(kernel_id, "keep", seconds=60))
    conforms("Resized", await pages.done(kernel_id, "resize", size="4%"))
    conforms("Error", json.loads((await pages.post(kernel_id, "leave-queue")).body))


@pytest.mark.long
@pytest.mark.skipif(_PROGRAM is None, reason="schemathesis is not installed")
async def test_no_request_makes_an_error(jupyter_env: JupyterEnv, pages: PagesServer, tmp_path: Path) -> None:
    await pages.start("one.ipynb", jupyter_env.install("two"))
    command = [str(_PROGRAM), "run", str(DESCRIPTION), "--url", pages.url.rstrip("/"), "--checks", _CHECKS]
    command += ["-H", f"Authorization: token {TOKEN}", "--max-examples", "20"]
    command += ["--exclude-path", "/gpu-pool/api/events"]
    ran = await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    assert "Traceback" not in pages.log
