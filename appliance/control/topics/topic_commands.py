"""Commands on topics: each request is checked, then decided in the catalog. `metadata_publisher`
publishes the decision.

A topic with delays has a delay log (`tailrace.core.delays`), a second topic that is created,
changed and deleted with it.

Owner: the controller.
Invariants: each method takes one entry of a request and returns the topics as decided; no topics if
it was only to be checked. It raises TailraceError or CatalogFullError and then decides nothing.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from appliance.catalog.catalog import Catalog, PartitionRow, Topic, delay_log_of
from appliance.config import topic_config
from appliance.config.default_schema import DEFAULT_DELAY_SCHEMA_MESSAGE, DEFAULT_SCHEMA_MESSAGE
from appliance.control.placement.dedicated_workers import DedicatedWorkers
from appliance.control.topics.bin import TopicBin
from appliance.control.topics.change import SHOWN_MAX, shown_name
from shm.memory.layout import SlotState
from shm.tables.partition_table import PartitionState
from tailrace.core.delays import DELAY_COLUMNS, delay_log_name
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    InvalidRequestError,
    InvalidSchemaError,
    InvalidSettingError,
    InvalidTopicNameError,
    OffsetOutOfRangeError,
    PartitionOfflineError,
    TailraceError,
    TopicExistsError,
    UnknownTopicError,
)
from tailrace.format.record_batch.arrow_metadata import ArrowMetadataError, read_schema

SCHEMA_MAX_BYTES = 64 << 10
COLUMNS_MAX = 2048
KEY_KINDS = frozenset({2, 4, 5, 6, 7, 8, 9, 10, 15, 18})
"""Numbers of Arrow's types whose values can be keys: Int, Binary, Utf8, Bool, Decimal, Date, Time,
Timestamp, FixedSizeBinary, Duration.
"""
RESERVED = "@"
"""First character of the names of a delay log's own columns."""
TOPIC_ID_BYTES = 16
AUTHOR_MAX = 128
_DELAY_NODES = read_schema(DEFAULT_DELAY_SCHEMA_MESSAGE).nodes[-len(DELAY_COLUMNS) :]


