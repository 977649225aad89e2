-- Every statement the pool runs, by name. Read by gpu_pool.store.schema.

-- name: devices
SELECT id, revision, drained OR closed, held_milli + other_milli, held_memory_mib + other_memory_mib,
       held_contexts + other_contexts, leases, drained_at, hibernates
FROM device WHERE present OR leases > 0 OR hibernates ORDER BY position;

-- name: device_facts
SELECT id, uuid, revision, facts, present, seen_from FROM device;

-- name: upsert_device
INSERT INTO device (uuid, position, facts, present, seen_from) VALUES (:uuid, :position, :facts, 1, :seen_from)
ON CONFLICT (uuid) DO UPDATE SET
    position = :position, present = 1, facts = :facts, seen_from = :seen_from,
    revision = revision + (facts <> :facts OR NOT present);

-- name: hide_device
UPDATE device SET present = 0, revision = revision + 1 WHERE id = :id;

-- name: forget_devices
-- The oldest of those that are gone, but for what a lease is on or wants, or an administrator has drained.
-- The highest id stays: none is given out twice.
DELETE FROM device WHERE id IN (
    SELECT id FROM device WHERE NOT present AND leases = 0 AND NOT drained AND id < (SELECT max(id) FROM device)
        AND NOT EXISTS (
            SELECT 1 FROM lease WHERE instr(home || ',' || within || ',' || reserved, device.uuid) > 0
        )
    ORDER BY id LIMIT max(0, min(:most, (SELECT count(*) - :kept FROM device WHERE NOT present)))
);

-- name: set_facts
UPDATE device SET facts = :facts, revision = revision + 1 WHERE id = :id;

-- name: set_drained
-- One that is drained again has been drained since the first time, and for the disk if it was before.
UPDATE device SET drained = :drained, hibernates = :drained AND (hibernates OR :hibernate),
    drained_at = iif(:drained, iif(drained, drained_at, :now), NULL)
WHERE id = :id;

-- name: set_hibernates
-- Those that hold a part of it, or come back to it, or to any; where it is over for this one, another of theirs
-- may be drained so still.
UPDATE lease SET hibernates = :hibernate OR (hibernates AND EXISTS (
        SELECT 1 FROM device WHERE device.hibernates AND (
            EXISTS (SELECT 1 FROM json_each(slices) AS part WHERE json_extract(part.value, '$[0]') = device.id)
            OR instr(home, device.uuid) > 0
            OR (:anywhere AND state = 'parked' AND home = '' AND device.present)
        )
    )),
    -- Why its kernel stayed awake before is tried anew.
    hibernation = iif(hibernation = '', '', json_set(hibernation, '$.why_awake', '', '$.is_for_now', json('true')))
WHERE EXISTS (SELECT 1 FROM json_each(slices) AS part WHERE json_extract(part.value, '$[0]') = :id)
   OR instr(home, :uuid) > 0 OR (:anywhere AND state = 'parked' AND home = '');

-- name: others
SELECT id, uuid, other_milli, other_memory_mib, other_contexts, closed FROM device WHERE present;

-- name: set_others
UPDATE device SET other_milli = :milli, other_memory_mib = :memory_mib, other_contexts = :contexts,
    closed = :closed
WHERE id = :id;

-- name: leases_in_all
SELECT count(*) FROM lease;

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
SELECT id, key, request, user, course, kernel, state, slices, requested_at, first_held_at, held_at, ends_by, keeper,
       process, notice, asked_back, failure, batch, yields, terms, held_before, used_before, outside, lent, parked_at,
       burst_since, burst_before, burst_peak_mib, hibernates, hibernation
FROM lease WHERE turn IS NULL ORDER BY number;

-- name: waiting
SELECT id, key, request, user, course, kernel, state, slices, requested_at, first_held_at, held_at, ends_by, keeper,
       process, notice, asked_back, failure, batch, yields, terms, held_before, used_before, outside, lent, parked_at,
       burst_since, burst_before, burst_peak_mib, hibernates, hibernation
FROM lease WHERE turn IS NOT NULL ORDER BY turn;

