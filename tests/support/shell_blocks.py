"""The commands on a page of the documentation, and a shell in which they are typed.

A block of ``console`` is typed unless its first line says otherwise. What may follow the language there, for
tests alone (no reader sees it)::

    not run: WHY           it cannot be run by a test, or must not be
    run by PATH            the file or folder of what runs it
    needs PROGRAM          it is left out where that program is not installed
    with SITUATION         something has happened before: see ``SITUATIONS`` of the test
    goes on                its command does not end by itself; it runs until the end of the page

Several are separated by commas. A block of any language with ``file PATH`` is a file that the reader has
written.

What a page shows of a command's output is all that it prints. In it, ``…`` stands for anything; the id of a
lease, a point in time or a duration for any other; 4711 for a process, and ada for whoever types. How many
spaces there are does not matter. Without output on the page, the command must succeed. Later on a page, the
id of a lease stands for what it stood for before.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
LANGUAGES = ("console", "sh", "bash", "shell", "shell-session")
_MARKS = ("needs", "with")
#: What is printed once a command has ended, with its exit status.
_END = "-- the command has ended: "
_LEASE = r"\b\d+-[0-9a-f]{8}\b"
_DURATION = r"\b(?:\d+(?:\.\d+)?(?:ms|s|min|h|d))+\b"
_MOMENT = r"(?:\d{4}-)?\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d+)?)?)?(?:[+-]\d\d:\d\d)?"
_VARYING = re.compile(
    rf"(?P<lines>^…(?:\n|\Z))|(?P<anything>…)|(?P<lease>{_LEASE})|(?P<duration>{_DURATION})|(?P<spaces> +)"
    rf"|(?P<process>\b4711\b)|(?P<moment>{_MOMENT})",
    re.MULTILINE,
)
_PATTERNS = {
    "lines": r"(?:.*?\n)?",
    "anything": ".*?",
    "spaces": " +",
    "duration": _DURATION,
    "process": r"\d+",
}


@dataclass(frozen=True)
class Block:
    """A block of commands on a page, with what they print there."""

    page: str
    line: int
    language: str
    #: What follows the language.
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_typed(self) -> bool:
        """Whether it is for this test to run."""
        return not self.mark.startswith(("not run", "run by"))

    @property
    def file(self) -> str:
        """The file that it is, if it is one."""
        return self.mark.removeprefix("file ") if self.mark.startswith("file ") else ""

    @property
    def goes_on(self) -> bool:
        """Whether its command does not end by itself."""
        return "goes on" in self.mark.split(", ")

    def named(self, kind: str) -> list[str]:
        """Return what is named after ``needs`` or ``with``."""
        return [each.partition(" ")[2] for each in self.mark.split(", ") if each.startswith(f"{kind} ")]

    def wrong(self) -> str:
        """Return what is wrong with the mark, in words; nothing if it is as it should be."""
        if self.file:
            return ""
        if self.language != "console":
            return f"write console in place of {self.language}"
        if self.mark.startswith("not run"):
            return "" if re.match(r"not run: \w", self.mark) else "why is it not run?"
        if self.mark.startswith("run by"):
            path = self.mark.removeprefix("run by ")
            return "" if (ROOT / path).exists() else f"there is no {path}"
        marks = [each for each in self.mark.split(", ") if each and each != "goes on"]
        unknown = [each for each in marks if each.partition(" ")[0] not in _MARKS]
        return f"unknown: {unknown}" if unknown else ""

    def commands(self) -> Iterator[tuple[str, str]]:
        """Yield each command with what is shown of its output."""
        for each in re.split(r"^[$#] ", self.text, flags=re.MULTILINE)[1:]:
            lines = each.splitlines()
            count = 1 + next(n for n, line in enumerate(lines) if not line.endswith("\\"))
            document = re.search(r"<< '(\w+)'", lines[0])
            if document:
                count = 1 + lines.index(document[1])
            yield "\n".join(lines[:count]), "\n".join(lines[count:]).strip("\n")


def pages() -> list[str]:
    """Return the pages, by their paths in the repository."""
    found = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    return sorted(str(page.relative_to(ROOT)) for page in found if page.name != "CHANGELOG.md")


def blocks(page: str) -> list[Block]:
    """Return the blocks of commands on a page."""
    return list(_blocks(page, (ROOT / page).read_text()))


def _blocks(page: str, text: str) -> Iterator[Block]:
    for token in MarkdownIt().parse(text):
        language, _, mark = token.info.strip().partition(" ")
        if token.type in ("fence", "code_block") and token.map is not None:
            typed = language in LANGUAGES or re.search(r"^\$ ", token.content, re.MULTILINE)
            if typed or mark.startswith("file "):
                yield Block(page, token.map[0] + 1, language, mark, token.content)


class Shell:
    """A shell, and somebody who types."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            text=True,
            start_new_session=True,
        )
        #: Ids of leases on the page, and those that they stand for.
        self._leases: dict[str, str] = {}

    def follow(self, block: Block) -> None:
        """Type what a block says; fail if it prints something else than is shown."""
        if block.file:
            path = Path(self._here(block.file) if block.file.startswith("/") else self._folder / block.file)
            path.write_text(self._here(block.text))
            return
        for command, shown in block.commands():
            typed = self._here(command)
            if block.goes_on:
                self._start(block, typed, shown)
                continue
            printed, status = self.type(typed)
            if shown:
                said = f"{block}: {command}\n--- the page shows\n{shown}\n--- it prints\n{printed}"
                assert self._is_as_shown(printed, shown), said
            else:
                assert status == 0, f"{block}: {command}\nexit status {status}: {printed}"

    def type(self, command: str) -> tuple[str, int]:
        """Type a command; return what it printed, and its exit status."""
        self._write(f"eval {shlex.quote(command)} < /dev/null")
        self._write(f'status=$?; printf "\\n{_END}%s\\n" $status; (exit $status)')
        lines: list[str] = []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_END):
                return self._there("".join(lines)), int(line.removeprefix(_END))
            lines.append(line)
        raise AssertionError(f"{command}: the shell has ended: {lines}")

    def close(self) -> None:
        """End the shell and whatever was started in it."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _start(self, block: Block, command: str, shown: str) -> None:
        """Start what does not end by itself; wait until it has printed what is shown."""
        log = self._folder / f"line-{block.line}.log"
        self._write(f"({command}) < /dev/null > {shlex.quote(str(log))} 2>&1 &")
        deadline = time.monotonic() + 60
        while not (log.exists() and self._is_as_shown(self._there(log.read_text()), f"{shown}\n…")):
            said = f"{block}: {command}\n--- the page shows\n{shown}\n--- it prints\n"
            assert time.monotonic() < deadline, said + (self._there(log.read_text()) if log.exists() else "")
            time.sleep(0.05)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _is_as_shown(self, printed: str, shown: str) -> bool:
        """Whether what was printed is what is shown; if so, remember which leases it is about."""
        pattern = "".join(self._pattern(shown))
        text = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines()) + "\n"
        found = re.fullmatch(pattern + r"\s*", text, re.DOTALL)
        for name, value in (found.groupdict() if found else {}).items():
            self._leases[name.removeprefix("lease_").replace("_", "-")] = value
        return found is not None

    def _pattern(self, shown: str) -> Iterator[str]:
        at, seen = 0, set()
        for found in _VARYING.finditer(shown):
            yield re.escape(shown[at : found.start()])
            at, text = found.end(), found[0]
            group = f"lease_{text.replace('-', '_')}"
            if found["lease"] and text in self._leases:
                yield re.escape(self._leases[text])
            elif found["lease"]:
                yield f"(?P={group})" if text in seen else f"(?P<{group}>{_LEASE})"
                seen.add(text)
            elif found["moment"]:
                yield re.sub(r"\d", r"\\d", re.escape(text))
            else:
                yield _PATTERNS[found.lastgroup or ""]
        yield re.escape(shown[at:])

    def _here(self, command: str) -> str:
        """Return a command of the page as it is typed here."""
        for lease, real in self._leases.items():
            command = command.replace(lease, real)
        for there in _MACHINE:
            command = command.replace(there, f"{self._folder}{there}")
        # Alone, it is root's service of the whole machine.
        return re.sub(r"\bunix:(?=\s|$)", f"unix:{self._folder}/run/gpu-pool/gpu-pool.sock", command)

    def _there(self, printed: str) -> str:
        """Return what was printed as it would be on the machine of the page."""
        for there in _MACHINE:
            printed = printed.replace(f"{self._folder}{there}", there)
        return re.sub(rf"\b{_USER}\b", "ada", printed.replace(str(self._folder), "/home/ada"))


_USER = re.escape(getpass.getuser())
#: Folders of the whole machine, in whose place those of a test stand.
_MACHINE = ("/etc/gpu-pool", "/run/gpu-pool", "/var/lib/gpu-pool")


def missing(block: Block) -> list[str]:
    """Return the programs that a block needs and that are not installed."""
    return [name for name in block.named("needs") if shutil.which(name) is None]
