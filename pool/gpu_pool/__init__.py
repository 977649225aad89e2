"""The pool: inventory, admission, the store, reclaim, and the command line.

Decisions (``placement``, ``admission``, ``queueing``) are pure: they take
values and return values, with no I/O, no clock and no randomness. Effects
(``store``, ``inventory``) are at the edge. ``cli`` composes them.
"""