-- name: waiters
SELECT id, number, turn, reserved, request, home, within, user, course, waiting_since, queued_at, batch, yields
FROM lease WHERE turn IS NOT NULL ORDER BY turn;

-- name: first_waiters
-- The first of them.
SELECT number, turn, reserved, request, home, within, user, course, waiting_since, batch
FROM lease WHERE turn IS NOT NULL ORDER BY turn LIMIT :most;

-- name: count_waiters
SELECT count(*) FROM lease WHERE turn IS NOT NULL;

-- name: waiting_for
-- What those in the queue ask for, and where, each once.
SELECT DISTINCT request, home, within FROM lease WHERE turn IS NOT NULL;

-- name: waiting_before
-- The same of those that come before a lease which grows: batch work comes before batch work alone.
SELECT DISTINCT request, home, within FROM lease WHERE turn IS NOT NULL AND (:batch OR NOT batch);

-- name: reserved
SELECT number, turn, reserved, request, home, within, user, course, waiting_since, batch
FROM lease WHERE reserved <> '' ORDER BY turn;

-- name: waiting_of_user
-- Those that ask to come back have been counted when they came.
SELECT count(*) FROM lease WHERE turn IS NOT NULL AND user = :user AND home = '';

-- name: position
SELECT count(*) FROM lease WHERE turn IS NOT NULL AND turn <= :turn;

-- name: last_turn
SELECT coalesce(max(turn), 0) FROM lease WHERE turn IS NOT NULL;

-- name: insert_lease
INSERT INTO lease (number, id, key, state, turn, waiting_since, slices, within, request, milli, memory_mib, user, course,
                   kernel, requested_at, queued_at, first_held_at, held_at, held_from, ends_by, terms, keeper, pulse,
                   deadline, deadline_reason, batch, yields)
VALUES (:number, :id, :key, :state, :turn, :waiting_since, :slices, :within, :request, :milli, :memory_mib, :user, :course,
        :kernel, :requested_at, :queued_at, :held_at, :held_at, :held_from, :ends_by, :terms, :keeper, :pulse,
        :deadline, :deadline_reason, :batch, :yields);

-- name: grant
-- Whoever promised a working process while it waited has had nothing to run until now.
UPDATE lease SET state = 'held', turn = NULL, waiting_since = NULL, reserved = '', held_at = :now, held_from = :uptime,
    notice = '', asked_back = NULL, hibernates = 0, idle_since = NULL, asked_for = NULL, resumed_at = NULL,
    returned_at = iif(first_held_at IS NULL, NULL, :uptime),
    lent = lent + milli * coalesce(max(0, :now - parked_at), 0), parked_at = NULL,
    first_held_at = coalesce(first_held_at, :now),
    slices = :slices, milli = :milli, memory_mib = :memory_mib, ends_by = :ends_by,
    terms = :terms,
    deadline = CASE WHEN process IS NULL THEN :deadline
        WHEN ready_within IS NOT NULL THEN :uptime + ready_within ELSE deadline END,
    deadline_reason = CASE WHEN process IS NULL THEN :deadline_reason
        WHEN ready_within IS NOT NULL THEN 'not-ready' ELSE deadline_reason END
WHERE number = :number;

-- name: resize_held
-- held_seconds is in database.py.
UPDATE lease SET request = :request, slices = :slices, milli = :milli, memory_mib = :memory_mib,
    held_before = held_before + held_seconds(held_at, held_from, :now, :uptime),
    used_before = used_before + milli * held_seconds(held_at, held_from, :now, :uptime),
    held_at = :now, held_from = :uptime,
    burst_before = burst_before + burst_mib * coalesce(max(0, :now - burst_since), 0),
    burst_mib = :burst_mib, burst_since = iif(:burst_mib > 0, :now, NULL)
WHERE number = :number;

-- name: resize_later
UPDATE lease SET request = :request, milli = :milli, memory_mib = :memory_mib, home = :home,
    turn = :turn, waiting_since = :waiting_since, reserved = ''
WHERE number = :number;

-- name: set_turn
UPDATE lease SET turn = :turn, reserved = :reserved WHERE number = :number;

-- name: holdings
SELECT user, course, request, slices, ends_by, held_at, held_from FROM lease WHERE turn IS NULL AND state = 'held';

