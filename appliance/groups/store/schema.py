"""The tables of groups.db: their SQL, the migration between versions, and one type for each row.

Owner: none; constants and plain values. Field names are the names of the columns.
Invariants: the stored version is that of the tables, after each commit of a migration.
Crash: a migration goes on from the stored version.
"""

from __future__ import annotations

from typing import NamedTuple

SCHEMA_VERSION = 10
TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS groups (
    group_id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, kind TEXT NOT NULL CHECK (kind IN ('consumer', 'share')), epoch INTEGER NOT NULL,
    assignor TEXT NOT NULL, rebalances INTEGER NOT NULL, created_ms INTEGER NOT NULL, empty_since_ms INTEGER NOT NULL, detail TEXT NOT NULL,
    empty_elapsed_ms INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE IF NOT EXISTS members (
    group_id INTEGER NOT NULL, member_id TEXT NOT NULL, epoch INTEGER NOT NULL, settings TEXT NOT NULL, assignment TEXT NOT NULL, target TEXT NOT NULL,
    PRIMARY KEY (group_id, member_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS offsets (
    group_id INTEGER NOT NULL, topic_id TEXT NOT NULL, partition INTEGER NOT NULL, committed INTEGER NOT NULL, leader_epoch INTEGER NOT NULL,
    metadata TEXT NOT NULL, committed_ms INTEGER NOT NULL, committed_elapsed_ms INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (group_id, topic_id, partition)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS offsets_by_topic ON offsets (topic_id);
CREATE TABLE IF NOT EXISTS share_partitions (
    group_id INTEGER NOT NULL, topic_id TEXT NOT NULL, partition INTEGER NOT NULL, state BLOB NOT NULL, PRIMARY KEY (group_id, topic_id, partition)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS transactional_ids (
    id_number INTEGER PRIMARY KEY, transactional_id TEXT NOT NULL UNIQUE, producer_id INTEGER NOT NULL, epoch INTEGER NOT NULL, owner INTEGER NOT NULL,
    ordinal INTEGER NOT NULL, timeout_ms INTEGER NOT NULL, used_elapsed_ms INTEGER NOT NULL, owned_ms INTEGER NOT NULL, is_registered INTEGER NOT NULL,
    client_id TEXT NOT NULL, ended TEXT NOT NULL, attempt TEXT NOT NULL, prepared TEXT NOT NULL DEFAULT '',
    branches TEXT NOT NULL DEFAULT '', metadata TEXT NOT NULL DEFAULT '', replaced TEXT NOT NULL DEFAULT '',
    staged TEXT NOT NULL DEFAULT '', user_name TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX IF NOT EXISTS registered_ids ON transactional_ids (id_number) WHERE is_registered = 1;
CREATE INDEX IF NOT EXISTS unregistered_ids ON transactional_ids (used_elapsed_ms) WHERE is_registered = 0;
CREATE TABLE IF NOT EXISTS decisions (ordinal INTEGER PRIMARY KEY, content BLOB NOT NULL) STRICT;
"""  # noqa: E501
FROM_1_TO_2 = """
BEGIN;
ALTER TABLE groups ADD COLUMN empty_elapsed_ms INTEGER NOT NULL DEFAULT 0;
ALTER TABLE offsets ADD COLUMN committed_elapsed_ms INTEGER NOT NULL DEFAULT 0;
UPDATE meta SET value = 2 WHERE name = 'schema_version';
COMMIT;
"""
"""Version 1 had no elapsed time. Its groups and offsets expire as if left or committed
at the migration.
"""
FROM_2_TO_NEWEST = f"""
BEGIN;
{TABLES}
UPDATE meta SET value = {SCHEMA_VERSION} WHERE name = 'schema_version';
COMMIT;
"""
"""Version 2 had no transactions. Their tables are made as the newest version has them, so this is
that version.
"""
FROM_3_TO_4 = """
BEGIN;
ALTER TABLE transactional_ids ADD COLUMN prepared TEXT NOT NULL DEFAULT '';
UPDATE meta SET value = 4 WHERE name = 'schema_version';
COMMIT;
"""
"""Version 3 had no prepared transactions."""
FROM_4_TO_5 = """
BEGIN;
ALTER TABLE transactional_ids ADD COLUMN branches TEXT NOT NULL DEFAULT '';
UPDATE meta SET value = 5 WHERE name = 'schema_version';
COMMIT;
"""
"""Version 4 had no branches, and neither offsets nor acknowledgements in a prepared transaction."""
FROM_5_TO_6 = """
BEGIN;
ALTER TABLE transactional_ids ADD COLUMN metadata TEXT NOT NULL DEFAULT '';
ALTER TABLE transactional_ids ADD COLUMN replaced TEXT NOT NULL DEFAULT '';
UPDATE meta SET value = 6 WHERE name = 'schema_version';
COMMIT;
"""
"""Version 5 had neither metadata of commits nor shared owners."""
FROM_6_TO_7 = "UPDATE meta SET value = 7 WHERE name = 'schema_version';"
"""Version 6 had no patterns: the list of a member's settings was one shorter."""
FROM_7_TO_8 = """
BEGIN;
ALTER TABLE transactional_ids ADD COLUMN staged TEXT NOT NULL DEFAULT '';
UPDATE meta SET value = 8 WHERE name = 'schema_version';
COMMIT;
"""
"""Version 7 had nothing staged."""
FROM_8_TO_9 = """
BEGIN;
ALTER TABLE transactional_ids ADD COLUMN user_name TEXT NOT NULL DEFAULT '';
UPDATE meta SET value = 9 WHERE name = 'schema_version';
COMMIT;
"""
"""Version 8 did not know the users of transactional ids."""
FROM_9_TO_10 = "UPDATE meta SET value = 10 WHERE name = 'schema_version';"
"""Version 9 had no users of members: the list of a member's settings was one shorter."""
MIGRATIONS = {
    1: FROM_1_TO_2,
    2: FROM_2_TO_NEWEST,
    3: FROM_3_TO_4,
    4: FROM_4_TO_5,
    5: FROM_5_TO_6,
    6: FROM_6_TO_7,
    7: FROM_7_TO_8,
    8: FROM_8_TO_9,
    9: FROM_9_TO_10,
}
"""The script that leads on from each older version. It is one transaction, which stores the version
whose tables it leaves: a kill leaves a version that the next start migrates.
"""


class GroupRow(NamedTuple):
    """A group.

    `empty_since_ms`: wall clock of its last member's end, for display; 0 while it has members.
    `empty_elapsed_ms`: the same in elapsed time, by which the group expires.
    `detail`: JSON of the group's kind.
    """

    group_id: int
    name: str
    kind: str
    epoch: int
    assignor: str
    rebalances: int
    created_ms: int
    empty_since_ms: int
    detail: str
    empty_elapsed_ms: int = 0


class MemberRow(NamedTuple):
    """A member. `settings`, `assignment` and `target` are JSON."""

    group_id: int
    member_id: str
    epoch: int
    settings: str
    assignment: str
    target: str


class OffsetRow(NamedTuple):
    """A committed offset, the offset of the next record to read. `committed_ms`: wall clock.
    `committed_elapsed_ms`: elapsed time.
    """

    group_id: int
    topic_id: str
    partition: int
    committed: int
    leader_epoch: int
    metadata: str
    committed_ms: int
    committed_elapsed_ms: int = 0


class ShareRow(NamedTuple):
    """The state of a share partition, as `appliance.groups.share.partition.codec` encodes it."""

    group_id: int
    topic_id: str
    partition: int
    state: bytes


class TransactionalIdRow(NamedTuple):
    """A transactional id.

    `producer_id`, `epoch`: of its current transaction, or of the next one.
    `owner`: number of its newest owner, the ordinal of the decision that made it the owner.
    `ordinal`: of its newest decision.
    `used_elapsed_ms`: elapsed time of its newest decision, by which it expires.
    `owned_ms`: wall clock of its newest owner's beginning, for display.
    `is_registered`: the workers take batches of (producer_id, epoch).
    `ended`: JSON of its newest ends of transactions.
    `attempt`: the random text of the INIT_TRANSACTIONS that made its newest owner, or "".
    `prepared`: JSON about its current transaction if that is prepared, or "".
    `branches`: JSON of its branch producers, or "".
    `metadata`: the text of the last commit that had one, or "".
    `replaced`: JSON of the names of shared owners that were replaced, or "".
    `staged`: the text that its owner has left with its current transaction, or "".
    `user_name`: the user of its newest owner, who alone may write with its producer ids; "" without
    users.
    """

    id_number: int
    transactional_id: str
    producer_id: int
    epoch: int
    owner: int
    ordinal: int
    timeout_ms: int
    used_elapsed_ms: int
    owned_ms: int
    is_registered: int
    client_id: str
    ended: str
    attempt: str = ""
    prepared: str = ""
    branches: str = ""
    metadata: str = ""
    replaced: str = ""
    staged: str = ""
    user_name: str = ""
