"""Imports modules as a template does, and tells which of them keeps kernels from being forked.

Run as ``python launch.py trial CONTROL MODULE,MODULE``, where ``CONTROL`` is as for ``template.py``::

    → {"failed": why}, or {"ready": [MODULE, ...]}

A template looks only after each of its own modules what is there now: this one does after each that those
import, which takes longer.
"""

import os
import socket
import sys

from . import template
from .importing import EveryImport, names_in


class Trial(template.Template):
    """A template that looks after every import, and forks nothing."""

    #: How many threads there were after the last import.
    _threads = 1

    def after_import(self, module: str) -> None:
        """Take note of what is there now that this module was imported."""
        self.first_seen.note(module, lambda: self.doubt_at_once([]))
        threads = len(names_in("/proc/self/task"))
        if threads > self._threads:
            self.first_seen.note(module, self.doubt_of_threads)
        self._threads = threads


def main() -> None:
    """Import what the command line names, tell what came of it, and end."""
    _, _, control, modules = sys.argv[:4]
    template.end_with_server()
    tried = Trial(socket.socket(fileno=int(control)), template.names(modules), 0.0)
    with EveryImport(tried.after_import).watched():
        tried.import_kernel()
        failed = tried.prepare()
    tried.tell(failed)
    os._exit(0)
