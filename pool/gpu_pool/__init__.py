"""The pool: devices, decisions, the store, reclaim, and the command line.

Decisions (``policy``) are pure: they take values and return values, with no
I/O, no clock and no randomness. Effects (``store``, ``devices``,
``enforcement``) are at the edge. ``cli`` composes them.
"""
