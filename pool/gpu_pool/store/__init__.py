"""The durable record of leases: SQLite, and everything that is written to it.

``database`` opens the file and runs transactions; ``leases`` and ``requests`` hold the decisions,
each one transaction; ``lease_table`` and ``device_table`` turn rows into values.
"""
