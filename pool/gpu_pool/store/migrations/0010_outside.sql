-- Whether it is parked since it waits in a queue that is not the pool's own. Until now that followed from its pod;
-- what stands for all GPUs of a kind is granted nowhere else.
ALTER TABLE lease ADD COLUMN outside INTEGER NOT NULL DEFAULT 0;
UPDATE lease SET outside = 1 WHERE state = 'parked' AND home LIKE 'any-%';
