"""The command line: one verb, one answer, and one line in the system's log."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import syslog
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module

from .callers import read_request, settings_for, who_calls
from .folders import ID, is_held, locked, remove_kernel
from .values import Call, Refusal, System

#: Each verb: where it is done, and whether it names a kernel. That is imported for this verb alone, so that
#: others begin earlier, and before anything is done.
_VERBS = {
    "check": ("criu.check", False),
    "launch": ("launch.launch", False),
    "dump": ("dump.dump", True),
    "restore": ("restore.restore", True),
    "note": ("keeping.note", True),
    "remove": ("keeping.remove_image", True),
    "list": ("keeping.list_kernels", False),
}


def perform(arguments: Sequence[str], system: System) -> int:
    """Do one thing for who calls, and say so; return 1 where it is refused, with the reason, and 0 else.

    Of a kernel that was launched or restored it returns once that has ended.
    """
    words, uid, folder = " ".join(arguments)[:80], "unknown", ""
    try:
        caller = who_calls()
        uid = str(caller.uid)
        do, kernel = _asked(arguments)
        request = read_request()
        call = Call(system, settings_for(system, caller, request), caller, request)
        folder = call.settings.folder
        answer = do(call, kernel)
    except (Refusal, OSError) as error:
        _audit(f"{words!a} for uid {uid}: refused")
        return _refuse(error, words, folder)
    kernel = kernel or str(answer.get("id", ""))
    _audit(f"{arguments[0]} {kernel} for uid {uid}: done")
    _say({"ok": True, **answer})
    if "first" in answer:  # it was launched or restored
        os.waitpid(int(str(answer["first"])), 0)
        path = os.path.join(call.settings.folder, kernel)
        with suppress(Refusal, OSError), locked(path):
            if not is_held(path) and not os.path.isdir(f"{path}/image"):
                remove_kernel(path)
    return 0


def _asked(arguments: Sequence[str]) -> tuple[Callable[[Call, str], dict[str, object]], str]:
    """Return what is to be done, and with which kernel; "" for none. Raises ``Refusal``."""
    verb, *rest = arguments or ("",)
    where, names_kernel = _VERBS.get(verb, ("", False))
    if not where or len(rest) != names_kernel:
        raise Refusal(f"accepted are {', '.join(_VERBS)}; dump, restore, note and remove with an ID")
    kernel = rest[0] if rest else ""
    if names_kernel and not ID.fullmatch(kernel):
        raise Refusal(f"{kernel[:60]!r} is no kernel's ID")
    module, _, name = where.partition(".")
    do: Callable[[Call, str], dict[str, object]] = getattr(import_module(f".{module}", __package__), name)
    return do, kernel


def _audit(line: str) -> None:
    syslog.openlog("gpu-pool-hibernation", syslog.LOG_PID, syslog.LOG_AUTHPRIV)
    syslog.syslog(line)


def _refuse(error: Refusal | OSError, words: str, folder: str) -> int:
    """Say why something is not done, in a sentence; return 1. Kernels sleep in ``folder``."""
    if isinstance(error, Refusal):
        _say({"ok": False, "error": str(error), **error.more})
    else:
        _say({"ok": False, "error": _in_words(error, words, folder), "errno": error.errno or 0})
    return 1


def _in_words(error: OSError, words: str, folder: str) -> str:
    """Return what the system has refused, as a sentence: where, and what to do about it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk with {folder}, where kernels sleep, is full: remove kernels there that nobody needs "
            "(gpu-pool hibernated), or have whoever administers this machine make room."
        )
    what = f": {error.filename}" if error.filename else ""
    return f"{words.partition(' ')[0]} was not done ({error.strerror or error}{what})."


def _say(answer: dict[str, object]) -> None:
    with suppress(OSError):  # whoever asked is gone
        os.write(1, json.dumps(answer).encode() + b"\n")
    os.close(1)


def main(arguments: Sequence[str] | None = None, system: System | None = None) -> int:
    """Do what the command line says; return the exit status."""
    # No terminal stops it, nor its first process: others' kernels wait for nobody's.
    with suppress(PermissionError):
        os.setsid()
    for each in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(each, lambda *_: None)
    return perform(sys.argv[1:] if arguments is None else arguments, system or System())
