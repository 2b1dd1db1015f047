"""Producer ids that were given, their epochs, and the blocks of transactional ids.

Owner: the controller.
Invariants: an id is given once.
Bounds: PRODUCERS_MAX remembered ids.
"""

from __future__ import annotations

from appliance.catalog.database import read_meta, refusals
from appliance.catalog.transaction import Database, Transaction
from shm.messages.transaction_messages import PRODUCER_IDS_IN_BLOCK
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS

EPOCH_MAX = 32767
PRODUCERS_MAX = 100_000
"""Most producer ids whose epochs are known. An older id gets a new one when it asks for its next
epoch, as an unknown id does.
"""
_BLOCK = "transactional_block"
"""Row of `meta`: number of the last block of transactional producer ids. There are blocks until the
year 2106.
"""


class ProducerIdTable:
    """The table `producers`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def new(self) -> tuple[int, int]:
        """A producer id never given before, and its first epoch, 0."""
        with refusals(), Transaction(self._db):
            cursor = self._db.execute("INSERT INTO producers (epoch) VALUES (0)")
            assert cursor.lastrowid is not None
            self._db.execute(
                "DELETE FROM producers WHERE producer_id <= ?", (cursor.lastrowid - PRODUCERS_MAX,)
            )
        return cursor.lastrowid, 0

    def new_transactional_block(self, now_us: int) -> int:
        """The first of PRODUCER_IDS_IN_BLOCK transactional producer ids that were never given
        before. Blocks are numbered by the seconds of the clock, and follow each other where it was
        set back: so a catalog that was rebuilt or restored gives no id again.
        """
        with refusals(), Transaction(self._db):
            block = max(read_meta(self._db, _BLOCK, 0) + 1, now_us // 1_000_000)
            self._db.execute("UPDATE meta SET value = ? WHERE name = ?", (block, _BLOCK))
        return TRANSACTIONAL_PRODUCER_IDS + block * PRODUCER_IDS_IN_BLOCK

    def next_epoch(self, producer_id: int, epoch: int) -> tuple[int, int]:
        """A higher epoch of a known producer; a new id if it is unknown or its epochs are used
        up.
        """
        with refusals(), Transaction(self._db):
            row = self._db.execute(
                "SELECT epoch FROM producers WHERE producer_id = ?", (producer_id,)
            ).fetchone()
            if row is None or max(row[0], epoch) >= EPOCH_MAX:
                return self.new()
            following = max(row[0], epoch) + 1
            self._db.execute(
                "UPDATE producers SET epoch = ? WHERE producer_id = ?", (following, producer_id)
            )
        return producer_id, following

    def begin_at(self, producer_id: int) -> None:
        """Give no id below this one any more.

        Raises: sqlite3.Error.
        """
        self._db.execute("INSERT OR IGNORE INTO producers VALUES (?, 0)", (producer_id - 1,))
