"""The verb ``launch``, and how a kernel begins, a new one or one from disk."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from .folders import LIVES, STATE, folder_of, remove_kernel, taken, write_said
from .keeping import sweep
from .processes import boot_id, kernel_of, namespace_of, start_of, verify
from .running import SUBREAPER, execute, in_namespaces, prctl
from .values import Call, Refusal

#: The kernel's parent: reaps what others leave behind, and goes to disk with it. What it has to start with is
#: open as 3, the kernel's output, and as 4, where it says that the kernel could not be run.
_REAPER = """
import os, signal, sys
kernel = os.fork()
if not kernel:
    try:
        os.setsid()
        os.set_inheritable(4, False)
        os.dup2(3, 1), os.dup2(3, 2), os.close(3)
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        os.write(4, f"{error.errno} {error.strerror}: {sys.argv[1]}".encode())
    finally:
        os._exit(127)
os.close(3), os.close(4)
while os.wait()[0] != kernel:
    pass
"""


def launch(call: Call, _: str) -> dict[str, object]:
    """Run a kernel that may sleep; return its ID, and its pid. Raises ``Refusal``."""
    argv, cwd, umask = (call.request.get(name) for name in ("argv", "cwd", "umask"))
    environment = call.request.get("env")
    texts = (
        [argv, list(environment) + list(environment.values())] if isinstance(environment, dict) else [None]
    )
    if not argv or not all(isinstance(each, list) and all(map(_is_text, each)) for each in texts):
        raise Refusal("argv must be a list of texts, and env an object of them, all without zero bytes")
    assert isinstance(environment, dict)
    if not isinstance(cwd, str) or "\0" in cwd or type(umask) is not int or not 0 <= umask <= 0o777:
        raise Refusal("cwd must be a path, and umask a number up to 511")
    folder = folder_of(call, make=True)
    sweep(call)
    kernel = os.urandom(16).hex()
    path = os.path.join(folder, kernel)
    os.mkdir(path, 0o700)

    def goes() -> None:
        prctl(SUBREAPER, 1)
        os.umask(umask)
        os.chdir(cwd)

    def starts(says: int) -> int:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            reaper = [sys.executable, "-I", "-S", "-c", _REAPER, *argv]
            execute(
                sys.executable,
                reaper,
                call.caller,
                (),
                {3: written, 4: says},
                environment=environment,
                start=goes,
            )
        return pid

    try:
        held = hold(path)
        output, written = os.pipe()
        return {"id": kernel, **begin(call, path, starts, output, written, held, "")}
    except BaseException:
        remove_kernel(path)
        raise


def _is_text(given: object) -> bool:
    return isinstance(given, str) and "\0" not in given


def hold(path: str) -> int:
    """Hold a kernel for as long as it lives. Raises ``Refusal`` where it does already."""
    held = taken(path, LIVES)
    if held is None:
        raise Refusal("it goes on already.")
    return held


def begin(
    call: Call, path: str, starts: Callable[[int], int], output: int, written: int, held: int, well: str
) -> dict[str, object]:
    """Run a kernel in namespaces of its own, which has begun once ``well`` is said; return what it is."""
    pipe = os.fstat(written).st_ino
    os.fchown(written, call.caller.uid, call.caller.gid)  # CRIU opens it once more, by /proc
    first, said = in_namespaces(starts, call.caller, output, written, held)
    try:
        if said != well:
            number, _, text = said.partition(" ")
            errno = int(number) if number.isdigit() else 0
            command = text.partition(": ")[2]  # of the kernel, where that is what could not be run
            raise Refusal(text or f"it ended with {said}.", errno=errno, command=command)  # noqa: TRY301 - as what follows
        kernel = kernel_of(first)
        verify(namespace_of(first), call.caller)
        run = {"first": first, "started": start_of(first), "boot": boot_id()}
        write_said(path, STATE, {"uid": call.caller.uid, "user": call.caller.name, "pipe": pipe, "run": run})
    except BaseException:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        raise
    return {"pid": kernel, "first": first, "started": run["started"]}