-- name: accounts
-- What every user of every course has: held, parked or waiting.
SELECT user, course, count(*) AS slices, sum(milli) AS milli, sum(memory_mib) AS memory_mib,
       sum(milli * min(held_for, :now - :week_began)) AS in_week,
       sum(milli * max(0, min(held_for, :now - :term_began))) AS in_term,
       min(ends_by) - :uptime AS ends_in
FROM (SELECT *, iif(state = 'held', held_seconds(held_at, held_from, :now, :uptime), 0) AS held_for FROM lease)
GROUP BY user, course;

-- name: add_use
-- What was used before fades until now; what is of another term counts no more. A time that is still to come was
-- written while the clock was ahead: what is of then fades as if it were as long ago.
INSERT INTO use (course, user, by_user, as_of, term_began, in_term)
VALUES (:course, :user, :by_user, :now, :term_began, :in_term)
ON CONFLICT (course, user) DO UPDATE SET
    by_user = by_user * pow(0.5, abs(:now - as_of) / :user_half_life) + excluded.by_user,
    as_of = :now,
    in_term = iif(term_began = :term_began, in_term, 0) + excluded.in_term,
    term_began = :term_began;

-- name: add_week_use
INSERT INTO week_use (course, user, week_began, used) VALUES (:course, :user, :week_began, :in_week)
ON CONFLICT (course, user, week_began) DO UPDATE SET used = used + excluded.used;

-- name: add_course_use
INSERT INTO course_use (course, by_course, as_of) VALUES (:course, :by_course, :now)
ON CONFLICT (course) DO UPDATE SET
    by_course = by_course * pow(0.5, abs(:now - as_of) / :course_half_life) + excluded.by_course, as_of = :now;

-- name: course_uses_now
SELECT course, by_course * pow(0.5, abs(:now - as_of) / :course_half_life) AS by_course FROM course_use;

-- name: user_uses_now
SELECT course, user, by_user * pow(0.5, abs(:now - as_of) / :user_half_life) AS by_user FROM use;

-- name: uses_now
SELECT use.course, use.user,
       coalesce(week_use.used, 0) AS in_week,
       iif(term_began = :term_began, in_term, 0) AS in_term
FROM use LEFT JOIN week_use
    ON week_use.course = use.course AND week_use.user = use.user AND week_use.week_began = :week_began;

-- name: holding_times
-- How long what ended lately was held: of the latest, so many of each course and size, the latest request first.
SELECT course, milli, held_seconds FROM (
    SELECT number, course, milli, held_seconds,
           row_number() OVER (PARTITION BY course, milli ORDER BY number DESC) AS place
    FROM (SELECT number, course, milli, held_seconds FROM history WHERE held_at IS NOT NULL ORDER BY number DESC LIMIT :most)
) WHERE place <= :alike ORDER BY number DESC;

-- name: history
-- The last that ended, the latest first.
SELECT number, id, request, milli, user, course, kernel, requested_at, held_at, ended_at, held_seconds,
       used / 1000.0 AS gpu_seconds, lent / 1000.0 AS lent_gpu_seconds, burst AS burst_mib_seconds, burst_peak_mib, reason, note, failure, job,
       peak_mib, mib_seconds / nullif(memory_seconds, 0) AS mean_mib, device_seconds,
       device_seconds > 0 AS touched
FROM history WHERE ended_at >= :since ORDER BY ended_at DESC, number DESC
LIMIT :most;

-- name: history_of_user
SELECT number, id, request, milli, user, course, kernel, requested_at, held_at, ended_at, held_seconds,
       used / 1000.0 AS gpu_seconds, lent / 1000.0 AS lent_gpu_seconds, burst AS burst_mib_seconds, burst_peak_mib, reason, note, failure, job,
       peak_mib, mib_seconds / nullif(memory_seconds, 0) AS mean_mib, device_seconds,
       device_seconds > 0 AS touched
FROM history WHERE user = :user AND ended_at >= :since ORDER BY ended_at DESC, number DESC
LIMIT :most;

