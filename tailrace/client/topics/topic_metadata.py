"""A topic as METADATA describes it: partitions, schema, settings.

Invariants:
- A TopicInfo never changes. A change of the topic makes another one.
- The schema is decoded at its first use, since that imports pyarrow.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import MalformedRequestError, UnknownTopicError
from tailrace.core.hash_slots import HandOver, Owners, hand_over_of, owners_in
from tailrace.core.schedule.delays import DELAY_COLUMNS, delay_log_name
from tailrace.format.record_batch.batch_header import checksum_seed

if TYPE_CHECKING:
    import pyarrow as pa

    from tailrace.format.evolution.schema_history import SchemaHistory


INTERNAL_PREFIX = "__tailrace_"
"""Prefix of topics that Tailrace's programs keep for themselves. Lists of topics leave them out, as
Kafka's do.
"""
UNKNOWN_MAP = -1
"""Version of a slot map that is not known."""


class TopicInfo:
    """One topic, or the delay log of the topic `delay_of`."""

    def __init__(self, described: dict[str, Any], delay_of: str = "") -> None:
        self.name: str = described["name"]
        self.topic_id = bytes.fromhex(described["topic_id"])
        self.version: int = described["version"]
        self.typed: bool = described["typed"]
        self.schema_id: int = described["schema_id"]
        self.schema_message = base64.b64decode(described["schema"])
        self.settings: dict[str, Any] = described["settings"]
        self.partitions: list[dict[str, Any]] = described["partitions"]
        self.created_us: int = described.get("created_us", 0)
        """Microseconds since 1970. 0: earlier versions do not report it."""
        self.seeds = [checksum_seed(self.topic_id, p) for p in range(len(self.partitions))]
        self.compaction_key: str = _compaction_key(self.settings, self.typed)
        """The column whose value each record of a compacted topic needs. Empty: not compacted."""
        self.schema_ids: tuple[int, ...] = tuple(described.get("schema_ids") or (self.schema_id,))
        """The ids of all versions of the schema, oldest first."""
        self._older_schemas = {
            int(number): base64.b64decode(message)
            for number, message in (described.get("older_schemas") or {}).items()
        }
        self._history: SchemaHistory | None = None
        self._schema: pa.Schema | None = None
        self._columns: frozenset[str] | None = None
        self._defaults: dict[str, Any] | None = None
        self._narrow_floats: tuple[int, ...] | None = None
        self.delay_of = delay_of
        """The topic's name, of a delay log."""
        self.topic: TopicInfo = self
        """The topic itself, or that of a delay log. Its rows are those that programs give: a delay
        log lacks the versions before it.
        """
        self.delay_log: TopicInfo | None = None
        self.slot_map_version: int = 0 if delay_of else described.get("slot_map_version", 0)
        """0: the topic has no hash slots."""
        self.owners: Owners | None = (
            owners_in(p.get("slots", "") for p in described["partitions"])
            if self.slot_map_version
            else None
        )
        """Slot -> partition. None: the topic has no hash slots, or the appliance is just changing
        the map.
        """
        if self.slot_map_version and self.owners is None:
            self.slot_map_version = UNKNOWN_MAP
        self.hand_overs: dict[int, HandOver] = {
            partition: hand_over_of(p["hand_over"])
            for partition, p in enumerate(described["partitions"])
            if p.get("hand_over")
        }
        """Partition that got hash slots from others -> the end of each of those at that time."""
        delay_log = described.get("delay_log")
        if delay_log is not None:
            self.delay_log = TopicInfo(
                {
                    **described,
                    "schema_ids": None,
                    "older_schemas": None,
                    **delay_log,
                    "name": delay_log_name(self.name),
                    "delay_log": None,
                },
                self.name,
            )
            self.delay_log.topic = self

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the topic's batches."""
        if self._schema is None:
            from tailrace.format.schema import from_message

            self._schema = from_message(self.schema_message)
        return self._schema

    @property
    def history(self) -> SchemaHistory:
        """The versions of the schema. A response about many topics may leave older ones out."""
        if self._history is None:
            from tailrace.format.evolution.schema_history import SchemaHistory

            versions = [(self.schema_id, self.schema_message)]
            for number in reversed(self.schema_ids[:-1]):
                if number not in self._older_schemas:
                    break
                versions.insert(0, (number, self._older_schemas[number]))
            self._history = SchemaHistory(versions)
        return self._history

    @property
    def has_all_schemas(self) -> bool:
        """True if `history` has all versions."""
        return len(self._older_schemas) == len(self.schema_ids) - 1

    @property
    def columns(self) -> frozenset[str]:
        """The columns of a typed topic's rows. A delay log has those of its topic."""
        if self._columns is None:
            self._columns = frozenset(self.schema.names).difference(
                DELAY_COLUMNS if self.delay_of else ()
            )
        return self._columns

    @property
    def narrow_floats(self) -> tuple[int, ...]:
        """The places of the columns of a typed topic that are floats of less than 64 bits."""
        if self._narrow_floats is None:
            from tailrace.format.schema import narrow_floats

            self._narrow_floats = narrow_floats(self.schema)
        return self._narrow_floats

    @property
    def column_defaults(self) -> dict[str, Any]:
        """Column -> value of the columns of a typed topic that have a default. A row that leaves
        one out has it.
        """
        if self._defaults is None:
            from tailrace.format.evolution.schema_rules import defaults_of

            self._defaults = defaults_of(self.schema_message)
        return self._defaults


def _compaction_key(settings: dict[str, Any], typed: bool) -> str:
    if "compact" not in settings.get("cleanup.policy", ""):
        return ""
    return str(settings.get("key.column", "")) if typed else "key"


def is_internal(name: str) -> bool:
    """True if Tailrace's programs keep the topic for themselves (INTERNAL_PREFIX)."""
    return name.startswith(INTERNAL_PREFIX)


def topics_from_metadata(answer: dict[str, Any], *requested: str) -> dict[str, TopicInfo]:
    """The topics of a METADATA response, by name. Raises UnknownTopicError for the first one that
    does not exist, MalformedRequestError for an invalid response or a missing `requested` topic.
    """
    topics = {}
    try:
        for described in answer["topics"]:
            if described.get("code") == ErrorCode.UNKNOWN_TOPIC:
                raise UnknownTopicError(f"there is no topic {described['name']!r}")
            topics[described["name"]] = TopicInfo(described)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedRequestError(
            f"the answer to METADATA describes no topic ({type(error).__name__}: {error})"
        ) from None
    for name in requested:
        if name not in topics:
            raise MalformedRequestError(f"the answer to METADATA leaves out topic {name!r}")
    return topics
