"""The durable record of leases: SQLite, and everything that is written to it.

``database`` opens the file and runs transactions; ``book`` holds the decisions,
each one transaction; ``records`` turns rows into values.
"""
