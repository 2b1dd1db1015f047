CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE schemas (schema_id INTEGER PRIMARY KEY, message BLOB NOT NULL UNIQUE) STRICT;
CREATE TABLE topics (
    topic_id BLOB PRIMARY KEY, name TEXT NOT NULL UNIQUE, state TEXT NOT NULL CHECK (state IN ('changing', 'active', 'deleting')),
    version INTEGER NOT NULL, typed INTEGER NOT NULL, schema_id INTEGER NOT NULL REFERENCES schemas, settings TEXT NOT NULL, created_us INTEGER NOT NULL,
    delay_of BLOB NOT NULL DEFAULT x''
) STRICT;
CREATE TABLE partitions (
    topic_id BLOB NOT NULL REFERENCES topics ON DELETE CASCADE, partition INTEGER NOT NULL, data_dir INTEGER NOT NULL, slot INTEGER NOT NULL,
    delete_before INTEGER NOT NULL, PRIMARY KEY (topic_id, partition), UNIQUE (slot)
) STRICT;
CREATE TABLE data_dirs (number INTEGER PRIMARY KEY, directory_id TEXT NOT NULL UNIQUE, path TEXT NOT NULL) STRICT;
CREATE TABLE producers (producer_id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL) STRICT;
INSERT INTO meta VALUES ('schema_version', 3), ('next_schema_id', 2);
INSERT INTO schemas VALUES (1, x'00ff');
INSERT INTO topics VALUES (x'000102030405060708090a0b0c0d0e0f', 'orders', 'active', 4, 0, 1, '{"retention.ms":-1}', 77, x'');
INSERT INTO partitions VALUES (x'000102030405060708090a0b0c0d0e0f', 0, 0, 5, 10), (x'000102030405060708090a0b0c0d0e0f', 1, 0, 6, 0);
INSERT INTO data_dirs VALUES (0, 'a', '/a');
INSERT INTO producers VALUES (7, 3);
