"""The offsets of a group in a SQL table: one row for each partition.

A row has the offset of the first record that is not applied, and the topic's id.

Owner: one thread. All sinks of the group share the rows.
Invariants: a row changes only from the value that the transaction has read (an optimistic lock). Of
    two transactions over the same records one commits, and the other raises OffsetsMovedError.
Crash: rows change in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tailrace.core.errors import FencedMemberError
from tailrace.core.topic_partition import TopicPartition
from tailrace.idempotent.dbapi import Database, Session, is_integrity_error

_COLUMNS = """
    group_name VARCHAR(249) NOT NULL, topic VARCHAR(249) NOT NULL, partition_number INTEGER NOT NULL,
    next_offset BIGINT NOT NULL, topic_id VARCHAR(32) NOT NULL, PRIMARY KEY (group_name, topic, partition_number)
"""  # noqa: E501
PARTITIONS_AT_ONCE = 500
"""Partitions in one query. Some databases limit the number of parameters."""


class OffsetsMovedError(FencedMemberError):
    """Another consumer of the group has applied these records meanwhile. This transaction was
    rolled back.
    """

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail)
        self.advice = (
            "Nothing of this transaction is there: call seek(consumer) and go on with "
            "the next poll."
        )


class StoredOffset(NamedTuple):
    """A row of the table."""

    next_offset: int
    topic_id: str


class OffsetTable:
    """Reads and moves the rows of one group."""

    def __init__(self, database: Database, table: str, group: str) -> None:
        """Create the table if it is missing. Raises what the driver raises."""
        self._table = table
        self._group = group
        self.topic_ids: dict[str, str] = {}
        """Topic -> its present id, as the consumer has shown it. A recreated topic has another."""
        database.make_table(table, _COLUMNS)

    def position(self, key: TopicPartition, row: StoredOffset | None) -> int | None:
        """The offset of a row. None: there is no row, or it belongs to a deleted topic."""
        known = self.topic_ids.get(key.topic, "")
        if row is None or (known and row.topic_id and row.topic_id != known):
            return None
        return row.next_offset

    def rows(
        self, session: Session, keys: Sequence[TopicPartition]
    ) -> dict[TopicPartition, StoredOffset]:
        """Read the rows of these partitions that exist."""
        numbers: dict[str, list[int]] = {}
        for key in keys:
            numbers.setdefault(key.topic, []).append(key.partition)
        result: dict[TopicPartition, StoredOffset] = {}
        for topic, requested in numbers.items():
            for start in range(0, len(requested), PARTITIONS_AT_ONCE):
                some = requested[start : start + PARTITIONS_AT_ONCE]
                found = session.rows(
                    f"SELECT topic, partition_number, next_offset, topic_id FROM {self._table} "
                    "WHERE group_name = ? AND topic = ? "
                    f"AND partition_number IN ({', '.join('?' * len(some))})",
                    self._group, topic, *some,
                )  # fmt: skip
                # A database that compares without case finds other topics too.
                result.update(
                    {
                        TopicPartition(topic, int(r[1])): StoredOffset(int(r[2]), str(r[3]))
                        for r in found
                        if r[0] == topic
                    }
                )
        return result

    def store(
        self, session: Session, key: TopicPartition, row: StoredOffset | None, offset: int
    ) -> None:
        """Move a row from the value that was read to `offset`. Raises OffsetsMovedError if it has
        another value.
        """
        topic_id = self.topic_ids.get(key.topic, row.topic_id if row is not None else "")
        try:
            if row is None:
                moved = session.change(
                    f"INSERT INTO {self._table} (group_name, topic, partition_number, "
                    "next_offset, topic_id) VALUES (?, ?, ?, ?, ?)",
                    self._group, key.topic, key.partition, offset, topic_id,
                )  # fmt: skip
            else:
                moved = session.change(
                    f"UPDATE {self._table} SET next_offset = ?, topic_id = ? "
                    "WHERE group_name = ? AND topic = ? AND partition_number = ? AND next_offset "
                    "= ? AND topic_id = ?",
                    offset, topic_id, self._group, key.topic, key.partition, row.next_offset,
                    row.topic_id,
                )  # fmt: skip
        except Exception as error:
            if not is_integrity_error(error):
                raise
            moved = 0
        if moved != 1:
            raise OffsetsMovedError(
                f"another consumer of {self._group!r} has moved the offset of "
                f"{key.topic}-{key.partition} meanwhile"
            )
