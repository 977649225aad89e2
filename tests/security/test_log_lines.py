"""Nothing that somebody names or says forges a line of a log, hides one or moves a cursor."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_pool_client._log import EscapingFormatter, EscapingLogger, escaped, get_logger, quoted
from support.hub import ADMIN
from support.service import ForkServer
from support.stand_in_hub import behind_stand_in

#: A line as the service writes them.
FORGED = "2026-09-01 09:00:00,000 INFO: root[1]: drain GPU-0: done"
HOSTILE = (
    f"]\n{FORGED}",
    f"\r{FORGED}",
    f"\x1b[2K\x1b[1A{FORGED}",
    f"\u2028{FORGED}",
    "\x85\x0b\x0c\x1c\x1d\x1e",
    "\u202edeniarD",
    "\ud800",
    f"]: drain 0: done {'x' * 300}",
)
#: How each line of the service's log begins, and nothing else does.
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(,\d+)? [A-Z]+: ")


def test_only_what_can_be_shown_is_left() -> None:
    assert escaped("Zoë (λ): 2%") == "Zoë (λ): 2%"
    assert escaped("a\nb\r\x1b[0m\u202e\u00a0\ud800") == r"a\nb\r\x1b[0m\u202e\xa0\ud800"
    assert (quoted("ada"), quoted("ada@school.org"), quoted("zoë-2")) == ("ada", "ada@school.org", "zoë-2")
    assert quoted("x]: drain") == "'x]: drain'"
    assert quoted("") == "''"


@given(st.text())
def test_whatever_is_said_is_one_line(text: str) -> None:
    assert escaped(text).isprintable()
    assert quoted(text).isprintable()


@pytest.fixture
def written() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """A logger of another program, which writes as it likes."""
    stream = io.StringIO()
    logger, handler = logging.getLogger("somebody.else"), logging.StreamHandler(stream)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield logger, stream
    logger.removeHandler(handler)


@pytest.mark.parametrize("text", HOSTILE)
def test_in_the_log_of_another_program_it_is_one_line(
    written: tuple[logging.Logger, io.StringIO], text: str
) -> None:
    logger, stream = written
    log = EscapingLogger(logger)
    log.info("It said: %s", text)
    log.error("It said: %s", ValueError(text))
    log.warning(text)
    assert len(stream.getvalue().splitlines()) == 3
    assert stream.getvalue().replace("\n", "").isprintable()


@pytest.mark.parametrize("text", HOSTILE)
def test_no_line_of_a_traceback_looks_like_one_of_the_log(
    written: tuple[logging.Logger, io.StringIO], text: str
) -> None:
    logger, stream = written
    error = ValueError(text)
    EscapingLogger(logger).error("It failed", exc_info=error)
    EscapingLogger(logger).error("It failed", exc_info=(type(error), error, None))
    logger.handlers[0].setFormatter(EscapingFormatter("%(message)s"))
    logger.error("It failed", exc_info=error)
    lines = stream.getvalue().splitlines()
    assert lines.count("It failed") == 3
    assert all(line == "It failed" or line.startswith("  ") for line in lines)
    assert all(line.isprintable() for line in lines)


def test_the_program_that_we_are_a_part_of_has_our_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        log = get_logger()
        log.logger.addHandler(caplog.handler)
        log.warning("%s of %d", "a\nb", 2)
        log.logger.removeHandler(caplog.handler)
    assert caplog.records[-1].getMessage() == r"a\nb of 2"


async def test_no_name_forges_a_line_of_the_service_s(children: ForkServer, open_folder: Path) -> None:
    """As the Hub of JupyterHub 5.4 lets anybody call their servers."""
    async with behind_stand_in(children, open_folder / "pool") as (hub, service):
        for number, name in enumerate(HOSTILE[:-2]):
            token = f"token-{number}"
            scopes = ["access:services!service=gpu-pool", f"access:servers!server=eve/{name}"]
            user = {"name": "eve", "kind": "user", "admin": False, "groups": [], "scopes": scopes}
            hub.answers[token] = json.dumps(user).encode()
            lease = (await service.take(token, key=f"key-{number}"))["id"]
            assert (await service.ask(token, "DELETE", f"/leases/{quote(lease)}"))[0] == 200
            # What is refused is logged, too, and what nobody knows.
            for path in ("/leases/1-x%0A" + quote(FORGED), "/" + quote(name, errors="replace")):
                await service.ask(token, "GET", path)
            await service.ask(token, "POST", "/leases", {"request": name, "key": "a"})
            await service.ask(token, "POST", "/leases", {"request": "2%", "key": "a", "course": name})
        hub.users["admin"], hub.admins = ADMIN, {ADMIN}
        for name in HOSTILE[:-2]:
            await service.ask("admin", "POST", f"/devices/{quote(name, safe='')}/drain", {"drained": True})
        lines = service.service.log.splitlines()
    said = [line for line in lines if LINE.match(line)]
    assert all(line.isprintable() for line in lines)
    assert not any(line.partition(": ")[2].startswith("root[1]") for line in said)
    assert any("request 2%" in line and "eve[hub:" in line for line in said)
    assert lines == [line for line in lines if LINE.match(line) or line.startswith("  ")]
