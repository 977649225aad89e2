-- What every user has used of every course in each of the latest weeks, in thousandths of a GPU times seconds: what
-- is counted while the clock is wrong is of another week, and changes nothing of the right one.
CREATE TABLE week_use (
    course          TEXT NOT NULL,
    user            TEXT NOT NULL,
    week_began      REAL NOT NULL,               -- Unix seconds
    used            REAL NOT NULL,
    PRIMARY KEY (course, user, week_began)
) WITHOUT ROWID;
INSERT INTO week_use (course, user, week_began, used) SELECT course, user, week_began, in_week FROM use;
-- Of the weeks before a new one, four are kept: by a clock that is ahead the right one is the last of these. Later
-- ones are: by a clock that is behind the right one is among them.
CREATE TRIGGER week_use_forgotten AFTER INSERT ON week_use BEGIN
    DELETE FROM week_use WHERE course = NEW.course AND user = NEW.user AND week_began <= (
        SELECT week_began FROM week_use
        WHERE course = NEW.course AND user = NEW.user AND week_began < NEW.week_began
        ORDER BY week_began DESC LIMIT 1 OFFSET 4
    );
END;
-- SQLite 3.34 cannot drop a column.
CREATE TABLE use_of_term (
    course          TEXT NOT NULL,
    user            TEXT NOT NULL,
    by_user         REAL NOT NULL,               -- faded as the queue compares users
    as_of           REAL NOT NULL,               -- Unix seconds
    term_began      REAL NOT NULL,
    in_term         REAL NOT NULL,
    PRIMARY KEY (course, user)
) WITHOUT ROWID;
INSERT INTO use_of_term (course, user, by_user, as_of, term_began, in_term)
SELECT course, user, by_user, as_of, term_began, in_term FROM use;
DROP TABLE use;
ALTER TABLE use_of_term RENAME TO use;
-- In which order leases have ended, whatever the clock said; 0 of what ended before this was noted.
ALTER TABLE history ADD COLUMN place INTEGER NOT NULL DEFAULT 0;
CREATE INDEX history_by_place ON history (place) WHERE place > 0;
-- Since when a lease has had its slices, by this boot's clock, while held: for how long is told by that, since the
-- clock for people may be set meanwhile. NULL where they were granted before this was noted.
ALTER TABLE lease ADD COLUMN held_from REAL;
