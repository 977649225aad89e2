-- When a lease asked for its slices, or for them again, by this boot's clock: idle kernels give way sooner to
-- whoever has waited for long. NULL where it asked before this was noted.
ALTER TABLE lease ADD COLUMN queued_at REAL;
