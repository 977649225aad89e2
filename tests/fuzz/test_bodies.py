"""What a service is sent, and what a client is answered: anything at all, and never an error of ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.corpus import kept
from gpu_pool_client import GpuPoolError
from gpu_pool_client._remote.bodies import error_of
from gpu_pool_client._remote.exchange import ask
from support.examples import examples
from support.service import ForkServer, Service

_ADDRESSES = [
    ("POST", "leases"), ("POST", "leases/1-00000000/attach"), ("POST", "leases/1-00000000/renew"),
    ("POST", "leases/1-00000000/resize"), ("POST", "leases/1-00000000/park"), ("POST", "devices/0/drain"),
    ("DELETE", "leases/1-00000000?reason="), ("GET", "leases/%00"), ("GET", "history?since=nan"),
    ("GET", "leases/1-00000000/wait?seconds=-1&last=x"), ("PUT", "leases"), ("GET", "nothing"),
]  # fmt: skip
_VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10),
        st.sampled_from(["2%", "1", "k", "x" * 200, "\0", 10**400, 1e308]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip
_FIELDS = st.sampled_from(
    [
        "request",
        "key",
        "course",
        "kernel",
        "process",
        "ready_within",
        "grace",
        "ttl",
        "drained",
        "pid",
        "start",
    ]
)
BODIES = st.one_of(
    st.binary(max_size=80),
    st.dictionaries(_FIELDS, _VALUES, max_size=6).map(lambda body: json.dumps(body).encode()),
    st.fixed_dictionaries(
        {"request": st.just("2%"), "key": st.just("k")}, optional={"course": _VALUES, "kernel": _VALUES}
    ).map(lambda body: json.dumps(body).encode()),
    st.just(b"[" * 20_000),
    st.just(b'{"request": "2%", "key": "' + b"k" * 20_000),
)


@pytest.fixture(scope="module")
def service(children: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder: Path = tmp_path_factory.mktemp("bodies")
    service = Service(children, folder)
    service.configure("c.ServeApp.max_decisions = c.ServeApp.max_requests = 1_000_000")
    asyncio.run(service.start())
    yield service
    asyncio.run(service.end(9))


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(address=st.sampled_from(_ADDRESSES), body=BODIES)
def test_no_body_makes_the_service_stumble(service: Service, address: tuple[str, str], body: bytes) -> None:
    method, path = address
    content = None if method == "GET" else body
    answer = asyncio.run(ask(service.socket, method, f"/api/v1/{path}", content, 60))
    assert answer.status < 500, answer.body
    if answer.status >= 400:
        json.loads(answer.body)
    assert "Traceback" not in service.log


@kept("bodies", lambda content: content)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.dictionaries(
            st.sampled_from(
                ["code", "message", "remedy", "status", "title", "detail", "reason", "largest_now"]
            ),
            _VALUES,
        ).map(lambda body: json.dumps(body).encode()),
    )
)
def test_no_answer_makes_a_client_stumble(body: bytes) -> None:
    error: Any = error_of(body)
    assert isinstance(error, GpuPoolError)
    assert len(str(error)) < 5_000
