"""What may become of topics: each request is checked, then decided in the catalog. Nobody is told here.

Owner: the coordinator. Each method takes one entry of a request, and answers the topic as decided; None: it was only to be checked. Raises TailraceError,
CatalogFullError; then nothing is decided.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any

from appliance import topic_settings
from appliance.catalog import Catalog, PartitionRow, Topic
from appliance.dedicated_workers import DedicatedWorkers
from appliance.default_schema import DEFAULT_SCHEMA_MESSAGE
from shm.partition_table import PartitionState
from tailrace.arrow_metadata import ArrowMetadataError, read_schema
from tailrace.errors import (
    InvalidRequestError,
    InvalidSchemaError,
    InvalidSettingError,
    OffsetOutOfRangeError,
    TopicExistsError,
    UnknownTopicError,
)

SCHEMA_MAX_BYTES = 256 << 10


class TopicDecisions:
    """See the module's docstring."""

    def __init__(
        self,
        catalog: Catalog,
        topics: Mapping[str, Topic],
        dedicated: DedicatedWorkers,
        state_of: Callable[[PartitionRow], PartitionState],
        now_us: Callable[[], int],
        *,
        ring_bytes: int,
        lane_bytes: int,
    ) -> None:
        """`topics`: by name, as the coordinator knows them now."""
        self._catalog = catalog
        self._topics = topics
        self._dedicated = dedicated
        self._state_of = state_of
        self._now_us = now_us
        self._ring_bytes = ring_bytes
        self._lane_bytes = lane_bytes

    def create(self, item: dict[str, Any], validate_only: bool) -> Topic | None:
        name = item.get("name")
        topic_settings.check_topic_name(name)  # type: ignore[arg-type]
        assert isinstance(name, str)
        if name in self._topics:
            raise TopicExistsError(f"topic {name!r} exists")
        partitions = topic_settings.check_partitions(item.get("partitions", 1))
        given = self._checked_settings(item.get("configs") or {})
        typed = item.get("schema") is not None
        schema = self._checked_schema(item["schema"]) if typed else DEFAULT_SCHEMA_MESSAGE
        if given.get("worker.dedicated"):
            self._dedicated.check_room(partitions)
        return None if validate_only else self._catalog.create_topic(name, partitions, given, schema, typed, self._now_us())

    def _checked_settings(self, given: Any) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise InvalidSettingError("configs must be an object of names and values")
        typed = {name: topic_settings.parse(name, value) for name, value in given.items()}
        topic_settings.complete(typed, ring_bytes=self._ring_bytes, lane_bytes=self._lane_bytes)
        return typed

    @staticmethod
    def _checked_schema(encoded: Any) -> bytes:
        try:
            message = base64.b64decode(encoded, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise InvalidSchemaError("the schema is not base64") from None
        if len(message) > SCHEMA_MAX_BYTES:
            raise InvalidSchemaError(f"the schema has {len(message)} bytes; {SCHEMA_MAX_BYTES} are allowed")
        try:
            read_schema(message)
        except ArrowMetadataError as error:
            raise InvalidSchemaError(str(error)) from None
        return message

    def existing(self, item: dict[str, Any]) -> Topic:
        topic = self._topics.get(str(item.get("name")))
        if topic is None or topic.state == "deleting":
            raise UnknownTopicError(f"there is no topic {item.get('name')!r}")
        return topic

    def delete(self, item: dict[str, Any], validate_only: bool) -> Topic | None:
        topic = self.existing(item)
        if validate_only:
            return None
        return self._catalog.mark_deleting(topic)

    def alter(self, item: dict[str, Any], validate_only: bool) -> Topic | None:
        topic = self.existing(item)
        changed = self._checked_settings(item.get("configs") or {})
        dedicated = bool(topic.given.get("worker.dedicated"))
        if bool(changed.get("worker.dedicated", dedicated)) is not dedicated:
            raise InvalidSettingError(
                "worker.dedicated is decided when a topic is created: its batches would lose their order between two workers"
            )
        given = {**topic.given, **changed}
        partitions = topic_settings.check_partitions(item.get("partitions") or len(topic.partitions))
        if partitions < len(topic.partitions):
            raise InvalidSettingError(f"topic {topic.name!r} has {len(topic.partitions)} partitions; their number can only grow")
        topic_settings.complete(given, ring_bytes=self._ring_bytes, lane_bytes=self._lane_bytes)
        if dedicated:
            self._dedicated.check_room(partitions - len(topic.partitions))
        return None if validate_only else self._catalog.alter_topic(topic, given, partitions)

    def delete_records(self, item: dict[str, Any], validate_only: bool) -> Topic | None:
        """`partitions`: partition -> offset below which records go; -1: everything that consumers see now."""
        topic = self.existing(item)
        wanted = item.get("partitions")
        if not isinstance(wanted, dict) or not wanted:
            raise InvalidRequestError("delete_records needs `partitions`: partition -> offset")
        before: dict[int, int] = {}
        for row in topic.partitions:
            if str(row.partition) not in wanted:
                continue
            offset = wanted[str(row.partition)]
            state = self._state_of(row)
            if not isinstance(offset, int) or isinstance(offset, bool) or not -1 <= offset <= state.high_watermark:
                raise OffsetOutOfRangeError(f"{topic.name}-{row.partition} holds offsets up to {state.high_watermark}, not {offset!r}")
            before[row.partition] = state.high_watermark if offset == -1 else offset
        if len(before) != len(wanted):
            raise InvalidRequestError(f"topic {topic.name!r} has {len(topic.partitions)} partitions, not all of {', '.join(wanted)}")
        return None if validate_only else self._catalog.delete_records(topic, before)
