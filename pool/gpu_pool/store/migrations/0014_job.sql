-- The jobs of a batch system in which a lease's kernels were, such as 'Slurm job 4711', in order and with commas; and
-- so of what has ended. Empty for none, and for what was submitted before this was noted.
ALTER TABLE lease ADD COLUMN job TEXT NOT NULL DEFAULT '';
ALTER TABLE history ADD COLUMN job TEXT NOT NULL DEFAULT '';
