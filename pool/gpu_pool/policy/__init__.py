"""Who is granted what: pure functions of values, without I/O, clock or randomness."""
