-- When the kernel of a lease worked on what was submitted, as its server says. Goes with the lease's history.
CREATE TABLE busy (
    number          INTEGER NOT NULL,            -- of the lease
    began           REAL NOT NULL,               -- Unix seconds
    seconds         REAL NOT NULL,
    PRIMARY KEY (number, began)
) WITHOUT ROWID;
CREATE TRIGGER busy_forgotten AFTER DELETE ON history BEGIN
    DELETE FROM busy WHERE number = OLD.number;
END;
