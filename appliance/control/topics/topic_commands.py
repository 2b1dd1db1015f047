"""Commands on topics: each request is checked (`settings_validation`, `schema_validation`), then
decided in the catalog. `metadata_publisher` publishes the decision.

A topic with delays has a delay log (`tailrace.core.schedule.delays`), a second topic that is
created, changed and deleted with it.

Owner: the controller.
Invariants: each method takes one entry of a request and returns the topics as decided; no topics if
it was only to be checked. It raises TailraceError or CatalogFullError and then decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from appliance.catalog.catalog import Catalog, PartitionRow, Topic, delay_log_of
from appliance.config import topic_config
from appliance.config.default_schema import DEFAULT_SCHEMA_MESSAGE
from appliance.config.topic_settings import COMPACT
from appliance.control.placement.dedicated_workers import DedicatedWorkers
from appliance.control.request_fields import is_whole, shown_name
from appliance.control.topics.bin import TopicBin
from appliance.control.topics.schema_validation import (
    altered_delay_schema,
    altered_schema,
    check_key_of_all_versions,
    checked_author,
    delay_schema_of,
    described_versions,
    own_schema,
)
from appliance.control.topics.settings_validation import SettingsValidation
from shm.memory.layout import SlotState
from shm.tables.partition_table import PartitionState
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    InvalidRequestError,
    InvalidSettingError,
    InvalidTopicNameError,
    OffsetOutOfRangeError,
    PartitionOfflineError,
    TailraceError,
    TopicExistsError,
    UnknownTopicError,
)
from tailrace.core.schedule.delays import delay_log_name

TOPIC_ID_BYTES = 16


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
        self._settings = SettingsValidation(ring_bytes, lane_bytes, topic_defaults)
        self._bin = topic_bin
        self.begin_move: Callable[[Topic, Any, bool], list[Topic]]
        """Decides an entry with `move` (`appliance.control.moves.partition_moves`)."""
        self.is_moving: Callable[[Topic], bool] = lambda _topic: False
        """True if a partition of the topic moves (`appliance.control.moves.partition_moves`)."""
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
        if not _is_derived(item):  # a client's own: its records have no other way
            self._check_collision(name)
        if any(topic.topic_id == topic_id for topic in self._topics.values()):
            raise InvalidRequestError("another topic has this topic_id; choose one at random")
        partitions = topic_config.check_partitions(item.get("partitions", 1))
        self._check_quotas(name, 1, partitions)
        given = self._settings.parsed(item.get("configs"))
        typed = item.get("schema") is not None
        schema = own_schema(item["schema"]) if typed else DEFAULT_SCHEMA_MESSAGE
        author = checked_author(item)
        self._settings.check_compaction(given, schema, typed=typed)
        if given.get("worker.dedicated"):
            self._dedicated.check_room(partitions)
        delay_schema = self._delay_schema(name, item, schema) if given.get("delay.enabled") else b""
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

    def _check_collision(self, name: str) -> None:
        """Check that no other topic's name differs in `.` and `_` alone: Kafka's metrics make one
        name of both. The other one is not named, since the client may not be allowed to see it.
        Raises InvalidTopicNameError.
        """
        unified = name.replace(".", "_")
        if "_" in unified and any(
            len(other) == len(name)
            and other.replace(".", "_") == unified
            and topic.state != "deleting"
            for other, topic in self._topics.items()
        ):
            raise InvalidTopicNameError(
                f"Topic '{name}' collides with existing topic: another name differs from it in `.` "
                "and `_` alone, and metrics of Kafka's tools make one name of both; choose another"
            )

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

    def _delay_schema(self, name: str, item: dict[str, Any], schema: bytes) -> bytes:
        """The schema of the topic's delay log, which is about to be created."""
        self._check_delay_log_name(name)
        return delay_schema_of(item, schema)

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
            self._catalog.former_topics.note(
                topic.name, topic.created_us, self._latest_epoch(topic), self._now_us()
            )
            return [
                self._catalog.mark_deleting(each, kept_ms)
                for each in (topic, delay_log_of(topic, self._topics))
                if each is not None
            ]

    def _latest_epoch(self, topic: Topic) -> int:
        """The highest leader epoch that the table of partitions shows of a topic; -1: none."""
        states = (self._state_of(row) for row in topic.partitions)
        return max((s.leader_epoch for s in states if s.topic_id == topic.topic_id), default=-1)

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
        if name != topic.name:
            self._check_collision(name)
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
                self._bin.bring_back(deleted, name),
                *(self._bin.bring_back(log, delay_log_name(name)) for log in logs),
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
        given = self._settings.altered(topic, item.get("configs"))
        delay_log = delay_log_of(topic, self._topics)
        altered = altered_schema(topic, item, self._settings.in_force(given))
        schema = topic.schema if altered is None else altered
        altered_log = altered_delay_schema(topic, delay_log, item, schema)
        settings = self._settings.check_compaction(given, schema, typed=topic.typed)
        is_compacted = COMPACT in settings["cleanup.policy"]
        if is_compacted and topic.typed:
            check_key_of_all_versions(topic, settings["key.column"])
        partitions = self._altered_partitions(topic, item.get("partitions"))
        self._settings.check_together(given)
        self._check_quotas(topic.name, 0, partitions - len(topic.partitions))
        if topic.slot_counts and partitions > len(topic.partitions):
            self._check_ends_are_known(topic)
        if topic.given.get("worker.dedicated"):
            self._dedicated.check_room(partitions - len(topic.partitions))
        author = checked_author(item)
        if delay_log is not None and is_compacted:
            raise InvalidSettingError(
                f"topic {topic.name!r} has had delayed records, some of which may be on their way: "
                "it cannot get cleanup.policy=compact; copy it to a new topic"
            )
        needs_log = delay_log is None and given.get("delay.enabled")
        if needs_log and self.is_moving(topic):  # its delay log would be in the other directory
            raise TailraceError(
                f"a partition of topic {topic.name!r} is moving, or its former files are still "
                "being removed: enable delays when `tailrace partition list` shows no move",
                ErrorCode.NOT_READY,
            )
        delay_schema = self._delay_schema(topic.name, item, schema) if needs_log else b""
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
                if altered_log is not None:
                    decided[-1] = self._catalog.alter_schema(
                        decided[-1], altered_log, self._now_us(), author
                    )
            elif needs_log:
                decided.append(self._create_delay_log(decided[0], given, partitions, delay_schema))
        return decided

    @staticmethod
    def _altered_partitions(topic: Topic, requested: Any) -> int:
        """The number of partitions after an alteration. Raises InvalidSettingError."""
        count = len(topic.partitions)
        partitions = count if requested is None else topic_config.check_partitions(requested)
        if partitions < count:
            raise InvalidSettingError(
                f"topic {topic.name!r} has {count} partitions; the number can only grow"
            )
        return partitions

    def describe_schemas(self, request: dict[str, Any]) -> dict[str, Any]:
        """The versions of a topic's schema, oldest first. Raises UnknownTopicError."""
        return described_versions(self.existing({"name": request.get("topic")}))

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
                f"topic {topic.name!r} has partitions 0 to {len(topic.partitions) - 1}, not "
                f"{min(requested.keys() - set(map(str, before)))[:40]}"
            )
        return [] if validate_only else [self._catalog.delete_records(topic, before)]


def _is_derived(item: dict[str, Any]) -> bool:
    """True for a retry topic or dead-letter topic that a client makes."""
    configs = item.get("configs")
    return isinstance(configs, dict) and bool(configs.get("derived.from"))
