-- Whether a lease is batch work, which comes after all that is not: as its holder says, or its course when
-- it was asked for.
ALTER TABLE lease ADD COLUMN batch INTEGER NOT NULL DEFAULT 0;
ALTER TABLE history ADD COLUMN batch INTEGER NOT NULL DEFAULT 0;
