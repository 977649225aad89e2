"""A process that has imported what a kernel needs, and becomes that kernel once it is told which one.

Run as ``python launch.py prepared SOCKET MODULE,MODULE IDLE PADDING``, for a kernel that must have a process
of its own from the start: one that may sleep on disk, which is in namespaces of its own.

It is asked as a template is (``template.py``), by the socket at which the server listens (``AF_UNIX``,
``SOCK_SEQPACKET``), to which it connects. What is different: it answers one question, with its own pid, has
the standard streams already, and ends with whoever has started it. It is as strict as a template in what may
not be left by an import (a thread, a child, an open file), and starts cold then.
"""

import gc
import os
import socket
import sys
from typing import Any

from .template import Template, names, run, send, tell_when_bound


class Prepared(Template):
    """A template that is its only kernel."""

    def outdated(self) -> "str | None":
        """Return what of its imports a new process would not have; the rest its server looks at."""
        return self.files.change()

    def fork(self) -> bool:
        """Tell the server that the kernel is this process."""
        send(self.control, {"pid": os.getpid()})
        return True

    def become_kernel(self, wanted: "dict[str, Any]", descriptors: "list[int]") -> None:
        """Be what a new process with this command would be."""
        channel = socket.socket(fileno=descriptors[0])
        self.control.close()
        if channel.recv(1) != b"1":
            os._exit(0)  # its server has started another one meanwhile, or has ended
        # Who starts a kernel in a namespace may add variables, such as Python's own of the language.
        self.look_as_wanted({**wanted, "env": {**self.given, **wanted["env"]}})
        gc.unfreeze()
        tell_when_bound(channel)


def main() -> None:
    """Import what the command line names, and be the kernel that is asked for."""
    launcher, _, path, modules, idle = sys.argv[:5]
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(path)
    argv = Prepared(control, names(modules), float(idle)).command_of_kernel()
    if argv is None:
        os._exit(0)
    run(argv, launcher)
