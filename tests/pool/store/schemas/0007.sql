PRAGMA application_id = 1196447056; PRAGMA user_version = 7;
BEGIN TRANSACTION;
CREATE TABLE course_use (
    course          TEXT PRIMARY KEY,
    by_course       REAL NOT NULL,               -- faded as the queue compares courses
    as_of           REAL NOT NULL
) WITHOUT ROWID;
INSERT INTO "course_use" VALUES('',0.323247507180075,1.79567607855312132833e+09);
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
);
INSERT INTO "device" VALUES(1,'SIM-V100',0,'{"context_mib": 350, "contexts": null, "driver": "550.54.14", "index": 0, "memory_mib": 32768, "mig_profile": null, "milli": 1000, "model": "V100-SXM2-32GB", "node": "", "numa_node": null, "nvlink": [], "one_size": false, "simulated": true, "unbounded": false, "uuid": "SIM-V100"}',0,1,'pid:[4026531836]',0,NULL,0,0,0,0,1000,32768,0,1);
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
, failure TEXT NOT NULL DEFAULT '', batch INTEGER NOT NULL DEFAULT 0);
INSERT INTO "history" VALUES(1,'1-8ae088a3','past','10%',100,'ada','',NULL,1.7956760785491752625e+09,1.79567607854988884924e+09,1.79567607855311131472e+09,3.22246551513671875e-03,3.22246551513671875e-01,'released','','[[1, 100, 3276, 0]]',NULL,NULL,NULL,NULL,'',0);
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
    life            TEXT AS (coalesce(process, keeper) || ' ' || coalesce(pulse, '')) VIRTUAL, failure TEXT NOT NULL DEFAULT '', batch INTEGER NOT NULL DEFAULT 0, terms TEXT,
    CHECK ((state = 'waiting') = (turn IS NOT NULL)),
    CHECK ((state = 'waiting') = (waiting_since IS NOT NULL)),
    CHECK ((deadline IS NULL) = (deadline_reason IS NULL))
);
INSERT INTO "lease" VALUES(2,'2-a06e93e7','held','held',NULL,NULL,'','[[1, 1000, 32768, 0]]','','','1',1000,32768,'ada','',NULL,1.79567607855640816688e+09,1.79567607855668878551e+09,1.79567607855668878551e+09,NULL,0.0,0.0,'20044/273806/9e5ea3cf-3441-4bbd-9326-274fa64cca0d/pid:[4026531836]',8432168200583888983,NULL,0.0,NULL,2858.68439375,'never-attached','',NULL,NULL,NULL,NULL,NULL,NULL,'',0,'[null, "keep", 300.0, 7200.0]');
INSERT INTO "lease" VALUES(3,'3-ebd1ef16','next','waiting',1,1.79567607855733966828e+09,'','[]','','','50%',500,16384,'ada','',NULL,1.79567607855733966828e+09,NULL,NULL,NULL,0.0,0.0,'20044/273806/9e5ea3cf-3441-4bbd-9326-274fa64cca0d/pid:[4026531836]',8432168200583888983,NULL,0.0,NULL,NULL,NULL,'',NULL,NULL,NULL,NULL,NULL,NULL,'',0,NULL);
INSERT INTO "lease" VALUES(4,'4-3dbb6ff1','last','waiting',2,1.79567607856469869617e+09,'','[]','','','50%',500,16384,'ada','',NULL,1.79567607856469869617e+09,NULL,NULL,NULL,0.0,0.0,'20044/273806/9e5ea3cf-3441-4bbd-9326-274fa64cca0d/pid:[4026531836]',8432168200583888983,NULL,0.0,NULL,NULL,NULL,'',NULL,NULL,NULL,NULL,NULL,NULL,'',0,NULL);
CREATE TABLE node_start (
    number          INTEGER PRIMARY KEY,
    node_group      TEXT NOT NULL,
    seconds         REAL NOT NULL,               -- from asking for it until its GPUs were there
    come_at         REAL NOT NULL                -- Unix seconds
);
CREATE TABLE pool (
    one             INTEGER PRIMARY KEY CHECK (one = 1),
    looked_at       REAL NOT NULL,               -- when processes were last looked at, this boot's clock
    tried_at        REAL NOT NULL,               -- when it was last tried whether this can be written
    sorted_until    REAL NOT NULL                -- a long line is in order until then, this boot's clock
);
INSERT INTO "pool" VALUES(1,0.0,0.0,0.0);
CREATE TABLE use (
    course          TEXT NOT NULL,
    user            TEXT NOT NULL,
    by_user         REAL NOT NULL,               -- faded as the queue compares users
    as_of           REAL NOT NULL,               -- Unix seconds
    week_began      REAL NOT NULL,
    in_week         REAL NOT NULL,
    term_began      REAL NOT NULL,
    in_term         REAL NOT NULL,
    PRIMARY KEY (course, user)
) WITHOUT ROWID;
INSERT INTO "use" VALUES('','ada',3.23247808938046499172e-01,1.79567607855312132833e+09,1795392000.0,3.232479095458984375e-01,0.0,3.232479095458984375e-01);
CREATE INDEX lease_held ON lease (state) WHERE turn IS NULL;
CREATE INDEX lease_line ON lease (turn) WHERE turn IS NOT NULL;
CREATE INDEX lease_line_of_user ON lease (user, home) WHERE turn IS NOT NULL;
CREATE INDEX lease_line_lives ON lease (life) WHERE turn IS NOT NULL;
CREATE INDEX lease_line_overdue ON lease (deadline) WHERE turn IS NOT NULL AND deadline IS NOT NULL;
CREATE INDEX lease_reserved ON lease (turn) WHERE reserved <> '';
CREATE INDEX history_by_user ON history (user, ended_at);
CREATE INDEX course_version_by_course ON course_version (course, number);
CREATE INDEX node_start_by_group ON node_start (node_group, number);
COMMIT;
