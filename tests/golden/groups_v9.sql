BEGIN TRANSACTION;
CREATE TABLE decisions (ordinal INTEGER PRIMARY KEY, content BLOB NOT NULL) STRICT;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, kind TEXT NOT NULL CHECK (kind IN ('consumer', 'share')), epoch INTEGER NOT NULL,
    assignor TEXT NOT NULL, rebalances INTEGER NOT NULL, created_ms INTEGER NOT NULL, empty_since_ms INTEGER NOT NULL, detail TEXT NOT NULL,
    empty_elapsed_ms INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO "groups" VALUES(1,'work','consumer',4,'range',3,1700000000000,0,'{}',0);
CREATE TABLE members (
    group_id INTEGER NOT NULL, member_id TEXT NOT NULL, epoch INTEGER NOT NULL, settings TEXT NOT NULL, assignment TEXT NOT NULL, target TEXT NOT NULL,
    PRIMARY KEY (group_id, member_id)
) STRICT, WITHOUT ROWID;
INSERT INTO "members" VALUES(1,'m1',4,'[["orders"],null,"c","range",45000,300000,3000,true,""]','[3,"stable",false,{},{}]','{}');
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
INSERT INTO "meta" VALUES('schema_version',9);
CREATE TABLE offsets (
    group_id INTEGER NOT NULL, topic_id TEXT NOT NULL, partition INTEGER NOT NULL, committed INTEGER NOT NULL, leader_epoch INTEGER NOT NULL,
    metadata TEXT NOT NULL, committed_ms INTEGER NOT NULL, committed_elapsed_ms INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (group_id, topic_id, partition)
) STRICT, WITHOUT ROWID;
CREATE TABLE share_partitions (
    group_id INTEGER NOT NULL, topic_id TEXT NOT NULL, partition INTEGER NOT NULL, state BLOB NOT NULL, PRIMARY KEY (group_id, topic_id, partition)
) STRICT, WITHOUT ROWID;
CREATE TABLE transactional_ids (
    id_number INTEGER PRIMARY KEY, transactional_id TEXT NOT NULL UNIQUE, producer_id INTEGER NOT NULL, epoch INTEGER NOT NULL, owner INTEGER NOT NULL,
    ordinal INTEGER NOT NULL, timeout_ms INTEGER NOT NULL, used_elapsed_ms INTEGER NOT NULL, owned_ms INTEGER NOT NULL, is_registered INTEGER NOT NULL,
    client_id TEXT NOT NULL, ended TEXT NOT NULL, attempt TEXT NOT NULL, prepared TEXT NOT NULL DEFAULT '',
    branches TEXT NOT NULL DEFAULT ''
, metadata TEXT NOT NULL DEFAULT '', replaced TEXT NOT NULL DEFAULT '', staged TEXT NOT NULL DEFAULT '', user_name TEXT NOT NULL DEFAULT '') STRICT;
INSERT INTO "transactional_ids" VALUES(1,'sink',4611686048492158976,3,7,9,60000,100,1700000000000,1,'c','[]','attempt-1','','[2,[[4611686048492158977,3],[4611686048492158978,0]]]','','','','ann');
CREATE INDEX offsets_by_topic ON offsets (topic_id);
CREATE INDEX registered_ids ON transactional_ids (id_number) WHERE is_registered = 1;
CREATE INDEX unregistered_ids ON transactional_ids (used_elapsed_ms) WHERE is_registered = 0;
COMMIT;
