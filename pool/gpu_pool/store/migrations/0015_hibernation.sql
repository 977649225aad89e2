-- Whether a device is drained so that the kernels on it go to disk.
ALTER TABLE device ADD COLUMN hibernates INTEGER NOT NULL DEFAULT 0 CHECK (hibernates IN (0, 1));
-- Whether a lease's kernel is to go to disk as soon as it is idle, since one of its devices is drained for that.
ALTER TABLE lease ADD COLUMN hibernates INTEGER NOT NULL DEFAULT 0 CHECK (hibernates IN (0, 1));
-- How its kernel stands with that, as its server says it, in JSON; empty where nobody says that it can.
ALTER TABLE lease ADD COLUMN hibernation TEXT NOT NULL DEFAULT '';
