"""Places of partitions: their slots in shared memory, and the numbers of the data directories.

Owner: the controller.
Invariants:
- Slots are unique among the partitions of existing topics, in their present and former places.
- A data directory keeps its number.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from appliance.catalog.transaction import Database, Transaction

logger = logging.getLogger(__name__)

_TABLE = """
CREATE TABLE IF NOT EXISTS moves (
    topic_id BLOB NOT NULL, partition INTEGER NOT NULL, name TEXT NOT NULL,
    data_dir INTEGER NOT NULL, slot INTEGER NOT NULL, has_left INTEGER NOT NULL,
    PRIMARY KEY (topic_id, partition)
) STRICT;
"""


def missing_sentence(missing: Sequence[tuple[str, int]], listed: Collection[str]) -> str:
    """The sentence for directories, (path, number of partitions), that the catalog knows and a
    start does not find. `listed`: the paths of data_dirs, absolute.
    """
    counted = [(path, f"{count} partition{'' if count == 1 else 's'}") for path, count in missing]
    lost = [f"the {count} of {path}" for path, count in counted if path in listed]
    unlisted = [f"{path} with {count}" for path, count in counted if path not in listed]
    parts = []
    if lost:
        parts.append(f"{', '.join(lost)} are not there: mount its disk")
    if unlisted:
        parts.append(
            f"data_dirs lacks {', '.join(unlisted)}: mount its disk, and list every directory that "
            "holds partitions"
        )
    return f"{'; '.join(parts)}. For a disk that is lost for good: tailrace disk replace"


class MissingDirectoryError(RuntimeError):
    """A data directory that holds partitions is not configured."""


class CatalogFullError(RuntimeError):
    """The slots are used up: another partition gets none."""


class PartitionSlots:
    """Slots in use, and the data directories that partitions are added to."""

    def __init__(self, database: Database, count: int) -> None:
        """Raises sqlite3.Error."""
        self._db = database
        self._count = count
        self._usable: list[int] = [0]
        self.takes_writes: Callable[[int], bool] = lambda _number: True
        """False for the number of a data directory whose disk is gone or full: it gets no new
        partitions while another one takes writes.
        """
        self.is_drained: Callable[[int], bool] = lambda _number: False
        """True for the number of a data directory that is being emptied: it gets no new partitions
        while another one takes writes.
        """
        database.executescript(_TABLE)
        self.used: set[int] = set()
        self.reload()

    @property
    def needed(self) -> int:
        """One more than the highest slot that a partition has."""
        return max(self.used, default=-1) + 1

    def free(self) -> Iterator[int]:
        """Slots that no partition has."""
        return (slot for slot in range(self._count) if slot not in self.used)

    def full(self) -> CatalogFullError:
        """The error for a partition without a slot."""
        return CatalogFullError(
            f"all {self._count} partition slots are in use; raise `slots` in the configuration"
        )

    def reload(self) -> None:
        """Read the slots in use: a change was undone, or rows are gone. Raises sqlite3.Error."""
        rows = self._db.execute("SELECT slot FROM partitions UNION SELECT slot FROM moves")
        self.used = {slot for (slot,) in rows}

    def try_reload(self) -> None:
        """Read the slots in use, if the database can be read."""
        try:
            self.reload()
        except sqlite3.Error:
            logger.exception("slots_not_read")

    def register(self, directories: list[tuple[str, str]]) -> list[int]:
        """Give every configured directory, (identity, path), its number; returns them in that
        order. Raises MissingDirectoryError, sqlite3.Error.
        """
        with Transaction(self._db):
            for directory_id, path in directories:
                self._db.execute(
                    "INSERT INTO data_dirs VALUES ((SELECT coalesce(max(number) + 1, 0) FROM "
                    "data_dirs), ?, ?)"
                    " ON CONFLICT (directory_id) DO UPDATE SET path = excluded.path",
                    (directory_id, path),
                )
        numbers = {
            directory_id: number
            for number, directory_id in self._db.execute(
                "SELECT number, directory_id FROM data_dirs"
            )
        }
        self._usable = [numbers[directory_id] for directory_id, _ in directories]
        marks = ",".join("?" * len(self._usable))
        missing = self._db.execute(
            "SELECT path, count(*) FROM partitions JOIN data_dirs ON number = data_dir WHERE "
            f"number NOT IN ({marks}) GROUP BY path",
            self._usable,
        ).fetchall()
        if missing:
            listed = {path for _, path in directories}
            raise MissingDirectoryError(missing_sentence(missing, listed))
        return self._usable

    def add(self, topic_id: bytes, start: int, end: int, delay_of: bytes) -> set[int]:
        """The slots of added partitions. Partitions of a delay log are in the data directories of
        their topic's.
        """
        beside = dict(
            self._db.execute(
                "SELECT partition, data_dir FROM partitions WHERE topic_id = ?", (delay_of,)
            )
        )
        usable = self._usable
        if len(usable) > 1:
            usable = [number for number in usable if self.takes_writes(number)] or usable
            usable = [number for number in usable if not self.is_drained(number)] or usable
        counts: Counter[int] = Counter(dict.fromkeys(usable, 0))
        if len(usable) > 1:
            counts.update(
                dict(
                    self._db.execute("SELECT data_dir, count(*) FROM partitions GROUP BY data_dir")
                )
            )
        free = self.free()
        added = set()
        for partition in range(start, end):
            slot = next(free, None)
            if slot is None:
                raise self.full()
            added.add(slot)
            data_dir = (
                beside[partition]
                if delay_of
                else min(usable, key=lambda number: (counts[number], number))
            )
            counts[data_dir] += 1
            self._db.execute(
                "INSERT INTO partitions VALUES (?, ?, ?, ?, 0, '', '[]')",
                (topic_id, partition, data_dir, slot),
            )
        return added
