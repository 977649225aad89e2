-- How long the latest nodes took to start that an autoscaler started for the pool, by group.
CREATE TABLE node_start (
    number          INTEGER PRIMARY KEY,
    node_group      TEXT NOT NULL,
    seconds         REAL NOT NULL,               -- from asking for it until its GPUs were there
    come_at         REAL NOT NULL                -- Unix seconds
);
CREATE INDEX node_start_by_group ON node_start (node_group, number);