-- name: ended_after
SELECT place, number, id, request, milli, user, course, kernel, requested_at, held_at, ended_at, held_seconds,
       used / 1000.0 AS gpu_seconds, lent / 1000.0 AS lent_gpu_seconds, burst AS burst_mib_seconds, burst_peak_mib, reason, note, failure, job,
       peak_mib, mib_seconds / nullif(memory_seconds, 0) AS mean_mib, device_seconds,
       device_seconds > 0 AS touched
FROM history WHERE place > :place AND place > 0 AND ended_at >= :since ORDER BY place LIMIT :most;

-- name: last_end
SELECT coalesce(max(place), 0) FROM history WHERE place > 0;

-- name: sums_of_history
-- What ended before those that are told one by one, added up as past_use is.
SELECT user, course, reason, coalesce(device_seconds > 0, -1) AS touched, count(*) AS leases,
       min(requested_at) AS requested_at, min(held_at) AS held_at, max(ended_at) AS ended_at,
       sum(held_seconds) AS held_seconds, sum(used) / 1000.0 AS gpu_seconds,
       sum(lent) / 1000.0 AS lent_gpu_seconds, sum(burst) AS burst_mib_seconds,
       max(burst_peak_mib) AS burst_peak_mib, max(peak_mib) AS peak_mib,
       sum(mib_seconds) / nullif(sum(memory_seconds), 0) AS mean_mib, sum(device_seconds) AS device_seconds
FROM history
WHERE ended_at >= :since AND (ended_at, number) < (:before, :number) AND (:user IS NULL OR user = :user)
GROUP BY date(ended_at, 'unixepoch', 'localtime'), user, course, reason, coalesce(device_seconds > 0, -1);

-- name: past_use
SELECT user, course, reason, touched, leases, requested_at, held_at, ended_at, held_seconds,
       used / 1000.0 AS gpu_seconds, lent / 1000.0 AS lent_gpu_seconds, burst AS burst_mib_seconds,
       burst_peak_mib, peak_mib, mib_seconds / nullif(memory_seconds, 0) AS mean_mib, device_seconds
FROM past_use WHERE ended_at >= :since;

-- name: past_use_of_user
SELECT user, course, reason, touched, leases, requested_at, held_at, ended_at, held_seconds,
       used / 1000.0 AS gpu_seconds, lent / 1000.0 AS lent_gpu_seconds, burst AS burst_mib_seconds,
       burst_peak_mib, peak_mib, mib_seconds / nullif(memory_seconds, 0) AS mean_mib, device_seconds
FROM past_use WHERE user = :user AND ended_at >= :since;

-- name: expired
-- The highest number and the last end stay: no number and no place is given out twice. So do the latest ends that
-- nobody has counted yet, who counts them: by a clock that is set they may be of long ago.
SELECT number FROM history
WHERE ended_at < :before AND number < (SELECT max(number) FROM history)
    AND place < min((SELECT coalesce(max(place), 1) FROM history WHERE place > 0), max(
        :counted + 1, (SELECT coalesce(max(place), 1) FROM history WHERE place > 0) - :uncounted))
ORDER BY ended_at LIMIT :most;

-- name: oldest_of_user
SELECT number FROM history
WHERE user = :user AND number < (SELECT max(number) FROM history)
    AND place < min((SELECT coalesce(max(place), 1) FROM history WHERE place > 0), max(
        :counted + 1, (SELECT coalesce(max(place), 1) FROM history WHERE place > 0) - :uncounted))
ORDER BY ended_at LIMIT :most;

-- name: history_rows_of_user
SELECT count(*) FROM (SELECT 1 FROM history WHERE user = :user LIMIT :most);

-- name: add_to_past_use
INSERT INTO past_use (day, user, course, reason, touched, leases, requested_at, held_at, ended_at, held_seconds, used,
                      lent, burst, burst_peak_mib, peak_mib, mib_seconds, memory_seconds, device_seconds)
SELECT date(ended_at, 'unixepoch', 'localtime'), user, course, reason, coalesce(device_seconds > 0, -1), 1,
       requested_at, held_at, ended_at, held_seconds, used, lent, burst, burst_peak_mib,
       peak_mib, mib_seconds, memory_seconds, device_seconds
