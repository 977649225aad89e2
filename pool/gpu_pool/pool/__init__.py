"""The pool: every rule about leases, and the loop that makes them true."""
