"""Partitions that are about to move to another data directory, and those that have moved and whose
former files are still there.

Owner: the controller.

Invariants:
- A row is written with the decision that closes the partition. It has left with the decision that
  moves it, and is open with the decision that opens it in its new place, each in one transaction.
- Its slot is given to no other partition before the former files are removed.
- A partition that has left and is not open has no record that its former files lack.

Crash: a successor opens a partition that was closed and has not left, and removes the former files
of one that is open in its new place.
"""

from __future__ import annotations

import enum
import sqlite3
from typing import NamedTuple

from appliance.catalog.catalog import Catalog
from appliance.catalog.database import refusals
from appliance.catalog.rows import COMES_BACK, PartitionRow, Topic
from appliance.catalog.transaction import Transaction


@enum.unique
class Stage(enum.IntEnum):
    """Stage of a move, a number in the catalog. Earlier builds take LEFT for OPEN, and wrote OPEN
    with the decision that moves the partition.
    """

    CLOSED = 0
    """It is closed where it was, and the decision to move it may still come."""
    OPEN = 1
    """It has another place, and may have records there."""
    LEFT = 2
    """It has another place, and is closed there until that is open: it may still go back."""


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
    stage: Stage


def read_moved(database: sqlite3.Connection) -> list[MovedPartition]:
    """All rows."""
    rows = database.execute("SELECT * FROM moves ORDER BY name, partition")
    return [
        MovedPartition(topic_id, partition, name, data_dir, slot, Stage(stage))
        for topic_id, partition, name, data_dir, slot, stage in rows
    ]


def insert_moved(database: sqlite3.Connection, moved: MovedPartition) -> None:
    """Add a row, in the place of that of the partition."""
    database.execute("INSERT OR REPLACE INTO moves VALUES (?, ?, ?, ?, ?, ?)", moved)


def delete_moved(database: sqlite3.Connection, topic_id: bytes, partition: int) -> None:
    """Remove a row."""
    database.execute(
        "DELETE FROM moves WHERE topic_id = ? AND partition = ?", (topic_id, partition)
    )


class MovedPartitions:
    """Decisions to move partitions, and the table `moves`."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._db = catalog.database
        self._slots = catalog.slots

    def close(self, topic: Topic, partition: int) -> Topic:
        """Decide that a partition is about to move: the topic's next version, in state `changing`,
        which closes it for appends.
        """
        row = topic.partitions[partition]
        with refusals(), Transaction(self._db):
            insert_moved(
                self._db,
                MovedPartition(
                    topic.topic_id, partition, topic.name, row.data_dir, row.slot, Stage.CLOSED
                ),
            )
            return self._catalog.alter_topic(topic, topic.given, len(topic.partitions))

    def cancel(self, topic: Topic, partition: int) -> Topic:
        """Decide that a closed partition stays: the topic's next version, which opens it."""
        with refusals(), Transaction(self._db):
            delete_moved(self._db, topic.topic_id, partition)
            return self._catalog.alter_topic(topic, topic.given, len(topic.partitions))

    def move(self, topic: Topic, partition: int, data_dir: int) -> Topic:
        """Decide that a partition is in the data directory of this number from now on, in a slot of
        its own: the topic's next version, in state `changing`, with which the copy is opened there,
        closed for appends. Raises CatalogFullError.
        """
        former = topic.partitions[partition]
        with refusals(), Transaction(self._db):
            slot = next(self._slots.free(), None)
            if slot is None:
                raise self._slots.full()
            self._replace(topic, former, Stage.LEFT, data_dir, slot)
        self._slots.used.add(slot)
        return self._catalog.known(topic.name)

    def open(self, topic: Topic, partition: int) -> Topic:
        """Decide that a partition that has left takes batches in its new place: the topic's next
        version. It does not go back from now on.
        """
        with refusals(), Transaction(self._db):
            self._db.execute(
                "UPDATE moves SET has_left = ? WHERE topic_id = ? AND partition = ?",
                (Stage.OPEN, topic.topic_id, partition),
            )
            return self._catalog.alter_topic(topic, topic.given, len(topic.partitions))

    def go_back(self, topic: Topic, partition: int, place: PartitionRow) -> Topic:
        """Decide that a partition that has left, and is not open in its new place, is in `place`
        again, where it was: the topic's next version, which opens it there. What is in the new
        place is to be removed.
        """
        with refusals(), Transaction(self._db):
            left = topic.partitions[partition]
            self._replace(topic, left, Stage.OPEN, place.data_dir, place.slot)
        return self._catalog.known(topic.name)

    def _replace(
        self, topic: Topic, former: PartitionRow, stage: Stage, data_dir: int, slot: int
    ) -> None:
        """Give a partition another place. Its files are there already."""
        insert_moved(
            self._db,
            MovedPartition(
                topic.topic_id, former.partition, topic.name, former.data_dir, former.slot, stage
            ),
        )
        self._db.execute(
            "UPDATE partitions SET data_dir = ?, slot = ? WHERE topic_id = ? AND partition = ?",
            (data_dir, slot, topic.topic_id, former.partition),
        )
        self._db.execute(
            "UPDATE topics SET version = version + 1, state = 'changing', bin = ? WHERE "
            "topic_id = ?",
            (COMES_BACK, topic.topic_id),
        )

    def all(self) -> list[MovedPartition]:
        """Partitions that are closed for a move, and those whose files in their former
        directories are not removed yet.
        """
        with refusals():
            return read_moved(self._db)

    def forget(self, moved: MovedPartition) -> None:
        """Note that nothing is left of a move: the former files are removed and their slot is
        free, or the topic of a closed partition is gone.
        """
        with refusals(), Transaction(self._db):
            delete_moved(self._db, moved.topic_id, moved.partition)
            self._slots.reload()
