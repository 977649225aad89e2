"""How fast the pool is, always as a ratio to something else measured in the same run.

``python -m benchmarks [name …]`` prints one table; ``make bench`` runs all of them.
Absolute figures depend on the machine and on its mood, so only ratios from one run
mean anything.
"""
