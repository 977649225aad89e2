-- In which order leases have ended, whatever the clock said; 0 of what ended before this was noted.
ALTER TABLE history ADD COLUMN place INTEGER NOT NULL DEFAULT 0;
CREATE INDEX history_by_place ON history (place) WHERE place > 0;