FROM history WHERE number = :number
ON CONFLICT (day, user, course, reason, touched) DO UPDATE SET
    leases = leases + 1,
    requested_at = min(requested_at, excluded.requested_at),
    held_at = coalesce(min(held_at, excluded.held_at), held_at, excluded.held_at),
    ended_at = max(ended_at, excluded.ended_at),
    held_seconds = held_seconds + excluded.held_seconds,
    used = used + excluded.used,
    lent = lent + excluded.lent,
    burst = burst + excluded.burst,
    burst_peak_mib = max(burst_peak_mib, excluded.burst_peak_mib),
    peak_mib = coalesce(max(peak_mib, excluded.peak_mib), peak_mib, excluded.peak_mib),
    mib_seconds = coalesce(mib_seconds + excluded.mib_seconds, mib_seconds, excluded.mib_seconds),
    memory_seconds = coalesce(memory_seconds + excluded.memory_seconds, memory_seconds, excluded.memory_seconds),
    device_seconds = coalesce(device_seconds + excluded.device_seconds, device_seconds, excluded.device_seconds);

-- name: delete_from_history
DELETE FROM history WHERE number = :number;

-- name: busy_of_lease
SELECT count(*) FROM busy WHERE number = :number;

-- name: add_busy
INSERT OR REPLACE INTO busy (number, began, seconds) VALUES (:number, :began, :seconds);

-- name: busy_times
SELECT history.id, busy.began, busy.seconds
FROM history JOIN busy ON busy.number = history.number
WHERE history.ended_at >= :since ORDER BY history.number, busy.began LIMIT :most;

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
    ready_within = :ready_within, deadline = :deadline, deadline_reason = :reason
WHERE number = :number;

-- name: set_deadline
-- A lease whose process was seen dead keeps its grace, whatever its holder says of itself.
-- What is held and attached to nothing yet may end sooner than it would, and never later.
UPDATE lease SET ready_within = NULL, deadline = :deadline, deadline_reason = :reason
WHERE number = :number AND deadline_reason IS NOT 'process-gone'
    AND (state <> 'held' OR process IS NOT NULL OR :deadline < deadline);

-- name: detach
UPDATE lease SET process = NULL, deadline = :deadline, deadline_reason = :reason WHERE number = :number;

-- name: has_been_busy
SELECT EXISTS (SELECT 1 FROM busy WHERE number = :number) AS found;

-- name: park
-- Why its slices were asked back is told until it has some again. What ends it ends it still. What is unused
-- was held for nothing but to be handed over to somebody else's queue: that is no grant, and nobody's use.
UPDATE lease SET state = 'parked', home = :home, slices = '[]', held_at = NULL, held_from = NULL, ends_by = NULL,
    terms = NULL,
    turn = NULL, waiting_since = NULL, reserved = '',
    first_held_at = iif(:unused AND held_before = 0, NULL, first_held_at),
    held_before = held_before + iif(:unused, 0, held_seconds(held_at, held_from, :now, :uptime)),
    used_before = used_before + iif(:unused, 0, milli * held_seconds(held_at, held_from, :now, :uptime)),
    deadline = iif(:queued AND deadline_reason = 'not-ready', NULL, deadline),
    deadline_reason = iif(:queued AND deadline_reason = 'not-ready', NULL, deadline_reason),
    notice = iif(asked_back IS NULL, '', notice), ending = NULL, outside = :queued,
    lent = lent + iif(:queued, milli * coalesce(max(0, :now - parked_at), 0), 0),
    parked_at = iif(:queued, NULL, coalesce(parked_at, :now)),
    burst_before = burst_before + burst_mib * coalesce(max(0, :now - burst_since), 0),
    burst_mib = 0, burst_since = NULL,
    idle_since = NULL, asked_for = NULL, resumed_at = NULL, parkings = :parkings
WHERE number = :number;

-- name: resume
UPDATE lease SET state = 'waiting', turn = :turn, waiting_since = :since, resumed_at = :now, queued_at = :uptime,
    overtaken = :overtaken, outside = 0
WHERE number = :number;

-- name: forget_home
UPDATE lease SET home = '' WHERE number = :number AND state <> 'held';

