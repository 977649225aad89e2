-- No query goes through the queue by kind any more. The column lease.kind stays, without use:
-- SQLite 3.34 cannot drop one.
DROP INDEX lease_line_of_kind;
