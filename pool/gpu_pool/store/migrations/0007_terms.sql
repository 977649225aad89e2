-- The terms with which a slice was granted, as JSON: a change of its course does not touch what is held.
-- NULL where nothing is held, and for what was granted before they were kept: then those of its course.
ALTER TABLE lease ADD COLUMN terms TEXT;
