-- How a lease's kernel, in a pod, has ended by itself, the last time that one did: JSON of the
-- Failure value, or empty.
ALTER TABLE lease ADD COLUMN failure TEXT NOT NULL DEFAULT '';
ALTER TABLE history ADD COLUMN failure TEXT NOT NULL DEFAULT '';
