"""What goes wrong is told in one or two plain lines, with an exit status of its own."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from gpu_pool.cli import main

NONSENSE = [
    ["no-such-verb"],
    ["--no-such-option"],
    ["list", "--no-such-option"],
    ["list", "extra"],
    ["run"],
    ["run", "2%"],
    ["run", "2%", "--timeout", "soon", "--", "true"],
    ["run", "2%", "--timeout", "-1", "--", "true"],
    ["run", "2%", "--timeout", "nan", "--", "true"],
    ["run", "0", "--", "true"],
    ["run", "101%", "--", "true"],
    ["run", "", "--", "true"],
    ["run", "२%", "--", "true"],
    ["request", "2%%"],
    ["request", "\x1b[31m"],
    ["request", "x" * 100_000],
    ["request", "2%", "--keeper", "0"],
    ["request", "2%", "--keeper", "99999999999999999999"],
    ["release", "abc", "--all-mine"],
    ["exec"],
    ["kernels"],
    ["kernels", "install"],
    ["kernels", "install", "nonsense"],
    ["kernels", "install", "2%", "--user", "--sys-prefix"],
    ["kernels", "install", "2%", "--base", "no-such-kernel"],
    ["kernels", "remove"],
    ["kernels", "remove", "no-such-kernel"],
    ["--pool", "nonsense", "list"],
    ["list", "--pool", "embedded:?query"],
]


@pytest.mark.parametrize("words", NONSENSE, ids=lambda words: " ".join(words)[:40])
def test_nonsense_is_refused_in_words(terminal, capfd, words):
    assert main(words) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("gpu-pool: ")
    assert "Traceback" not in said.err
    assert "\x1b" not in said.err
    assert len(said.err) < 2_500


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "2%", "--timeout", "2x", "--", "true"], "'2x' is not a duration. Accepted: 90s, 15min, 2h,"),
        (["request", "2%", "--timeout", "400d"], "'400d' is more than a year. Accepted: up to 365d."),
        (["courses", "check", "--stay", "long"], "'long' is not a duration. Accepted: 90s, 15min, 2h,"),
        (["simulate", "--drain-after", "never"], "or a number of minutes."),
        (["history", "--since", "ever"], "'ever' is not a duration.\nAccepted: 90s, 15min, 2h,"),
    ],
)
def test_a_time_that_is_none_is_refused_with_what_is_accepted(terminal, capfd, words, said):
    assert main(words) == 2
    assert said in capfd.readouterr().err


def test_an_unusable_store_is_told_in_words(terminal):
    (terminal.folder / "file").write_text("")
    for url in (f"embedded:{terminal.folder}/file/store.db", f"embedded:{terminal.folder}/file"):
        done = terminal.run("list", "--pool", url)
        assert done.returncode == 7
        assert done.stderr.startswith("gpu-pool: The ")
        assert "Traceback" not in done.stderr
    assert (terminal.folder / "file").read_text() == ""


def test_debug_shows_the_traceback_before_or_after_the_verb(terminal):
    for words in (["--debug", "release", "nothing"], ["release", "nothing", "--debug"]):
        done = terminal.run(*words)
        assert done.returncode == 8
        assert "Traceback" in done.stderr
        assert "gpu-pool: " in done.stderr


def test_an_unexpected_error_is_one_line(terminal):
    # A directory in the place of the module that the verb needs.
    (terminal.folder / "rich").mkdir()
    (terminal.folder / "rich" / "__init__.py").write_text("")
    done = terminal.run("list", env={"PYTHONPATH": str(terminal.folder)})
    assert done.returncode == 1
    assert done.stderr.startswith("gpu-pool: unexpected ModuleNotFoundError: ")
    assert done.stderr.endswith("Run again with --debug.\n")
    assert done.stderr.count("\n") == 1


def test_errors_follow_json(terminal):
    terminal.hold("98%")
    done = terminal.run("request", "3%", "--no-wait", "--json")
    assert (done.returncode, done.stdout) == (6, "")
    error = json.loads(done.stderr)["error"]
    assert set(error) == {"code", "message", "remedy", "largest_now"}
    assert (error["code"], error["largest_now"]) == ("timed-out", "2%")


def test_the_program_is_quick_to_help():
    """What help needs is loaded, and not what only tables, kernels or drivers need."""
    code = """
import contextlib, io, sys
from gpu_pool.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    main(["--help"])
print([name for name in ("rich", "pynvml", "jupyter_client", "zmq") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_script_and_the_module_are_one_program(terminal):
    script = terminal.call(str(Path(sys.executable).parent / "gpu-pool"), "--version")
    assert script.stdout == terminal.run("--version").stdout
    assert script.stdout.startswith("gpu-pool, version ")


def test_a_process_without_file_descriptors_says_so(terminal):
    assert terminal.is_empty()
    # Each needs some for itself; what is left is not enough for the store.
    for most in range(10, 40):
        done = terminal.call("bash", "-c", f"ulimit -n {most}; exec gpu-pool list")
        if "store" in done.stderr:
            break
    assert done.returncode == 7
    assert f"has as many files open as it may ({most})" in done.stderr
    assert "ulimit -n" in done.stderr


def test_a_newer_store_is_told_to_whoever_lists_it(terminal):
    assert terminal.is_empty()
    with closing(sqlite3.connect(terminal.folder / "pool" / "store.db")) as store:
        store.execute("PRAGMA user_version = 99")
    for verb in ("list", "doctor"):
        done = terminal.run(verb)
        assert "written by a newer jupyter-gpu-pool" in done.stdout + done.stderr
        assert "Upgrade jupyter-gpu-pool here too" in done.stdout + done.stderr