-- name: newcomers
-- Who waits and has not held anything yet.
SELECT number, waiting_since FROM lease WHERE turn IS NOT NULL AND first_held_at IS NULL;

-- name: gives_way
-- What was asked of it because somebody waits is answered by that it does not.
UPDATE lease SET idle_since = :idle_since,
    asked_back = iif(asked_back = 'yielded' AND :idle_since IS NULL, NULL, asked_back),
    asked_for = iif(:idle_since IS NULL, NULL, asked_for)
WHERE number = :number AND state = 'held';

-- name: has_worked
UPDATE lease SET returned_at = NULL WHERE number = :number AND returned_at <= :at;

-- name: may_be_asked
SELECT EXISTS (SELECT 1 FROM lease WHERE turn IS NOT NULL)
       AND EXISTS (SELECT 1 FROM lease WHERE idle_since IS NOT NULL) AS somebody,
       EXISTS (SELECT 1 FROM lease WHERE asked_for IS NOT NULL) AS is_asked;

-- name: idle
SELECT number, slices, terms, course, idle_since, returned_at, parkings, asked_back, asked_for
FROM lease WHERE idle_since IS NOT NULL ORDER BY number;

-- name: forget_unheard
-- Who was asked long ago and has not answered: others are asked.
UPDATE lease SET idle_since = NULL, asked_for = NULL, asked_back = iif(asked_back = 'yielded', NULL, asked_back)
WHERE asked_for IS NOT NULL AND NOT (asked_at BETWEEN :since AND :now);

-- name: needs_nobody
-- Who waited has left the queue: what idle kernels have that were asked for it stays with them.
UPDATE lease SET asked_for = NULL, asked_back = iif(asked_back = 'yielded', NULL, asked_back)
WHERE asked_for = :number AND state = 'held';

-- name: ask_for
UPDATE lease SET asked_back = 'yielded', asked_for = :waiter, asked_at = :now
WHERE number = :number AND asked_back IS NULL;

-- name: set_parkings
UPDATE lease SET parkings = :parkings WHERE number = :number;

-- name: giving_way
SELECT count(*) FROM lease WHERE asked_for = :number AND state = 'held';

-- name: remember
INSERT INTO history (number, id, key, request, milli, user, course, kernel, requested_at, held_at, ended_at,
                     held_seconds, used, reason, note, slices, peak_mib, mib_seconds, memory_seconds, device_seconds,
                     failure, batch, lent, burst, burst_peak_mib, job, place)
SELECT number, id, key, request, milli, user, course, kernel, requested_at, first_held_at, :now,
       held_before + held_seconds(held_at, held_from, :now, :uptime),
       used_before + milli * held_seconds(held_at, held_from, :now, :uptime),
       coalesce(ending, :reason), notice, slices,
       peak_mib, mib_seconds, memory_seconds, device_seconds, failure, batch,
       lent + milli * coalesce(max(0, :now - parked_at), 0),
       burst_before + burst_mib * coalesce(max(0, :now - burst_since), 0), burst_peak_mib, job,
       (SELECT coalesce(max(place), 0) + 1 FROM history WHERE place > 0)
FROM lease WHERE number = :number;

-- name: delete_lease
DELETE FROM lease WHERE number = :number;

-- name: overdue
-- A longest lease ends of what is held alone. Those in the queue, who may be many, are not looked through.
SELECT *, iif(deadline <= :now, deadline_reason, 'longest-lease') AS why
FROM lease WHERE turn IS NULL AND (deadline <= :now OR ends_by + :margin <= :now)
UNION ALL
SELECT *, deadline_reason AS why FROM lease WHERE turn IS NOT NULL AND deadline IS NOT NULL AND deadline <= :now;

-- name: lives
-- What keeps leases alive, each once: of those in the queue found by going from one to the next.
WITH RECURSIVE found (life) AS (
    SELECT min(life) FROM lease WHERE turn IS NOT NULL
    UNION ALL
    SELECT (SELECT min(lease.life) FROM lease WHERE turn IS NOT NULL AND lease.life > found.life)
    FROM found WHERE life IS NOT NULL
)
SELECT life FROM found WHERE life IS NOT NULL UNION SELECT life FROM lease WHERE turn IS NULL;

