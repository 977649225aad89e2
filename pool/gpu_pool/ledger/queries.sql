-- Every statement the pool runs, by name. Read by gpu_pool.ledger.queries.

-- name: devices
SELECT id, revision, held_milli, held_memory_mib, held_contexts, leases
FROM device WHERE present OR leases > 0 ORDER BY position;

-- name: device_facts
SELECT id, uuid, revision, facts, present, seen_from FROM device;

-- name: upsert_device
INSERT INTO device (uuid, position, facts, present, seen_from) VALUES (:uuid, :position, :facts, 1, :seen_from)
ON CONFLICT (uuid) DO UPDATE SET
    position = :position, present = 1, facts = :facts, seen_from = :seen_from,
    revision = revision + (facts <> :facts OR NOT present);

-- name: hide_device
UPDATE device SET present = 0, revision = revision + 1 WHERE id = :id;

-- name: in_use
SELECT EXISTS (SELECT 1 FROM lease);

-- name: ask
-- What a request must know before anything else, in one statement.
SELECT
    EXISTS (SELECT 1 FROM lease WHERE key = :key) OR EXISTS (SELECT 1 FROM history WHERE key = :key) AS known,
    EXISTS (SELECT 1 FROM lease WHERE turn IS NOT NULL) AS somebody_waits,
    1 + max(coalesce((SELECT max(number) FROM lease), 0),
            coalesce((SELECT max(number) FROM history), 0)) AS next_number;

-- name: lease_by_number
SELECT *, EXISTS (SELECT 1 FROM lease WHERE turn IS NOT NULL) AS somebody_waits
FROM lease WHERE number = :number;

-- name: lease_by_key
SELECT *, EXISTS (SELECT 1 FROM lease WHERE turn IS NOT NULL) AS somebody_waits
FROM lease WHERE key = :key;

-- name: ended_by_number
SELECT * FROM history WHERE number = :number;

-- name: ended_by_key
SELECT * FROM history WHERE key = :key;

-- name: leases
SELECT * FROM lease WHERE turn IS NULL ORDER BY number;

-- name: line
SELECT * FROM lease WHERE turn IS NOT NULL ORDER BY turn;

-- name: place_in_line
SELECT count(*) FROM lease WHERE turn IS NOT NULL AND turn <= :turn;

-- name: last_turn
SELECT coalesce(max(turn), 0) FROM lease WHERE turn IS NOT NULL;

-- name: insert_lease
INSERT INTO lease (number, id, key, state, turn, slices, request, user, course, kernel, requested_at,
                   held_at, keeper, pulse, deadline, deadline_reason)
VALUES (:number, :id, :key, :state, :turn, :slices, :request, :user, :course, :kernel, :requested_at,
        :held_at, :keeper, :pulse, :deadline, :deadline_reason);

-- name: grant
UPDATE lease SET state = 'held', turn = NULL, held_at = :now, slices = :slices,
    deadline = iif(process IS NULL, :deadline, NULL),
    deadline_reason = iif(process IS NULL, :deadline_reason, NULL)
WHERE number = :number;

-- name: take
UPDATE device SET held_milli = held_milli + :milli, held_memory_mib = held_memory_mib + :memory_mib,
    held_contexts = held_contexts + :contexts, leases = leases + 1
WHERE id = :device;

-- name: give_back
UPDATE device SET held_milli = held_milli - :milli, held_memory_mib = held_memory_mib - :memory_mib,
    held_contexts = held_contexts - :contexts, leases = leases - 1
WHERE id = :device;

-- name: attach
UPDATE lease SET process = :process, pulse = iif(:outlives, NULL, pulse), grace = :grace,
    deadline = :deadline, deadline_reason = :reason
WHERE number = :number;

-- name: set_deadline
-- A lease whose process was seen dead keeps its grace, whatever its holder says of itself.
UPDATE lease SET deadline = :deadline, deadline_reason = :reason
WHERE number = :number AND deadline_reason IS NOT 'process-gone';

-- name: detach
UPDATE lease SET process = NULL, deadline = :deadline, deadline_reason = :reason WHERE number = :number;

-- name: park
UPDATE lease SET state = 'parked', home = :home, slices = '[]', held_at = NULL,
    held_before = held_before + :now - held_at, deadline = NULL, deadline_reason = NULL
WHERE number = :number;

-- name: resume
UPDATE lease SET state = 'waiting', turn = :turn WHERE number = :number;

-- name: remember
INSERT INTO history (number, id, key, request, user, course, kernel, requested_at, held_at, ended_at,
                     held_seconds, reason, slices)
SELECT number, id, key, request, user, course, kernel, requested_at, held_at, :now,
       held_before + coalesce(max(0, :now - held_at), 0), :reason, slices
FROM lease WHERE number = :number;

-- name: delete_lease
DELETE FROM lease WHERE number = :number;

-- name: overdue
SELECT * FROM lease WHERE deadline <= :now;

-- name: processes
SELECT number, process, keeper, pulse, grace, slices FROM lease;

-- name: looked_at
SELECT looked_at FROM pool;

-- name: set_looked_at
UPDATE pool SET looked_at = :now;
