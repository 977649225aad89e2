-- What failed is kept as JSON, in which a kernel's message had another name. A quotation mark inside a
-- text is written as \" there, so only the name itself is found.
UPDATE lease SET failure = replace(failure, '"words": ', '"message": ') WHERE failure <> '';
UPDATE history SET failure = replace(failure, '"words": ', '"message": ') WHERE failure <> '';
