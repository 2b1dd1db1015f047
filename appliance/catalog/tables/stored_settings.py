"""Settings that the catalog keeps: those of `tailrace config set`, and which defaults its topics
have.

Owner: the controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from appliance.catalog.database import read_meta, refusals
from appliance.catalog.transaction import Database, Transaction

_TOPIC_DEFAULTS = "topic_defaults"
"""Row of `meta`: number of the defaults that the topics were last decided with."""


class StoredSettings:
    """The table `overrides`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def overrides(self) -> dict[str, Any]:
        """The settings of `tailrace config set`. Raises StorageError."""
        with refusals():
            rows = self._db.execute("SELECT name, value FROM overrides ORDER BY name").fetchall()
        return {name: orjson.loads(value) for name, value in rows}

    def set_overrides(self, values: Mapping[str, Any]) -> None:
        """Replace these settings."""
        with refusals(), Transaction(self._db):
            self._db.execute("DELETE FROM overrides")
            self._db.executemany(
                "INSERT INTO overrides VALUES (?, ?)",
                [(name, orjson.dumps(value).decode()) for name, value in values.items()],
            )

    def topic_defaults_number(self) -> int:
        """Number of the defaults that all topics have, as `note_topic_defaults` noted it."""
        with refusals():
            return read_meta(self._db, _TOPIC_DEFAULTS, 0)

    def note_topic_defaults(self, number: int) -> None:
        """Note that all topics are decided with the defaults of this number."""
        with refusals(), Transaction(self._db):
            read_meta(self._db, _TOPIC_DEFAULTS, 0)
            self._db.execute("UPDATE meta SET value = ? WHERE name = ?", (number, _TOPIC_DEFAULTS))