-- name: processes
SELECT number, id, request, process, keeper, pulse, grace, slices, held_at, held_from, milli, course, user, ending,
       notice, turn, deadline, deadline_reason, ends_by
FROM lease;

-- name: held
SELECT id, process, slices, notice FROM lease WHERE turn IS NULL AND state = 'held' ORDER BY number;

-- name: held_at_work
-- What is held, and whether its kernel idles.
SELECT number, id, slices, idle_since, burst_mib FROM lease WHERE turn IS NULL AND state = 'held' ORDER BY number;

-- name: set_burst
-- What it may use on top now; what is held stays.
UPDATE lease SET slices = :slices,
    burst_before = burst_before + burst_mib * coalesce(max(0, :now - burst_since), 0),
    burst_mib = :burst_mib, burst_since = iif(:burst_mib > 0, :now, NULL),
    burst_peak_mib = max(burst_peak_mib, :burst_mib)
WHERE number = :number;

-- name: add_to_lease
UPDATE lease SET
    peak_mib = coalesce(max(peak_mib, :peak_mib), peak_mib, :peak_mib),
    mib_seconds = coalesce(mib_seconds, 0) + :mib_seconds,
    memory_seconds = coalesce(memory_seconds, 0) + :memory_seconds,
    device_seconds = coalesce(device_seconds, 0) + :device_seconds
WHERE number = :number AND id = :id;

-- name: add_to_history
UPDATE history SET
    peak_mib = coalesce(max(peak_mib, :peak_mib), peak_mib, :peak_mib),
    mib_seconds = coalesce(mib_seconds, 0) + :mib_seconds,
    memory_seconds = coalesce(memory_seconds, 0) + :memory_seconds,
    device_seconds = coalesce(device_seconds, 0) + :device_seconds
WHERE number = :number AND id = :id;

-- name: set_notice
UPDATE lease SET notice = :notice, ending = :ending WHERE number = :number AND id = :id;

-- name: set_hibernation
UPDATE lease SET hibernation = :hibernation WHERE number = :number;

-- name: ask_back
UPDATE lease SET notice = :notice, asked_back = :reason, asked_for = NULL WHERE number = :number;

-- name: course_versions
SELECT number, user, text, saved_at FROM course_version
WHERE course = :course AND (:before IS NULL OR number < :before)
ORDER BY number DESC LIMIT :most;

-- name: add_course_version
INSERT INTO course_version (course, user, text, saved_at) VALUES (:course, :user, :text, :saved_at);

-- name: forget_course_versions
DELETE FROM course_version WHERE course = :course AND number <= (
    SELECT number FROM course_version WHERE course = :course ORDER BY number DESC LIMIT 1 OFFSET :most
);

-- name: remove_course_version
DELETE FROM course_version WHERE number = :number;

-- name: looked_at
SELECT looked_at FROM pool;

-- name: set_looked_at
UPDATE pool SET looked_at = :now;

-- name: sorted_until
SELECT sorted_until FROM pool;

-- name: set_sorted_until
UPDATE pool SET sorted_until = :until;

-- name: set_tried_at
-- Something has to differ, or nothing would be written.
UPDATE pool SET tried_at = max(:now, tried_at + 0.001);

-- name: node_starts
SELECT seconds FROM node_start WHERE node_group = :node_group ORDER BY number DESC;

-- name: add_node_start
INSERT INTO node_start (node_group, seconds, come_at) VALUES (:node_group, :seconds, :now);

-- name: forget_node_starts
DELETE FROM node_start WHERE node_group = :node_group AND number <= (
    SELECT number FROM node_start WHERE node_group = :node_group ORDER BY number DESC LIMIT 1 OFFSET :most
);

-- name: fail_lease
UPDATE lease SET failure = :failure WHERE number = :number AND id = :id;

-- name: add_job
UPDATE lease SET job = job || iif(job = '', '', ', ') || :job WHERE number = :number AND id = :id;

-- name: fail_history
UPDATE history SET failure = :failure WHERE number = :number AND id = :id;
