-- The catalog of version 8: users before SCRAM credentials.
BEGIN TRANSACTION;
CREATE TABLE acls (
    number INTEGER PRIMARY KEY AUTOINCREMENT, principal TEXT NOT NULL, resource_type TEXT NOT NULL,
    pattern TEXT NOT NULL, name TEXT NOT NULL, operation TEXT NOT NULL, is_allowed INTEGER NOT NULL,
    host TEXT NOT NULL,
    UNIQUE (principal, resource_type, pattern, name, operation, is_allowed, host)
) STRICT;
INSERT INTO "acls" VALUES(1,'User:a','topic','literal','t','read',1,'*');
CREATE TABLE bin (
    topic_id BLOB PRIMARY KEY, name TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('kept', 'purging')),
    version INTEGER NOT NULL, typed INTEGER NOT NULL,
    schema_id INTEGER NOT NULL REFERENCES schemas, settings TEXT NOT NULL,
    created_us INTEGER NOT NULL, delay_of BLOB NOT NULL, slot_counts TEXT NOT NULL,
    partitions TEXT NOT NULL, deleted_us INTEGER NOT NULL, expires_ms INTEGER NOT NULL,
    bytes INTEGER NOT NULL
) STRICT;
CREATE TABLE data_dirs (
    number INTEGER PRIMARY KEY, directory_id TEXT NOT NULL UNIQUE, path TEXT NOT NULL
) STRICT;
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
INSERT INTO "meta" VALUES('schema_version',8);
CREATE TABLE moves (
    topic_id BLOB NOT NULL, partition INTEGER NOT NULL, name TEXT NOT NULL,
    data_dir INTEGER NOT NULL, slot INTEGER NOT NULL, has_left INTEGER NOT NULL,
    PRIMARY KEY (topic_id, partition)
) STRICT;
CREATE TABLE overrides (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE partitions (
    topic_id BLOB NOT NULL REFERENCES topics ON DELETE CASCADE, partition INTEGER NOT NULL,
    data_dir INTEGER NOT NULL, slot INTEGER NOT NULL, delete_before INTEGER NOT NULL,
    slots TEXT NOT NULL DEFAULT '', hand_over TEXT NOT NULL DEFAULT '[]',
    PRIMARY KEY (topic_id, partition), UNIQUE (slot)
) STRICT;
CREATE TABLE producers (
    producer_id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL
) STRICT;
CREATE TABLE schema_versions (
    topic_id BLOB NOT NULL, schema_id INTEGER NOT NULL REFERENCES schemas,
    created_us INTEGER NOT NULL, author TEXT NOT NULL, PRIMARY KEY (topic_id, schema_id)
) STRICT;
CREATE TABLE schemas (
    schema_id INTEGER PRIMARY KEY, message BLOB NOT NULL
) STRICT;
CREATE TABLE topics (
    topic_id BLOB PRIMARY KEY, name TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('changing', 'active', 'deleting')),
    version INTEGER NOT NULL, typed INTEGER NOT NULL,
    schema_id INTEGER NOT NULL REFERENCES schemas, settings TEXT NOT NULL,
    created_us INTEGER NOT NULL,
    delay_of BLOB NOT NULL DEFAULT x'', slot_counts TEXT NOT NULL DEFAULT '[]',
    bin INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE user_accounts (
    account INTEGER PRIMARY KEY, user TEXT NOT NULL REFERENCES users ON DELETE CASCADE
) STRICT;
INSERT INTO "user_accounts" VALUES(1000,'a');
CREATE TABLE user_keys (
    user TEXT NOT NULL REFERENCES users ON DELETE CASCADE, name TEXT NOT NULL,
    public TEXT NOT NULL UNIQUE, created_us INTEGER NOT NULL, expires_us INTEGER NOT NULL,
    PRIMARY KEY (user, name)
) STRICT;
INSERT INTO "user_keys" VALUES('a','k','rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7',77,0);
CREATE TABLE users (
    name TEXT PRIMARY KEY, is_admin INTEGER NOT NULL, is_disabled INTEGER NOT NULL,
    user_groups TEXT NOT NULL, password_hash TEXT NOT NULL,
    created_us INTEGER NOT NULL
) STRICT;
INSERT INTO "users" VALUES('a',0,0,'["g"]','$argon2id$v=19$m=65536,t=3,p=4$c29tZXNhbHRzb21l$RdescudvJCsgt3ub+b4dWRWJTmaaJObG',77);
INSERT INTO "users" VALUES('b',0,1,'[]','',77);
CREATE INDEX keys_of_users ON user_keys (user);
CREATE INDEX accounts_of_users ON user_accounts (user);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('acls',1);
COMMIT;
