"""The journal of a migration: entries in a topic of the target, `migrate.<name>.journal`.

An entry is a JSON object, the value of a record. Entries are written in transactions of one
transactional id, by which a new session fences the one before it. So entries and the records that
they speak of are committed together.

    {"kind": "session", "direction", "server", "topics", "groups", "client_config", "at_ms"}
    {"kind": "begin", "topic", "partition", "topic_id", "source", "target"}
    {"kind": "open", "topic", "partition", "source", "target"}
    {"kind": "runs", "topic", "partition", "runs": [[source, target, count], ...], "next"}
    {"kind": "progress", "at_ms", "records", "bytes", "lag"}
    {"kind": "ended", "at_ms"}, of a run that ended without a switch; versions before skip it
    {"kind": "switched", "at_ms"}

Owner: one session of one migration.
Invariants: the entries of a partition are those of `appliance.migrate.offset_map`, in order.
Crash: a transaction that was not committed is aborted by the next session, with its records.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import orjson

from appliance.migrate.errors import MigrationError
from appliance.migrate.offset_map import OffsetMap
from appliance.migrate.rows import Run
from tailrace.core.topic_partition import TopicPartition

Entry = dict[str, Any]
SETTINGS = {"retention.ms": "-1", "retention.bytes": "-1", "cleanup.policy": "delete"}
"""Settings of the topic, on either side."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


def journal_topic(name: str) -> str:
    """The topic of a migration. Raises MigrationError."""
    if not _NAME.fullmatch(name):
        raise MigrationError(
            f"the name of a migration is {name!r}; write letters, digits, '.', '_' and '-', 100 at "
            "most."
        )
    return f"migrate.{name}.journal"


def is_journal(topic: str) -> bool:
    """True for the journal of a migration, which is not migrated."""
    return topic.startswith("migrate.") and topic.endswith(".journal")


def encoded(entry: Entry) -> bytes:
    """An entry as a record's value."""
    return orjson.dumps(entry)


class Journal:
    """The entries of a migration, summed up."""

    def __init__(self, entries: Iterable[bytes | None] = ()) -> None:
        self.maps: dict[TopicPartition, OffsetMap] = {}
        self.topic_ids: dict[str, str] = {}
        """Topic -> its id in the source when its copy began; empty where the source has none."""
        self.session: Entry = {}
        self.progress: Entry = {}
        self.ended_ms: int | None = None
        """End of the last session, if it has said so."""
        self.switched_ms: int | None = None
        for value in entries:
            try:
                self.add(orjson.loads(value or b""))
            except (ValueError, KeyError, TypeError) as error:
                raise MigrationError(
                    f"the journal of this migration has an entry that cannot be read ({error}): "
                    "use the version of tailrace that wrote it, or begin under another --name."
                ) from None

    def map_of(self, partition: TopicPartition) -> OffsetMap:
        """The map of a partition, new if there is none."""
        return self.maps.setdefault(partition, OffsetMap())

    def add(self, entry: Entry) -> None:
        """Add an entry that is committed."""
        kind = entry["kind"]
        if kind == "session":
            self.session, self.ended_ms = entry, None
        elif kind == "progress":
            self.progress = entry
        elif kind == "ended":
            self.ended_ms = int(entry["at_ms"])
        elif kind == "switched":
            self.switched_ms = int(entry["at_ms"])
        elif kind in ("begin", "open", "runs"):
            found = self.map_of(TopicPartition(entry["topic"], entry["partition"]))
            if kind == "begin":
                self.topic_ids.setdefault(entry["topic"], entry["topic_id"])
                found.begin(entry["source"], entry["target"])
            elif kind == "open":
                found.open(entry["source"], entry["target"])
            else:
                found.append_runs([Run(*run) for run in entry["runs"]], entry["next"])


def begin_entry(partition: TopicPartition, topic_id: str, source: int, target: int) -> Entry:
    """The entry of a partition whose copy begins."""
    return {
        "kind": "begin", "topic": partition.topic, "partition": partition.partition,
        "topic_id": topic_id, "source": source, "target": target,
    }  # fmt: skip


def open_entry(partition: TopicPartition, source: int, target: int) -> Entry:
    """The entry of a partition that is written in transactions from now on."""
    return {
        "kind": "open", "topic": partition.topic, "partition": partition.partition,
        "source": source, "target": target,
    }  # fmt: skip


def runs_entry(partition: TopicPartition, runs: Iterable[Run], source_next: int) -> Entry:
    """The entry of a partition's records in a transaction."""
    return {
        "kind": "runs", "topic": partition.topic, "partition": partition.partition,
        "runs": [list(run) for run in runs], "next": source_next,
    }  # fmt: skip
