-- What a lease may use now on top of what it was granted, its burst, in MiB of all its slices together, and since
-- when, Unix seconds. Of a burst from before this was noted, from the next look on.
ALTER TABLE lease ADD COLUMN burst_mib INTEGER NOT NULL DEFAULT 0;
ALTER TABLE lease ADD COLUMN burst_since REAL;
-- What its bursts came to before then, MiB x seconds, and the most at once; and so of what has ended.
ALTER TABLE lease ADD COLUMN burst_before REAL NOT NULL DEFAULT 0;
ALTER TABLE lease ADD COLUMN burst_peak_mib INTEGER NOT NULL DEFAULT 0;
ALTER TABLE history ADD COLUMN burst REAL NOT NULL DEFAULT 0;
ALTER TABLE history ADD COLUMN burst_peak_mib INTEGER NOT NULL DEFAULT 0;
ALTER TABLE past_use ADD COLUMN burst REAL NOT NULL DEFAULT 0;
ALTER TABLE past_use ADD COLUMN burst_peak_mib INTEGER NOT NULL DEFAULT 0;
