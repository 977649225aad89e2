-- What is kept of leases that ended long ago, or of a user who had very many: sums by day, course, user and
-- reason. Its columns are those of history, added up.
CREATE TABLE past_use (
    day             TEXT NOT NULL,               -- of its end, as the service's machine counts days: 2026-09-01
    user            TEXT NOT NULL,
    course          TEXT NOT NULL,
    reason          TEXT NOT NULL,
    touched         INTEGER NOT NULL,            -- whether a process was ever on a device; -1 if not measured
    leases          INTEGER NOT NULL,
    requested_at    REAL NOT NULL,               -- the first
    held_at         REAL,                        -- the first; NULL if none was granted
    ended_at        REAL NOT NULL,               -- the last
    held_seconds    REAL NOT NULL,
    used            REAL NOT NULL,
    peak_mib        INTEGER,                     -- the most of any of them
    mib_seconds     REAL,
    memory_seconds  REAL,
    device_seconds  REAL,
    PRIMARY KEY (day, user, course, reason, touched)
) WITHOUT ROWID;
CREATE INDEX past_use_by_end ON past_use (ended_at);
CREATE INDEX past_use_by_user ON past_use (user, ended_at);

CREATE INDEX history_by_end ON history (ended_at);
