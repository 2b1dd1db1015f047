"""Partitions that are about to move to another data directory, and those that have moved and whose
former files are still there.

Owner: the controller; `appliance.catalog.catalog` decides when rows are written.

Invariants:
- A row is written with the decision that closes the partition, and has left with the decision that
  moves it, each in one transaction.
- Its slot is given to no other partition before the former files are removed.

Crash: a successor opens a partition that was closed and has not left, and removes the former files
of one that has.
"""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

_TABLE = """
CREATE TABLE IF NOT EXISTS moves (
    topic_id BLOB NOT NULL, partition INTEGER NOT NULL, name TEXT NOT NULL,
    data_dir INTEGER NOT NULL, slot INTEGER NOT NULL, has_left INTEGER NOT NULL,
    PRIMARY KEY (topic_id, partition)
) STRICT;
"""


class MovedPartition(NamedTuple):
    """A partition in the place that it leaves."""

    topic_id: bytes
    partition: int
    name: str
    """Name of its topic, when it moved."""
    data_dir: int
    """The catalog's number of that directory."""
    slot: int
    """Its slot there."""
    has_left: bool
    """False: it is closed there, and the decision to move it may still come."""


def create_moves(database: sqlite3.Connection) -> None:
    """Make the table, if it is missing."""
    database.executescript(_TABLE)


def read_moved(database: sqlite3.Connection) -> list[MovedPartition]:
    """All rows."""
    rows = database.execute("SELECT * FROM moves ORDER BY name, partition")
    return [
        MovedPartition(topic_id, partition, name, data_dir, slot, bool(has_left))
        for topic_id, partition, name, data_dir, slot, has_left in rows
    ]


def insert_moved(database: sqlite3.Connection, moved: MovedPartition) -> None:
    """Add a row, in the place of that of the partition."""
    database.execute("INSERT OR REPLACE INTO moves VALUES (?, ?, ?, ?, ?, ?)", moved)


def delete_moved(database: sqlite3.Connection, topic_id: bytes, partition: int) -> None:
    """Remove a row."""
    database.execute(
        "DELETE FROM moves WHERE topic_id = ? AND partition = ?", (topic_id, partition)
    )


def slots_in_use(database: sqlite3.Connection) -> set[int]:
    """The slots of partitions, in their present and former places."""
    rows = database.execute("SELECT slot FROM partitions UNION SELECT slot FROM moves")
    return {slot for (slot,) in rows}
