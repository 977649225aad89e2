"""``report``, in real processes."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpu_pool_client import Holder, connect, parse_request
from support.terminal import Terminal, eventually


def test_a_table_with_a_total(terminal: Terminal) -> None:
    assert terminal.run("report").stdout == "No lease has ended in this time, and none is held or parked.\n"
    terminal.free(terminal.hold("50%"))
    terminal.hold("10%")
    lines = terminal.run("report").stdout.splitlines()
    assert lines[0].split()[:4] == ["User", "GPU-hours", "Lent", "On"]
    assert lines[1].split()[:6] == ["somebody", "0.00", "0.00", "-", "2", "1"]
    assert lines[2].split()[:6] == ["total", "0.00", "0.00", "-", "2", "1"]
    assert "living 1, released 1" in lines[1]
    assert lines[-1] == "1 lease that has not ended is counted up to now, without memory and wait."


def test_json_by_day(terminal: Terminal) -> None:
    terminal.free(terminal.hold("50%"))
    found = json.loads(terminal.run("report", "--by", "day", "--since", "1h", "--json").stdout)
    (row,) = found["rows"]
    assert row["day"] == time.strftime("%Y-%m-%d")
    assert (row["leases"], row["measured"], row["peak_mib"], row["reasons"]) == (1, 0, None, {"released": 1})
    assert {**row, "day": None} == {**found["total"], "day": None}
    assert (found["by"], found["living"]) == ("day", 0)
    assert json.loads(terminal.run("report", "--format", "json").stdout)["by"] == "user"


async def test_csv_is_safe_for_spreadsheets(terminal: Terminal) -> None:
    async with connect(terminal.environment["GPU_POOL_URL"]) as pool:
        for name in ('=HYPERLINK("http://x")', "@x", "+1", "-1", "ml, 101"):
            await pool.release((await pool.request(parse_request("2%"), Holder(name), name[:1])).id)
    text = terminal.run("report", "--format", "csv").stdout
    found = list(csv.DictReader(io.StringIO(text)))
    assert found[-1]["user"] == "total"
    assert int(found[-1]["leases"]) == 5
    assert {"'@x", "'+1", "'-1", "ml, 101"} < {row["user"] for row in found}
    assert not [row["user"] for row in found if row["user"][:1] in "=+-@"]


def test_a_period(terminal: Terminal) -> None:
    terminal.free(terminal.hold("50%"))
    terminal.hold("2%")
    leases = ["report", "--json"]
    for words, count in (
        (["--since", "2000-01-01", "--until", "2001-01-01"], 0),
        (["--since", "2000-01-01T12:30"], 2),
        (["--since", "1h", "--until", "0"], 1),
    ):
        assert json.loads(terminal.run(*leases, *words).stdout)["total"]["leases"] == count


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--since", "autumn"], "'autumn' is not a valid time.\nAccepted: a time ago (12h, 7d), a day"),
        (["--since", "2026-13-01"], "'2026-13-01' is not a valid time."),
        (["--since", "0001-01-01"], "'0001-01-01' is not a valid time."),
        (["--since", "1h", "--until", "2h"], "--until 2h is before --since 1h."),
        (["--since", "2999-01-01"], "Now is before --since 2999-01-01."),
        (["--by", "colour"], "'colour' is not one of"),
    ],
)
def test_a_wrong_period_is_told_in_words(terminal: Terminal, words: list[str], said: str) -> None:
    done = terminal.run("report", *words)
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert said in done.stderr


class TestPlot:
    def test_what_was_held_is_drawn_and_named(self, terminal: Terminal, tmp_path: Path) -> None:
        terminal.free(terminal.hold("50%"))
        terminal.hold("10%")
        picture = tmp_path / "use.svg"
        done = terminal.run("report", "--since", "1h", "--plot", str(picture))
        assert "total" in done.stdout
        drawn = ElementTree.parse(picture)
        texts = [each.text or "" for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
        assert any(each.startswith("GPUs in use by user, ") for each in texts)
        assert {"GPUs", "somebody"} <= set(texts)
        bars = [each for each in drawn.iter("{http://www.w3.org/2000/svg}rect") if each.get("y") is not None]
        assert len(bars) > 1  # the legend's, and what was held

    def test_memory_on_top_is_drawn_below(self, terminal: Terminal, tmp_path: Path) -> None:
        on_top = "GiB that could be used on top of what was granted"
        plain = terminal.hold("50%")
        assert on_top not in self.drawn(terminal, tmp_path / "plain.svg")
        terminal.free(plain)
        # Whoever holds a slice and lives keeps the pool in order.
        holds = terminal.start("run", "2%..10%", "--", "sleep", "600")
        eventually(lambda: on_top in self.drawn(terminal, tmp_path / "use.svg"))
        holds.terminate()
        holds.communicate()
        ended = [json.loads(line) for line in terminal.run("history", "--json").stdout.splitlines()]
        on_tops = {each["request"]: each["burst_peak_mib"] for each in ended if each["burst_mib_seconds"] > 0}
        assert on_tops == {"2%..10%": 3276 - 655}
        assert re.fullmatch(r"\d\.\d\d", terminal.run("report").stdout.splitlines()[-1].split()[3])

    @staticmethod
    def drawn(terminal: Terminal, picture: Path) -> str:
        assert terminal.run("report", "--since", "1h", "--plot", str(picture)).returncode == 0
        ElementTree.parse(picture)
        return picture.read_text()

    def test_nothing_held_is_an_empty_picture(self, terminal: Terminal, tmp_path: Path) -> None:
        picture = tmp_path / "use.svg"
        assert terminal.run("report", "--since", "0", "--plot", str(picture)).returncode == 0
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")

    def test_where_nothing_can_be_written_it_is_said(self, terminal: Terminal, tmp_path: Path) -> None:
        done = terminal.run("report", "--plot", str(tmp_path / "missing" / "use.svg"))
        assert done.returncode == 2
        assert "cannot be written: No such file or directory." in done.stderr
        assert "Traceback" not in done.stderr
