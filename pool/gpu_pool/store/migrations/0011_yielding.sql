-- What is known of a kernel that may give its slices to somebody who waits. Moments are of this boot's clock.
-- Whether whatever has it can give its slices to others while it is idle.
ALTER TABLE lease ADD COLUMN yields INTEGER NOT NULL DEFAULT 0;
-- Since when it has been idle and could be parked; NULL where it is not, or nobody says.
ALTER TABLE lease ADD COLUMN idle_since REAL;
-- When it has taken its slices again; NULL where it never did, or has run something since.
ALTER TABLE lease ADD COLUMN returned_at REAL;
-- When it was parked because somebody waited, as JSON: those of the last hour.
ALTER TABLE lease ADD COLUMN parkings TEXT NOT NULL DEFAULT '[]';
-- The highest number of those newcomers that it has overtaken when it asked for its slices again.
ALTER TABLE lease ADD COLUMN overtaken INTEGER NOT NULL DEFAULT 0;
-- For whom its slices are asked back, by number, and when that was.
ALTER TABLE lease ADD COLUMN asked_for INTEGER;
ALTER TABLE lease ADD COLUMN asked_at REAL;
-- When it asked for its slices again, Unix seconds: its place in the queue is another.
ALTER TABLE lease ADD COLUMN resumed_at REAL;
-- Since when others can have its slices, Unix seconds; NULL where it holds them, or waits outside the pool.
ALTER TABLE lease ADD COLUMN parked_at REAL;
-- What others could have of it before parked_at: milli x seconds, and so of what has ended.
ALTER TABLE lease ADD COLUMN lent REAL NOT NULL DEFAULT 0;
ALTER TABLE history ADD COLUMN lent REAL NOT NULL DEFAULT 0;
ALTER TABLE past_use ADD COLUMN lent REAL NOT NULL DEFAULT 0;
CREATE INDEX lease_idle ON lease (number) WHERE idle_since IS NOT NULL;
CREATE INDEX lease_asked_for ON lease (asked_for) WHERE asked_for IS NOT NULL;