def is_whole(value: Any, low: int, high: int) -> bool:
    """True for an int from `low` to `high`; a bool is not one."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def checked_author(item: dict[str, Any]) -> str:
    """The user that a client names as the author of a schema. Raises InvalidRequestError."""
    author = item.get("author", "")
    if not isinstance(author, str) or len(author) > AUTHOR_MAX or not author.isprintable():
        raise InvalidRequestError(
            f"`author` must be a text of at most {AUTHOR_MAX} printable characters"
        )
    return author


_UNALTERABLE = frozenset({"worker.dedicated", "partitioner", "key.column"})
"""Settings that an alteration cannot unset."""


class TopicCommands:
    """See the module's docstring."""

    def __init__(
        self,
        catalog: Catalog,
        topics: Mapping[str, Topic],
        dedicated: DedicatedWorkers,
        state_of: Callable[[PartitionRow], PartitionState],
        now_us: Callable[[], int],
        *,
        topic_bin: TopicBin,
        ring_bytes: int,
        lane_bytes: int,
        topic_defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`topics`: by name, as the controller knows them now. `topic_defaults`: the appliance's
        defaults of topic settings, in force.
        """
        self._catalog = catalog
        self._topics = topics
        self._dedicated = dedicated
        self._state_of = state_of
        self._now_us = now_us
        self._ring_bytes = ring_bytes
        self._lane_bytes = lane_bytes
        self._topic_defaults = topic_defaults
        self._bin = topic_bin
        self.begin_move: Callable[[Topic, Any, bool], list[Topic]]
        """Decides an entry with `move` (`appliance.control.partition_moves`)."""
        self.deletions_kept_ms = 0
        """The setting topic.delete.retention.ms."""
        self.quotas: Sequence[str] = ()
        """The setting quotas."""

    def create(self, item: dict[str, Any], validate_only: bool) -> list[Topic]:
        """A new topic, and its delay log where it has delays. Raises TopicExistsError and what is
        wrong with names, settings and schema.

        A request that is repeated because its answer was lost has the id of the topic that it has
        made, and gets that topic.
        """
        name = topic_config.check_topic_name(item.get("name"))
        topic_id = self._checked_id(item.get("topic_id"))
        if name in self._topics:
            existing = self._topics[name]
            if existing.topic_id != topic_id or existing.state == "deleting":
                raise TopicExistsError(f"topic {name!r} exists")
            return [existing]
        if any(topic.topic_id == topic_id for topic in self._topics.values()):
            raise InvalidRequestError("another topic has this topic_id; choose one at random")
        partitions = topic_config.check_partitions(item.get("partitions", 1))
        self._check_quotas(name, 1, partitions)
        given = self._checked_settings(item.get("configs"))
        typed = item.get("schema") is not None
        schema = self._own_schema(item["schema"]) if typed else DEFAULT_SCHEMA_MESSAGE
        author = checked_author(item)
        self._check_compaction(given, schema, typed=typed)
        if given.get("worker.dedicated"):
            self._dedicated.check_room(partitions)
        delay_schema = (
            self._checked_delay_schema(name, item, schema) if given.get("delay.enabled") else b""
        )
        if validate_only:
            return []
        with self._catalog.together():
            decided = [
                self._catalog.create_topic(
                    name,
                    partitions,
                    given,
                    schema,
                    typed,
                    self._now_us(),
                    topic_id=topic_id,
                    author=author,
                )
            ]
            if delay_schema:
                decided.append(self._create_delay_log(decided[0], given, partitions, delay_schema))
        return decided

    def _check_quotas(self, name: str, topics_added: int, added: int) -> None:
        """Raises QuotaExceededError."""
        if self.quotas and added:
            # Only who uses quotas pays for it.
            from appliance.control.topics.prefix_quotas import check_topic_quotas

            check_topic_quotas(
                self.quotas, self._topics.values(), name, topics_added=topics_added, added=added
            )

    def _checked_id(self, given: Any) -> bytes | None:
        """The id that a client has chosen for a new topic; None if it leaves that to the
        appliance.

        Raises: InvalidRequestError.
        """
        if given is None:
            return None
        try:
            topic_id = bytes.fromhex(given)
        except (TypeError, ValueError):
            topic_id = b""
        if len(topic_id) != TOPIC_ID_BYTES or not any(topic_id):
            raise InvalidRequestError("topic_id must be 32 hexadecimal digits, not all zero")
        return topic_id

    def _create_delay_log(
        self, topic: Topic, given: dict[str, Any], partitions: int, schema: bytes
    ) -> Topic:
        return self._catalog.create_topic(
            delay_log_name(topic.name),
            partitions,
            topic_config.delay_log_settings(given),
            schema,
            topic.typed,
            self._now_us(),
            topic.topic_id,
        )

    def _checked_delay_schema(self, name: str, item: dict[str, Any], schema: bytes) -> bytes:
        """The schema of the topic's delay log: the topic's with the columns of delays appended.
        Clients that create typed topics send it along, for this process does not build Arrow
        schemas.
        """
        self._check_delay_log_name(name)
        if schema == DEFAULT_SCHEMA_MESSAGE:
            return DEFAULT_DELAY_SCHEMA_MESSAGE
        if item.get("delay_schema") is None:
            raise InvalidSchemaError(
                "a typed topic with delays needs `delay_schema`: its own schema with the columns "
                "of delays (see docs/protocol.md)"
            )
        message = self._checked_schema(item["delay_schema"])
        own, delayed = read_schema(schema), read_schema(message)
        mine, theirs = own.nodes + _DELAY_NODES, delayed.nodes
        if theirs != mine:
            raise InvalidSchemaError(
                "delay_schema must be the topic's schema followed by the columns @due_us, "
                "@origin and @repeat"
            )
        return message

    def _check_delay_log_name(self, name: str) -> None:
        """Check that a topic of this name can have a delay log now. Raises InvalidTopicNameError,
        TopicExistsError.
        """
        if len(name) > topic_config.DELAY_NAME_MAX:
            raise InvalidTopicNameError(
                f"a topic with delays has a name of at most {topic_config.DELAY_NAME_MAX} "
                "characters"
            )
        if delay_log_name(name) in self._topics:
            raise TopicExistsError(
                f"delayed records of a topic {name!r} that was deleted are still being removed; "
                "try again in a moment"
            )

    def _checked_settings(self, given: Any) -> dict[str, Any]:
        """Parse and check the settings of an entry; {} if it has none.

        Raises: InvalidSettingError.
        """
        given = {} if given is None else given
        if not isinstance(given, dict):
            raise InvalidSettingError("configs must be an object of names and values")
        typed = {name: topic_config.parse(name, value) for name, value in given.items()}
        self._complete(typed)
        return typed

    def _checked_changes(self, topic: Topic, given: Any) -> tuple[dict[str, Any], set[str]]:
        """The changed settings of an entry, and those that get their defaults (null).

        Raises: InvalidSettingError.
        """
        if not isinstance(given, dict):
            return self._checked_settings(given), set()
        unset = {name for name, value in given.items() if value is None}
        for name in unset:
            if name not in topic_config.TOPIC_SETTINGS:
                topic_config.parse(name, None)  # raises, and names the nearest one
            if name in _UNALTERABLE and name in topic.given:
                raise InvalidSettingError(f"{name} can be set once, and not unset")
        return self._checked_settings({n: v for n, v in given.items() if n not in unset}), unset

    def _check_compaction(
        self, given: dict[str, Any], schema: bytes, *, typed: bool
    ) -> dict[str, Any]:
        """Check what compaction needs. Returns the settings with the defaults in force. Raises
        InvalidSettingError.
        """
        defaults = {name: each.default for name, each in topic_config.TOPIC_SETTINGS.items()}
        settings = {**defaults, **self._topic_defaults, **given}
        topic_config.check_compaction(settings, typed=typed)
        column = settings["key.column"]
        if not column:
            return settings
        nodes = [node for node in read_schema(schema).nodes if node.top_level]
        found = next((node for node in nodes if node.name == column), None)
        if found is None:
            raise InvalidSettingError(
                f"key.column is {shown_name(column)!r}; the topic has the columns "
                f"{', '.join(node.name for node in nodes)[:SHOWN_MAX]}"
            )
        if not found.kind or found.kind[0] not in KEY_KINDS:
            raise InvalidSettingError(
                f"column {shown_name(column)!r} cannot be key.column; a key is text, bytes, an "
                "integer, a decimal, a date or a time"
            )
        return settings

    def _complete(self, given: dict[str, Any]) -> None:
        """Check settings together. Raises InvalidSettingError."""
        topic_config.complete(
            given,
            ring_bytes=self._ring_bytes,
            lane_bytes=self._lane_bytes,
            defaults=self._topic_defaults,
        )

    def _own_schema(self, encoded: Any) -> bytes:
        """The schema of a typed topic. Raises InvalidSchemaError."""
        schema = self._checked_schema(encoded)
        for node in read_schema(schema).nodes:
            if node.top_level and node.name.startswith(RESERVED):
                raise InvalidSchemaError(
                    f"column {shown_name(node.name)!r}: names that begin with {RESERVED} are "
                    "reserved; rename it"
                )
        return schema

    @staticmethod
    def _checked_schema(encoded: Any) -> bytes:
        try:
            message = base64.b64decode(encoded, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise InvalidSchemaError("the schema is not valid base64") from None
        if len(message) > SCHEMA_MAX_BYTES:
            raise InvalidSchemaError(
                f"the schema has {len(message)} bytes; the limit is {SCHEMA_MAX_BYTES}"
            )
        try:
            layout = read_schema(message)
        except ArrowMetadataError as error:
            raise InvalidSchemaError(str(error)) from None
        if len(layout.nodes) > COLUMNS_MAX:
            raise InvalidSchemaError(
                f"the schema has {len(layout.nodes)} columns, nested ones included; the limit "
                f"is {COLUMNS_MAX}"
            )
        names = Counter(node.name for node in layout.nodes if node.top_level)
        for name, count in names.items():
            if not name or count > 1:
                raise InvalidSchemaError(f"column name {name[:SHOWN_MAX]!r} is empty or used twice")
        if any(not node.buffers for node in layout.nodes):
            raise InvalidSchemaError("a column that is all null has no type; cast it to a type")
        return message

    def existing(self, item: dict[str, Any]) -> Topic:
        """The topic that an entry names. Raises UnknownTopicError."""
        name = item.get("name")
        topic = self._topics.get(name) if isinstance(name, str) else None
        if topic is None or topic.state == "deleting" or topic.delay_of:
            raise UnknownTopicError(f"there is no topic {shown_name(name)!r}")
        return topic

    def delete(self, item: dict[str, Any], validate_only: bool) -> list[Topic]:
        """Delete a topic and its delay log. `now`: true does not keep it in the bin.

        Raises: UnknownTopicError, InvalidRequestError.
        """
        topic = self.existing(item)
        now = item.get("now", False)
        if not isinstance(now, bool):
            raise InvalidRequestError("`now` must be true or false")
        if validate_only:
            return []
        kept_ms = 0 if now else self.deletions_kept_ms
        with self._catalog.together():
            return [
                self._catalog.mark_deleting(each, kept_ms)
                for each in (topic, delay_log_of(topic, self._topics))
                if each is not None
            ]

    def undelete(self, item: dict[str, Any], validate_only: bool) -> list[Topic]:
        """Bring a deleted topic back, with its delay log. `as`: another name for it.

        Raises: UnknownTopicError, TopicExistsError, InvalidRequestError, InvalidSettingError,
        StorageError, QuotaExceededError.
        """
        deleted = self._bin.named(item)
        topic = deleted.topic
        self._bin.check_whole(deleted)
        name = topic_config.check_topic_name(topic.name if item.get("as") is None else item["as"])
        if name in self._topics:
            raise TopicExistsError(
                f"a topic {name!r} exists; bring the deleted one back under another name: "
                f"tailrace topic undelete {topic.topic_id.hex()} --as NEWNAME"
            )
        self._check_quotas(name, 1, len(topic.partitions))
        logs = self._bin.delay_logs_of(topic)
        if logs:
            for log in logs:
                self._bin.check_whole(log)
            self._check_delay_log_name(name)
        if topic.given.get("worker.dedicated"):
            self._dedicated.check_room(len(topic.partitions))
        if validate_only:
            return []
        with self._catalog.together():
            decided = [
                self._catalog.undelete(deleted, name),
                *(self._catalog.undelete(log, delay_log_name(name)) for log in logs),
            ]
        self._bin.changed()
        return decided

    def alter(self, item: dict[str, Any], validate_only: bool) -> list[Topic]:
        """Change settings or partitions of a topic; what an entry leaves out stays.

        Raises: UnknownTopicError, InvalidSettingError, InvalidSchemaError.
        """
        topic = self.existing(item)
        if topic.is_coming_back:
            raise TailraceError(
                f"topic {topic.name!r} is coming back from the bin, or one of its partitions is "
                "moving; try again in a moment",
                ErrorCode.NOT_READY,
            )
        if item.get("move") is not None:
            return self.begin_move(topic, item["move"], validate_only)
        changed, unset = self._checked_changes(topic, item.get("configs"))
        dedicated = bool(topic.given.get("worker.dedicated"))
        if bool(changed.get("worker.dedicated", dedicated)) is not dedicated:
            raise InvalidSettingError(
                "worker.dedicated can be set only when a topic is created: batches would lose "
                "their order between two workers"
            )
        if changed.get(
            "partitioner", topic_config.partitioner_of(topic.given)
        ) != topic_config.partitioner_of(topic.given):
            raise InvalidSettingError(
                "partitioner can be set only when a topic is created: keys would lose their "
                "order between two partitions"
            )
        given = {n: v for n, v in topic.given.items() if n not in unset} | changed
        if topic.given.get("key.column", "") not in ("", given.get("key.column", "")):
            raise InvalidSettingError(
                "key.column can be set once: segments are cleaned by the keys of one column"
            )
        altered = self._altered_schema(topic, item, given)
        schema = topic.schema if altered is None else altered
        settings = self._check_compaction(given, schema, typed=topic.typed)
        is_compacted = topic_config.COMPACT in settings["cleanup.policy"]
        if is_compacted and topic.typed:
            self._check_key_of_all_versions(topic, settings["key.column"])
        requested = item.get("partitions")
        partitions = (
            len(topic.partitions) if requested is None else topic_config.check_partitions(requested)
        )
        if partitions < len(topic.partitions):
            raise InvalidSettingError(
                f"topic {topic.name!r} has {len(topic.partitions)} partitions; the number can "
                "only grow"
            )
        self._complete(given)
        self._check_quotas(topic.name, 0, partitions - len(topic.partitions))
        if topic.slot_counts and partitions > len(topic.partitions):
            self._check_ends_are_known(topic)
        if dedicated:
            self._dedicated.check_room(partitions - len(topic.partitions))
        author = checked_author(item)
        delay_log = delay_log_of(topic, self._topics)
        if delay_log is not None and topic_config.COMPACT in settings["cleanup.policy"]:
            raise InvalidSettingError(
                f"topic {topic.name!r} has had delayed records, some of which may be on their way: "
                "it cannot get cleanup.policy=compact; copy it to a new topic"
            )
        needs_log = delay_log is None and given.get("delay.enabled")
        delay_schema = (
            self._checked_delay_schema(topic.name, item, topic.schema) if needs_log else b""
        )
        if validate_only:
            return []
        with self._catalog.together():
            decided = [self._catalog.alter_topic(topic, given, partitions)]
            if altered is not None:
                decided[0] = self._catalog.alter_schema(decided[0], altered, self._now_us(), author)
            if delay_log is not None:
                decided.append(
                    self._catalog.alter_topic(
                        delay_log, topic_config.delay_log_settings(given), partitions
                    )
                )
            elif needs_log:
                decided.append(self._create_delay_log(topic, given, partitions, delay_schema))
        return decided

    def _altered_schema(
        self, topic: Topic, item: dict[str, Any], given: dict[str, Any]
    ) -> bytes | None:
        """The next version of the topic's schema; None if it stays. Raises InvalidSchemaError,
        InvalidRequestError.
        """
        if item.get("schema") is None:
            return None
        base = item.get("schema_id")
        if base is not None and not is_whole(base, 0, 1 << 62):
            raise InvalidRequestError("`schema_id` must be a whole number")
        schema = self._own_schema(item["schema"])
        if not topic.typed:
            raise InvalidSchemaError(
                f"topic {topic.name!r} was created without a schema and keeps key, value, "
                "timestamp and headers: create another topic with the schema"
            )
        if base is not None and base != topic.schema_id:
            raise InvalidSchemaError(
                f"the schema of topic {topic.name!r} was altered meanwhile: it is version "
                f"{topic.schema_id}, and the change was made for {base}; look at `tailrace topic "
                f"schema {topic.name} --diff` and alter that one"
            )
        if schema == topic.schema:
            return None
        from tailrace.format.evolution import schema_rules

        mode = given.get("schema.compatibility", self._topic_defaults.get("schema.compatibility"))
        schema_rules.check(
            topic.schema,
            schema,
            mode or topic_config.TOPIC_SETTINGS["schema.compatibility"].default,
            given.get("key.column") or None,
        )
        if delay_log_of(topic, self._topics) is not None or given.get("delay.enabled"):
            raise InvalidSchemaError(
                f"the schema of topic {topic.name!r} cannot be altered, because it has delayed "
                "records (delay.enabled), which are stored with their columns: create another "
                "topic with the new schema"
            )
        return schema

    @staticmethod
    def _check_key_of_all_versions(topic: Topic, column: str) -> None:
        """Check that all versions of the schema have the key, with one type. Raises
        InvalidSettingError.
        """
        from tailrace.format.evolution.schema_rules import fields_of

        shapes = {
            next((field.shape for field in fields_of(version.message) if field.name == column), ())
            for version in topic.versions
        }
        if len(shapes) > 1:
            raise InvalidSettingError(
                f"column {shown_name(column)!r} cannot be key.column: an earlier version of the "
                f"schema of topic {topic.name!r} has it with another type, or not at all; copy the "
                "records to a new topic"
            )

    def describe_schemas(self, request: dict[str, Any]) -> dict[str, Any]:
        """The versions of a topic's schema, oldest first. Raises UnknownTopicError."""
        topic = self.existing({"name": request.get("topic")})
        return {
            "name": topic.name,
            "versions": [
                {
                    "schema_id": version.schema_id,
                    "schema": base64.b64encode(version.message).decode("ascii"),
                    "created_us": version.created_us,
                    "author": version.author,
                }
                for version in topic.versions
            ],
        }

    def _check_ends_are_known(self, topic: Topic) -> None:
        """Check that the end of each partition that gives slots away is known.

        Raises: PartitionOfflineError.
        """
        for row in topic.partitions:
            if self._state_of(row).state is not SlotState.ONLINE:
                raise PartitionOfflineError(
                    f"{topic.name}-{row.partition} is offline and cannot give hash slots away: "
                    "repair its disk first"
                )

    def delete_records(self, item: dict[str, Any], validate_only: bool) -> list[Topic]:
        """`partitions`: partition -> offset below which records go; -1: everything that consumers
        see now.
        """
        topic = self.existing(item)
        requested = item.get("partitions")
        if not isinstance(requested, dict) or not requested:
            raise InvalidRequestError(
                "`partitions` is missing or not an object of partition -> offset"
            )
        before: dict[int, int] = {}
        for row in topic.partitions:
            if str(row.partition) not in requested:
                continue
            offset = requested[str(row.partition)]
            state = self._state_of(row)
            if not is_whole(offset, -1, state.high_watermark):
                raise OffsetOutOfRangeError(
                    f"{topic.name}-{row.partition} ends at offset {state.high_watermark}; "
                    f"offset is {str(offset)[:40]}: give one up to the end, or -1 to delete all "
                    "records"
                )
            before[row.partition] = state.high_watermark if offset == -1 else offset
        if len(before) != len(requested):
            raise InvalidRequestError(
                f"topic {topic.name!r} has partitions 0 to {len(topic.partitions) - 1}; "
                "delete_records names another one"
            )
        return [] if validate_only else [self._catalog.delete_records(topic, before)]
