-- Since when a lease has had its slices, by this boot's clock, while held: for how long is told by that, since the
-- clock for people may be set meanwhile. NULL where they were granted before this was noted.
ALTER TABLE lease ADD COLUMN held_from REAL;
