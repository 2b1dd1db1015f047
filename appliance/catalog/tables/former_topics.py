"""Names of topics that were deleted lately, with the time from which a topic of the name may have
been created.

Kafka's clients tell topics of one name apart by their leader epochs, which begin at the second of
the creation (`netfront.kafka.apis.cluster.leader_epochs`). So a topic of a deleted one's name
counts as created behind all seconds that epochs of the deleted one stood for, also where both are
made in one second, where the former one came from a backup with high epochs, and where the clock
was set back.

Owner: the controller.
Invariants: the time of a name never decreases while it is kept.
Bounds: a name is kept until its time is KEPT_US ago.
Crash: a name is noted with the deletion, in one transaction.
"""

from __future__ import annotations

from appliance.catalog.database import refusals
from appliance.catalog.transaction import Database, Transaction

KEPT_US = 3_600 * 1_000_000
"""Largest step of the clock backwards that makes no difference."""
_SECOND_US = 1_000_000
_SECONDS_BEHIND = 2
"""One for the latest epoch, one for a flusher that is restarted while it deletes the topic."""
_TABLE = """
CREATE TABLE IF NOT EXISTS former_topics (
    name TEXT PRIMARY KEY, until_us INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS former_topics_by_time ON former_topics (until_us);
"""


class FormerTopics:
    """The table `former_topics`. Older builds of this catalog version do not read it."""

    def __init__(self, database: Database) -> None:
        self._db = database
        database.executescript(_TABLE)

    def note(self, name: str, created_us: int, leader_epoch: int, now_us: int) -> None:
        """Note that a topic is deleted. `leader_epoch`: the latest one of its partitions. Raises
        StorageError.
        """
        until_us = (created_us // _SECOND_US + max(leader_epoch, 0) + _SECONDS_BEHIND) * _SECOND_US
        kept_from_us = now_us - KEPT_US
        with refusals(), Transaction(self._db):
            self._db.execute("DELETE FROM former_topics WHERE until_us < ?", (kept_from_us,))
            if until_us >= kept_from_us:
                self._db.execute(
                    "INSERT INTO former_topics VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET "
                    "until_us = max(until_us, excluded.until_us)",
                    (name, until_us),
                )

    def creation_us(self, name: str, now_us: int) -> int:
        """Time of creation of a topic that is created now. Raises StorageError."""
        with refusals():
            row = self._db.execute(
                "SELECT until_us FROM former_topics WHERE name = ?", (name,)
            ).fetchone()
        return now_us if row is None else max(now_us, row[0])
