-- The catalog of version 6: one schema for each topic.
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS schemas (
    schema_id INTEGER PRIMARY KEY, message BLOB NOT NULL UNIQUE
) STRICT;
CREATE TABLE IF NOT EXISTS topics (
    topic_id BLOB PRIMARY KEY, name TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('changing', 'active', 'deleting')),
    version INTEGER NOT NULL, typed INTEGER NOT NULL,
    schema_id INTEGER NOT NULL REFERENCES schemas, settings TEXT NOT NULL,
    created_us INTEGER NOT NULL,
    delay_of BLOB NOT NULL DEFAULT x'', slot_counts TEXT NOT NULL DEFAULT '[]',
    bin INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE IF NOT EXISTS partitions (
    topic_id BLOB NOT NULL REFERENCES topics ON DELETE CASCADE, partition INTEGER NOT NULL,
    data_dir INTEGER NOT NULL, slot INTEGER NOT NULL, delete_before INTEGER NOT NULL,
    slots TEXT NOT NULL DEFAULT '', hand_over TEXT NOT NULL DEFAULT '[]',
    PRIMARY KEY (topic_id, partition), UNIQUE (slot)
) STRICT;
CREATE TABLE IF NOT EXISTS bin (
    topic_id BLOB PRIMARY KEY, name TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('kept', 'purging')),
    version INTEGER NOT NULL, typed INTEGER NOT NULL,
    schema_id INTEGER NOT NULL REFERENCES schemas, settings TEXT NOT NULL,
    created_us INTEGER NOT NULL, delay_of BLOB NOT NULL, slot_counts TEXT NOT NULL,
    partitions TEXT NOT NULL, deleted_us INTEGER NOT NULL, expires_ms INTEGER NOT NULL,
    bytes INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS data_dirs (
    number INTEGER PRIMARY KEY, directory_id TEXT NOT NULL UNIQUE, path TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS producers (
    producer_id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS overrides (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
INSERT INTO meta VALUES ('schema_version', 6), ('next_schema_id', 12);
INSERT INTO schemas VALUES (4, x'00ff'), (9, x'01'), (11, x'02');
INSERT INTO topics VALUES (x'000102030405060708090a0b0c0d0e0f', 'plain', 'active', 4, 0, 4, '{}', 77, x'', '[]', 0);
INSERT INTO topics VALUES (x'100102030405060708090a0b0c0d0e0f', 'typed', 'active', 7, 1, 9, '{}', 78, x'', '[]', 0);
INSERT INTO bin VALUES (x'200102030405060708090a0b0c0d0e0f', 'gone', 'kept', 5, 1, 11, '{}', 79, x'', '[]', '[[0,0,0,"",[]]]', 123, 456, 789);
INSERT INTO data_dirs VALUES (0, 'a', '/a');
INSERT INTO partitions VALUES (x'000102030405060708090a0b0c0d0e0f', 0, 0, 5, 0, '', '[]'), (x'100102030405060708090a0b0c0d0e0f', 0, 0, 6, 0, '', '[]');
