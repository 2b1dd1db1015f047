BEGIN TRANSACTION;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, kind TEXT NOT NULL CHECK (kind IN ('consumer', 'share')), epoch INTEGER NOT NULL,
    assignor TEXT NOT NULL, rebalances INTEGER NOT NULL, created_ms INTEGER NOT NULL, empty_since_ms INTEGER NOT NULL, detail TEXT NOT NULL
) STRICT;
INSERT INTO "groups" VALUES(1,'nightly','consumer',3,'sticky',2,1700000000000,1700000100000,'{"topics":{},"begun":{"00000000000000000000000000000001":4},"begins":{},"trouble":"","is_dirty":false}');
INSERT INTO "groups" VALUES(2,'workers','share',2,'',0,1700000000000,1700000200000,'{}');
CREATE TABLE members (
    group_id INTEGER NOT NULL, member_id TEXT NOT NULL, epoch INTEGER NOT NULL, settings TEXT NOT NULL, assignment TEXT NOT NULL, target TEXT NOT NULL,
    PRIMARY KEY (group_id, member_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
INSERT INTO "meta" VALUES('schema_version',1);
CREATE TABLE offsets (
    group_id INTEGER NOT NULL, topic_id TEXT NOT NULL, partition INTEGER NOT NULL, committed INTEGER NOT NULL, leader_epoch INTEGER NOT NULL,
    metadata TEXT NOT NULL, committed_ms INTEGER NOT NULL, PRIMARY KEY (group_id, topic_id, partition)
) STRICT, WITHOUT ROWID;
INSERT INTO "offsets" VALUES(1,'00000000000000000000000000000001',0,5,-1,'by hand',1700000050000);
CREATE TABLE share_partitions (
    group_id INTEGER NOT NULL, topic_id TEXT NOT NULL, partition INTEGER NOT NULL, state BLOB NOT NULL, PRIMARY KEY (group_id, topic_id, partition)
) STRICT, WITHOUT ROWID;
INSERT INTO "share_partitions" VALUES(2,'00000000000000000000000000000001',0,X'01000000444DDA7A030104016D0101010001020103010002');
CREATE INDEX offsets_by_topic ON offsets (topic_id);
COMMIT;
