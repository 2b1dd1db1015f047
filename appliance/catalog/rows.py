"""Topics and partitions of the catalog, and the conversion to and from its rows.

Owner: pure; `appliance.catalog.catalog` reads and writes the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson

from tailrace.core.hash_slots import HandOver

ROW = "partition, data_dir, slot, delete_before, slots, hand_over"
SELECT_TOPICS = (
    "SELECT topic_id, name, state, version, typed, schema_id, message, settings, created_us, "
    "delay_of, slot_counts, bin"
    " FROM topics JOIN schemas USING (schema_id)"
)


COMES_BACK = -1
"""`Topic.bin` of a topic that comes back from the bin."""


class SchemaVersion(NamedTuple):
    """A version of a typed topic's schema. Versions of a topic are ordered by their ids."""

    schema_id: int
    message: bytes
    """Encapsulated Arrow schema message."""
    created_us: int = 0
    """Microseconds since 1970; 0: unknown, because the catalog was rebuilt."""
    author: str = ""
    """The user that the client named; empty: unknown."""


SELECT_VERSIONS = (
    "SELECT topic_id, schema_id, message, schema_versions.created_us, author"
    " FROM schema_versions JOIN schemas USING (schema_id)"
)


class PartitionRow(NamedTuple):
    """A partition as decided: where its files and its slot are."""

    partition: int
    data_dir: int
    """Number of the data directory in the catalog, independent of the configuration's order."""
    slot: int
    delete_before: int
    slots: str = ""
    """The hash slots that it owns, as ranges (see `tailrace.core.hash_slots`); empty: its topic has
    none.
    """
    hand_over: HandOver = ()
    """End offsets of the partitions that gave it slots, at that moment; incomplete until the change
    is carried out.
    """


class Topic(NamedTuple):
    """A topic as decided. `given` holds only the settings that were asked for; defaults are filled
    in by `topic_config.complete`.
    """

    topic_id: bytes
    name: str
    state: str
    version: int
    typed: bool
    schema_id: int
    schema: bytes
    given: dict[str, Any]
    partitions: tuple[PartitionRow, ...]
    created_us: int
    delay_of: bytes = b""
    """The topic id of a delay log's topic; empty for other topics."""
    slot_counts: tuple[int, ...] = ()
    """Partition counts over time of a topic with hash slots. Its slot map follows from them. The
    map's version is their number.
    """
    bin: int = 0
    """Time that the bin keeps a topic that is being deleted, ms; 0: its files are
    removed. COMES_BACK until a topic from the bin is open again.
    """
    versions: tuple[SchemaVersion, ...] = ()
    """The schema versions of a typed topic, oldest first. The last one is `schema`."""

    @property
    def older_schemas(self) -> dict[int, bytes]:
        """Schema id -> message of the versions before the present one."""
        return {
            version.schema_id: version.message
            for version in self.versions
            if version.schema_id != self.schema_id
        }

    @property
    def is_going_to_bin(self) -> bool:
        """True while its files are moved to the bin."""
        return self.state == "deleting" and self.bin > 0

    @property
    def is_coming_back(self) -> bool:
        """True while its files are moved out of the bin."""
        return self.bin == COMES_BACK


def partition_of(row: Any) -> PartitionRow:
    """A partition from its columns, ROW."""
    partition, data_dir, slot, delete_before, slots, hand_over = row
    ends = tuple((source, offset) for source, offset in orjson.loads(hand_over))
    return PartitionRow(partition, data_dir, slot, delete_before, slots, ends)


def versions_by_topic(rows: Iterable[Any]) -> dict[bytes, tuple[SchemaVersion, ...]]:
    """Topic id -> its versions, from the columns of SELECT_VERSIONS."""
    found: dict[bytes, list[SchemaVersion]] = {}
    for topic_id, *rest in rows:
        found.setdefault(topic_id, []).append(SchemaVersion(*rest))
    return {topic_id: tuple(sorted(versions)) for topic_id, versions in found.items()}


def topic_of(
    row: Any, partitions: Iterable[PartitionRow], versions: tuple[SchemaVersion, ...] = ()
) -> Topic:
    """A topic from its columns, those of SELECT_TOPICS."""
    (
        topic_id,
        name,
        state,
        version,
        typed,
        schema_id,
        message,
        settings,
        created_us,
        delay_of,
        slot_counts,
        bin_,
    ) = row
    given, counts = orjson.loads(settings), tuple(orjson.loads(slot_counts))
    return Topic(
        topic_id,
        name,
        state,
        version,
        bool(typed),
        schema_id,
        message,
        given,
        tuple(partitions),
        created_us,
        delay_of,
        counts,
        bin_,
        versions,
    )
