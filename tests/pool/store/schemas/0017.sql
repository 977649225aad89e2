PRAGMA application_id = 1196447056; PRAGMA user_version = 17;
BEGIN TRANSACTION;
CREATE TABLE busy (
    number          INTEGER NOT NULL,            -- of the lease
    began           REAL NOT NULL,               -- Unix seconds
    seconds         REAL NOT NULL,
    PRIMARY KEY (number, began)
) WITHOUT ROWID;
CREATE TABLE course_use (
    course          TEXT PRIMARY KEY,
    by_course       REAL NOT NULL,               -- faded as the queue compares courses
    as_of           REAL NOT NULL
) WITHOUT ROWID;
INSERT INTO "course_use" VALUES('',1.27911504683700549822e-01,1.79597949753576445583e+09);
CREATE TABLE course_version (
    number          INTEGER PRIMARY KEY,
    course          TEXT NOT NULL,
    user            TEXT NOT NULL,               -- '' for one that was found, changed elsewhere
    text            TEXT NOT NULL,
    saved_at        REAL NOT NULL                -- Unix seconds
);
CREATE TABLE device (
    id              INTEGER PRIMARY KEY,
    uuid            TEXT NOT NULL UNIQUE,
    position        INTEGER NOT NULL,            -- order in which placement looks at devices
    facts           TEXT NOT NULL,               -- JSON of the Device value
    revision        INTEGER NOT NULL DEFAULT 0,  -- grows when the facts change
    present         INTEGER NOT NULL CHECK (present IN (0, 1)),
    seen_from       TEXT NOT NULL,               -- pid namespace of the process that saw it last
    drained         INTEGER NOT NULL DEFAULT 0 CHECK (drained IN (0, 1)),
    drained_at      REAL,                        -- since when, Unix seconds
    -- What those have of it who hold no lease, and whether something else than the pool has drained it.
    other_milli     INTEGER NOT NULL DEFAULT 0 CHECK (other_milli >= 0),
    other_memory_mib INTEGER NOT NULL DEFAULT 0 CHECK (other_memory_mib >= 0),
    other_contexts  INTEGER NOT NULL DEFAULT 0 CHECK (other_contexts >= 0),
    closed          INTEGER NOT NULL DEFAULT 0 CHECK (closed IN (0, 1)),
    held_milli      INTEGER NOT NULL DEFAULT 0 CHECK (held_milli >= 0),
    held_memory_mib INTEGER NOT NULL DEFAULT 0 CHECK (held_memory_mib >= 0),
    held_contexts   INTEGER NOT NULL DEFAULT 0 CHECK (held_contexts >= 0),
    leases          INTEGER NOT NULL DEFAULT 0 CHECK (leases >= 0)
, hibernates INTEGER NOT NULL DEFAULT 0 CHECK (hibernates IN (0, 1)));
INSERT INTO "device" VALUES(1,'SIM-V100',0,'{"context_mib": 350, "contexts": null, "cuda_index": null, "driver": "550.54.14", "exclusive": false, "fault": "", "index": 0, "memory_mib": 32768, "mig_profile": null, "milli": 1000, "model": "V100-SXM2-32GB", "node": "", "numa_node": null, "nvlink": [], "one_size": false, "simulated": true, "unbounded": false, "unified": false, "uuid": "SIM-V100"}',0,1,'pid:[4026531836]',0,NULL,0,0,0,0,1000,32768,0,1,0);
CREATE TABLE history (
    number          INTEGER PRIMARY KEY,
    id              TEXT NOT NULL,
    key             TEXT NOT NULL UNIQUE,
    request         TEXT NOT NULL,
    milli           INTEGER NOT NULL,
    user            TEXT NOT NULL,
    course          TEXT NOT NULL,
    kernel          TEXT,
    requested_at    REAL NOT NULL,
    held_at         REAL,                        -- the first grant
    ended_at        REAL NOT NULL,
    held_seconds    REAL NOT NULL,               -- in all, parked time left out
    used            REAL NOT NULL,               -- milli x seconds, whatever sizes it had
    reason          TEXT NOT NULL,
    note            TEXT NOT NULL DEFAULT '',    -- what its user was told at its end
    slices          TEXT NOT NULL,               -- as in lease; empty if it ended without any
    peak_mib        INTEGER,                     -- from here on as in lease
    mib_seconds     REAL,
    memory_seconds  REAL,
    device_seconds  REAL
, failure TEXT NOT NULL DEFAULT '', batch INTEGER NOT NULL DEFAULT 0, lent REAL NOT NULL DEFAULT 0, burst REAL NOT NULL DEFAULT 0, burst_peak_mib INTEGER NOT NULL DEFAULT 0, job TEXT NOT NULL DEFAULT '', place INTEGER NOT NULL DEFAULT 0);
INSERT INTO "history" VALUES(1,'1-e7b783d3','past','10%',100,'ada','',NULL,1.79597949753395771978e+09,1.79597949753448534013e+09,1.79597949753590703015e+09,1.4216899871826171875e-03,1.4216899871826171875e-01,'released','','[[1, 100, 3276, 0]]',NULL,NULL,NULL,NULL,'',0,0.0,0.0,0,'',1);
CREATE TABLE lease (
    number          INTEGER PRIMARY KEY,         -- never used twice, see the query ask
    id              TEXT NOT NULL,               -- the number, and a random part
    key             TEXT NOT NULL UNIQUE,        -- the caller's name for the request
    state           TEXT NOT NULL CHECK (state IN ('waiting', 'held', 'parked')),
    turn            INTEGER,                     -- order in line, while waiting
    waiting_since   REAL,                        -- Unix seconds, while waiting
    reserved        TEXT NOT NULL DEFAULT '',    -- uuids of the devices that are emptied for it
    slices          TEXT NOT NULL,               -- held: [[device, milli, memory_mib, contexts], ...]
    home            TEXT NOT NULL DEFAULT '',    -- uuids it must return to, once parked
    within          TEXT NOT NULL DEFAULT '',    -- uuids of the devices that it may have; empty for all
    request         TEXT NOT NULL,
    milli           INTEGER NOT NULL,            -- what it takes of all devices together; while it
    memory_mib      INTEGER NOT NULL,            --   waits, of the first that could hold it
    user            TEXT NOT NULL,
    course          TEXT NOT NULL,               -- '' for none
    kernel          TEXT,
    requested_at    REAL NOT NULL,               -- Unix seconds
    first_held_at   REAL,                        -- its first grant
    held_at         REAL,                        -- since when it has had its slices, while held
    ends_by         REAL,                        -- the end of the longest lease, this boot's clock, while held
    held_before     REAL NOT NULL DEFAULT 0,     -- seconds held before held_at, parked time left out
    used_before     REAL NOT NULL DEFAULT 0,     -- milli x seconds before held_at, whatever sizes it had
    keeper          TEXT NOT NULL,               -- the requester's process
    pulse           INTEGER,                     -- its sign of life, where it stands for the attached process too
    process         TEXT,                        -- the attached process
    grace           REAL NOT NULL DEFAULT 0,     -- seconds forgiven after the process's death
    ready_within    REAL,                        -- seconds in which its process is to be ready, from the next grant
    deadline        REAL,                        -- seconds of this boot's clock
    deadline_reason TEXT,                        -- how the lease ends at the deadline
    notice          TEXT NOT NULL DEFAULT '',    -- what its user should read now
    ending          TEXT,                        -- why, if the pool is ending its processes
    asked_back      TEXT,                        -- how its end is recorded, if its slices are asked back
    peak_mib        INTEGER,                     -- the most memory seen in use on one device
    mib_seconds     REAL,                        -- memory on devices, times the time it was known for
    memory_seconds  REAL,                        --   and that time; NULL where nothing is measured
    device_seconds  REAL,                        -- time with a process on a device
    -- Equal where one course wishes the same of the same devices.
    kind            TEXT AS (course || char(10) || home || char(10) || within || char(10) || request) VIRTUAL,
    -- What keeps it alive: a process, and behind a blank its sign of life.
    life            TEXT AS (coalesce(process, keeper) || ' ' || coalesce(pulse, '')) VIRTUAL, failure TEXT NOT NULL DEFAULT '', batch INTEGER NOT NULL DEFAULT 0, terms TEXT, outside INTEGER NOT NULL DEFAULT 0, yields INTEGER NOT NULL DEFAULT 0, idle_since REAL, returned_at REAL, parkings TEXT NOT NULL DEFAULT '[]', overtaken INTEGER NOT NULL DEFAULT 0, asked_for INTEGER, asked_at REAL, resumed_at REAL, parked_at REAL, lent REAL NOT NULL DEFAULT 0, queued_at REAL, burst_mib INTEGER NOT NULL DEFAULT 0, burst_since REAL, burst_before REAL NOT NULL DEFAULT 0, burst_peak_mib INTEGER NOT NULL DEFAULT 0, job TEXT NOT NULL DEFAULT '', hibernates INTEGER NOT NULL DEFAULT 0 CHECK (hibernates IN (0, 1)), hibernation TEXT NOT NULL DEFAULT '',
    CHECK ((state = 'waiting') = (turn IS NOT NULL)),
    CHECK ((state = 'waiting') = (waiting_since IS NOT NULL)),
    CHECK ((deadline IS NULL) = (deadline_reason IS NULL))
);
INSERT INTO "lease" VALUES(2,'2-f2d86829','held','held',NULL,NULL,'','[[1, 1000, 32768, 0]]','','','1',1000,32768,'ada','',NULL,1.79597949753680777547e+09,1.79597949753694987292e+09,1.79597949753694987292e+09,NULL,0.0,0.0,'4278/7605214/e40a4fbe-cfa8-4ab8-96ee-a49e8dccd2b6/pid:[4026531836]',9118924319759114610,NULL,0.0,NULL,76172.773585432,'never-attached','',NULL,NULL,NULL,NULL,NULL,NULL,'',0,'[null, "keep", 300.0, 7200.0, 60.0, null]',0,0,NULL,NULL,'[]',0,NULL,NULL,NULL,NULL,0.0,76052.773455109,0,NULL,0.0,0,'',0,'');
INSERT INTO "lease" VALUES(3,'3-d4e6a2f7','next','waiting',1,1.79597949753740429882e+09,'','[]','','','50%',500,16384,'ada','',NULL,1.79597949753740429882e+09,NULL,NULL,NULL,0.0,0.0,'4278/7605214/e40a4fbe-cfa8-4ab8-96ee-a49e8dccd2b6/pid:[4026531836]',9118924319759114610,NULL,0.0,NULL,NULL,NULL,'',NULL,NULL,NULL,NULL,NULL,NULL,'',0,NULL,0,0,NULL,NULL,'[]',0,NULL,NULL,NULL,NULL,0.0,76052.774052025,0,NULL,0.0,0,'',0,'');
INSERT INTO "lease" VALUES(4,'4-c45f7bd1','last','waiting',2,1.79597949753948831559e+09,'','[]','','','50%',500,16384,'ada','',NULL,1.79597949753948831559e+09,NULL,NULL,NULL,0.0,0.0,'4278/7605214/e40a4fbe-cfa8-4ab8-96ee-a49e8dccd2b6/pid:[4026531836]',9118924319759114610,NULL,0.0,NULL,NULL,NULL,'',NULL,NULL,NULL,NULL,NULL,NULL,'',0,NULL,0,0,NULL,NULL,'[]',0,NULL,NULL,NULL,NULL,0.0,76052.776136211,0,NULL,0.0,0,'',0,'');
CREATE TABLE node_start (
    number          INTEGER PRIMARY KEY,
    node_group      TEXT NOT NULL,
    seconds         REAL NOT NULL,               -- from asking for it until its GPUs were there
    come_at         REAL NOT NULL                -- Unix seconds
);
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
    device_seconds  REAL, lent REAL NOT NULL DEFAULT 0, burst REAL NOT NULL DEFAULT 0, burst_peak_mib INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (day, user, course, reason, touched)
) WITHOUT ROWID;
CREATE TABLE pool (
    one             INTEGER PRIMARY KEY CHECK (one = 1),
    looked_at       REAL NOT NULL,               -- when processes were last looked at, this boot's clock
    tried_at        REAL NOT NULL,               -- when it was last tried whether this can be written
    sorted_until    REAL NOT NULL                -- a long line is in order until then, this boot's clock
);
INSERT INTO "pool" VALUES(1,0.0,0.0,0.0);
CREATE TABLE "use" (
    course          TEXT NOT NULL,
    user            TEXT NOT NULL,
    by_user         REAL NOT NULL,               -- faded as the queue compares users
    as_of           REAL NOT NULL,               -- Unix seconds
    term_began      REAL NOT NULL,
    in_term         REAL NOT NULL,
    PRIMARY KEY (course, user)
) WITHOUT ROWID;
INSERT INTO "use" VALUES('','ada',1.27911551951860325004e-01,1.79597949753576445583e+09,0.0,1.2791156768798828125e-01);
CREATE TABLE week_use (
    course          TEXT NOT NULL,
    user            TEXT NOT NULL,
    week_began      REAL NOT NULL,               -- Unix seconds
    used            REAL NOT NULL,
    PRIMARY KEY (course, user, week_began)
) WITHOUT ROWID;
INSERT INTO "week_use" VALUES('','ada',1795392000.0,1.2791156768798828125e-01);
CREATE INDEX lease_held ON lease (state) WHERE turn IS NULL;
CREATE INDEX lease_line ON lease (turn) WHERE turn IS NOT NULL;
CREATE INDEX lease_line_of_user ON lease (user, home) WHERE turn IS NOT NULL;
CREATE INDEX lease_line_lives ON lease (life) WHERE turn IS NOT NULL;
CREATE INDEX lease_line_overdue ON lease (deadline) WHERE turn IS NOT NULL AND deadline IS NOT NULL;
CREATE INDEX lease_reserved ON lease (turn) WHERE reserved <> '';
CREATE INDEX history_by_user ON history (user, ended_at);
CREATE INDEX course_version_by_course ON course_version (course, number);
CREATE INDEX node_start_by_group ON node_start (node_group, number);
CREATE INDEX past_use_by_end ON past_use (ended_at);
CREATE INDEX past_use_by_user ON past_use (user, ended_at);
CREATE INDEX history_by_end ON history (ended_at);
CREATE TRIGGER busy_forgotten AFTER DELETE ON history BEGIN
    DELETE FROM busy WHERE number = OLD.number;
END;
CREATE INDEX lease_idle ON lease (number) WHERE idle_since IS NOT NULL;
CREATE INDEX lease_asked_for ON lease (asked_for) WHERE asked_for IS NOT NULL;
CREATE TRIGGER week_use_forgotten AFTER INSERT ON week_use BEGIN
    DELETE FROM week_use WHERE course = NEW.course AND user = NEW.user AND week_began <= (
        SELECT week_began FROM week_use
        WHERE course = NEW.course AND user = NEW.user AND week_began < NEW.week_began
        ORDER BY week_began DESC LIMIT 1 OFFSET 4
    );
END;
CREATE INDEX history_by_place ON history (place) WHERE place > 0;
COMMIT;