"""The topics that a producer sends to: their metadata, queues, and cached partitions of keys.

Owner: one Producer. Lookups of topics and changes of routes hold the producer's lock.
Invariants:
- A route has the queues of its topic id, one for each partition.
- A recreated topic has new queues. The batches of the old ones move there (see
  `tailrace.producer.topic_changes.topic_change`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from time import time_ns
from typing import Any

from tailrace.client.config.settings import ProducerSettings
from tailrace.client.connections.steps import Steps, Wait
from tailrace.client.topics.new_topic import create_request
from tailrace.client.topics.topic_metadata import TopicInfo, topics_from_metadata
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    DelayNotEnabledError,
    InvalidRecordError,
    InvalidSettingError,
    NotReachableError,
    RequestTimeoutError,
    UnknownTopicError,
    error_for,
)
from tailrace.core.hash_slots import HASH_SLOTS, SLOT_COUNT, Owners
from tailrace.core.schedule.delays import due_time_us
from tailrace.kernel import PartitionCache
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.producer.record_validation import Delay
from tailrace.producer.sending.sender_thread import SenderThread
from tailrace.protocol.frame import Api

NS_PER_MS = 1_000_000
SHOWN_INTERVAL_NS = 10 * NS_PER_MS
"""Time between two looks at a topic that was created."""
STACK_DEPTH = 9
"""Frames between the caller of `send` and `ProducerMetadata.load`, for warnings."""
_ANY: Owners = bytes(SLOT_COUNT)
"""A slot map for a topic whose map is not known. Everything is routed again before it is sent."""


class TopicRoute:
    """A topic, or a delay log, as a producer uses it."""

    __slots__ = ("capacity_bytes", "delay_route", "info", "limit_bytes", "owners", "queues")

    def __init__(
        self,
        info: TopicInfo,
        queues: list[PartitionQueue],
        delay_route: TopicRoute | None,
        settings: ProducerSettings,
    ) -> None:
        self.info = info
        self.queues = queues
        self.delay_route = delay_route
        """The route to the topic's delay log, or None."""
        self.owners: Owners | None = (
            None if not info.slot_map_version else _ANY if info.owners is None else info.owners
        )
        """Hash slot -> partition. None: the topic has no hash slots."""
        self.limit_bytes: int = min(settings.max_request_size, info.settings["max.message.bytes"])
        """The largest batch."""
        self.capacity_bytes = min(settings.batch_size, self.limit_bytes)
        """The size at which a batch is full."""

    def delayed(self, delay: Delay) -> tuple[TopicRoute, int]:
        """The route to the delay log, and the due time in microseconds since 1970. Raises
        DelayNotEnabledError, InvalidRecordError.
        """
        info = self.info
        if self.delay_route is None or not info.settings["delay.enabled"]:
            raise DelayNotEnabledError(
                f"topic {info.name!r} takes no delayed records: delay.enabled is false"
            )
        now_us = time_ns() // 1000
        if delay.repeat is not None:
            return self.delay_route, delay.first_occurrence_us(now_us)
        return self.delay_route, due_time_us(
            delay.at, delay.after, now_us, info.settings["delay.levels"]
        )


class ProducerMetadata:
    """The routes by topic. A missing topic is looked up, and created if the appliance allows."""

    def __init__(
        self,
        settings: ProducerSettings,
        sender_thread: SenderThread,
        call: Callable[[Api, dict[str, Any], int | None], Steps[dict[str, Any]]],
        *,
        caches_partitions: bool,
        by_murmur2: bool,
    ) -> None:
        """`call`: (API, request, start of the timeout) -> response. `caches_partitions`: records
        are not serialized, so their keys can be looked up. `by_murmur2`: keys go by Kafka's default
        partitioner.
        """
        self._caches_partitions = caches_partitions
        self._by_murmur2 = by_murmur2
        self._call = call
        self._settings = settings
        self._sender_thread = sender_thread
        self.by_topic: dict[str, TopicRoute] = {}
        """By name, delay logs included."""
        self.known: dict[str, PartitionCache] = {}
        """topic -> cached partitions, of topics that are not typed. The fast path of `send` looks
        here.
        """
        self._warned: set[str] = set()
        self._slot_map_change = sender_thread.sender.slot_map_change
        self._slot_map_change.on_moved = self._on_moved
        self._topic_recreation = sender_thread.sender.topic_recreation
        self._topic_recreation.on_found = self._on_found
        self._topic_recreation.on_missing = self._on_missing
        self._topic_recreation.on_abandoned = self.forget
        self._lookups = sender_thread.sender.topic_lookups
        self._lookups.on_found = self._on_lookup
        sender_thread.sender.on_schema_altered = self._on_altered
        sender_thread.sender.metadata_refresh.topics = self._refreshed
        sender_thread.sender.metadata_refresh.on_described = self._on_described

    def of(
        self, topic: str, schema_message: Callable[[], bytes] | None = None
    ) -> Steps[TopicRoute]:
        """The route to a topic, looked up if it is not known. `schema_message`: schema of a topic
        that is created. Raises InvalidRecordError, UnknownTopicError, NotReachableError,
        RequestTimeoutError.
        """
        try:
            return self.by_topic[topic]
        except (KeyError, TypeError):
            return (yield from self.load(topic, schema_message))

    def load(
        self,
        topic: str,
        schema_message: Callable[[], bytes] | None = None,
        start_ns: int | None = None,
    ) -> Steps[TopicRoute]:
        """The route to a topic, looked up now. `start_ns`: start of the timeout, None for now.
        Raises as `of` does.
        """
        if not isinstance(topic, str):
            raise InvalidRecordError(f"topic is {topic!r:.100}; it must be text")
        sender_thread, settings = self._sender_thread, self._settings
        sender_thread.check_usable()
        error = sender_thread.do(self._lookups.take_error, topic)
        if error is not None:
            raise error
        try:
            try:
                info = yield from self._described(topic, start_ns)
            except UnknownTopicError:
                if not sender_thread.connection.session.auto_create_topics:
                    raise
                info = yield from self._created(topic, schema_message, start_ns)
        except (NotReachableError, RequestTimeoutError):
            sender_thread.do(
                self._lookups.begin,
                topic,
                lambda: create_request(
                    topic, schema_message=schema_message() if schema_message else None
                ),
            )
            sender_thread.helper.wake()
            if settings.max_block_ms:
                raise
            raise self._not_known_yet(topic) from None
        check_partitioner(info, settings)
        route = sender_thread.do(self._adopt, info)
        if (
            info.settings["durability"] == "memory"
            and settings.acks == "all"
            and topic not in self._warned
        ):
            self._warned.add(topic)
            warnings.warn(
                f"topic {topic!r} has durability=memory: acks='all' does not wait for the disk",
                RuntimeWarning,
                stacklevel=STACK_DEPTH,
            )
        return route

    def adopt(self, info: TopicInfo) -> TopicRoute:
        """The route to a topic that the caller has looked up. Call it in a section."""
        check_partitioner(info, self._settings)
        return self._adopt(info)

    def forget(self, topic: str) -> None:
        """Look the topic up again before its next record."""
        self.by_topic.pop(topic, None)
        self.known.pop(topic, None)

    def queue_now(self, route: TopicRoute, partition: int) -> PartitionQueue:
        """The queue that replaced a queue of the route. Raises UnknownTopicError."""
        queue = self._sender_thread.accumulator.queues.get((route.info.topic_id, partition))
        if queue is not None:
            return queue
        now = self.by_topic.get(route.info.name)
        if (
            now is None
            or partition >= len(now.queues)
            or now.queues[partition].is_gone
            or now.info.schema != route.info.schema
        ):
            raise UnknownTopicError(f"topic {route.info.name!r} was deleted")
        return now.queues[partition]

    def forget_all(self) -> None:
        """Forget all topics."""
        self.by_topic.clear()
        self.known.clear()

    def remember(self, topic: str, key: bytes | None, queue: PartitionQueue) -> None:
        """Cache the partition of a key. Without a key, it is valid until its batch closes."""
        if topic in self.known:
            self.known[topic].remember(key, queue)

    def forget_keyless(self, topic: str) -> None:
        """Drop the cached partition of records without a key: its batch closed."""
        known = self.known.get(topic)
        if known is not None:
            known.forget_keyless()

    def _not_known_yet(self, topic: str) -> RequestTimeoutError:
        """The error of a send that may not wait at all."""
        connection = self._sender_thread.connection
        state = (
            ""
            if connection.is_ready
            else f", and no appliance at {connection.address} has answered yet"
            f"{connection.peer_error_suffix()}"
        )
        return RequestTimeoutError(
            f"topic {topic!r} is not known to this producer yet{state}. max_block_ms is 0, so "
            "nothing was sent, and the topic is looked up meanwhile: send the record again in a "
            "moment, or set max_block_ms to the time that a send may wait"
        )

    def _described(self, topic: str, start_ns: int | None) -> Steps[TopicInfo]:
        answer = yield from self._call(Api.METADATA, {"topics": [topic]}, start_ns)
        return topics_from_metadata(answer, topic)[topic]

    def _created(
        self, topic: str, schema_message: Callable[[], bytes] | None, start_ns: int | None
    ) -> Steps[TopicInfo]:
        """Create the topic, on an appliance that allows it (an embedded one), and wait until it is
        shown. Another client may have created it a moment before, or deletes one of that name.
        """
        now_ns = self._sender_thread.now_ns
        start_ns = now_ns() if start_ns is None else start_ns
        request = create_request(topic, schema_message=schema_message() if schema_message else None)
        while True:
            answer = yield from self._call(Api.CREATE_TOPICS, {"topics": [request]}, start_ns)
            for result in answer["results"]:
                if result["code"] not in (ErrorCode.OK, ErrorCode.TOPIC_EXISTS):
                    raise error_for(ErrorCode(result["code"]), result.get("message", ""))
            try:
                return (yield from self._described(topic, start_ns))
            except UnknownTopicError:
                if now_ns() >= start_ns + self._settings.max_block_ms * NS_PER_MS:
                    raise RequestTimeoutError(
                        f"topic {topic!r} cannot be created while one of that name is deleted, or "
                        "is not shown yet by the appliance: send the record again"
                    ) from None
            yield Wait(now_ns() + SHOWN_INTERVAL_NS)  # then the same request, which has an id

    def _adopt(self, info: TopicInfo) -> TopicRoute:
        """Make the route by METADATA. Queues of the same topic id stay. The batches of a deleted
        topic of that name move to the new one.
        """
        known = self.by_topic.get(info.name)
        accumulator = self._sender_thread.accumulator
        if known is not None and known.info.topic_id != info.topic_id:
            self._topic_recreation.begin(known.info)
        if (
            known is not None
            and info.typed
            and known.info.topic_id == info.topic_id
            and info.schema_id < known.info.schema_id
        ):
            return known  # from a front that does not have the newer schema yet
        if info.slot_map_version:
            info = self._slot_map_change.usable(info)
        queues = [accumulator.queue(info, partition) for partition in range(len(info.partitions))]
        delay_route = None if info.delay_log is None else self._adopt(info.delay_log)
        self.known.pop(info.name, None)
        if self._caches_partitions and not info.typed and not info.delay_of:
            has_slots = bool(info.slot_map_version)
            self.known[info.name] = PartitionCache(
                queues,
                accepts_partitions=not has_slots,
                by_murmur2=self._by_murmur2 and not has_slots,
            )
        route = self.by_topic[info.name] = TopicRoute(info, queues, delay_route, self._settings)
        if info.slot_map_version and info.owners is None:
            self._slot_map_change.begin(info)
        if self._topic_recreation.is_waiting:
            self._topic_recreation.found(info)
        return route

    def _on_found(self, info: TopicInfo) -> None:
        """METADATA shows a topic that batches wait for."""
        self._adopt(info)

    def _on_missing(self, old: TopicInfo) -> None:
        """Create a deleted topic that batches wait for, if the appliance allows it: with as many
        partitions as they were sent to. It has no other settings, so none with delays or hash slots
        is created.
        """
        is_allowed = self._sender_thread.connection.session.auto_create_topics
        if is_allowed and not old.delay_of and not old.slot_map_version:
            self._lookups.begin(
                old.name,
                lambda: create_request(
                    old.name,
                    len(old.partitions),
                    schema_message=old.schema_message if old.typed else None,
                ),
            )

    def _on_lookup(self, info: TopicInfo) -> None:
        """METADATA shows a topic that no `send` could wait for. Raises InvalidSettingError."""
        self.adopt(info)

    def _refreshed(self) -> list[str]:
        """The topics whose partitions and settings are looked up again by time."""
        return [
            name
            for name, route in self.by_topic.items()
            if not route.info.delay_of and not route.info.slot_map_version
        ]

    def _on_described(self, info: TopicInfo) -> None:
        """METADATA shows a topic as it is now: partitions may be added, settings changed."""
        known = self.by_topic.get(info.name)
        if (
            known is not None
            and known.info.topic_id == info.topic_id
            and not any(queue.is_gone for queue in known.queues)
            and len(info.partitions) >= len(known.queues)
            and (
                len(info.partitions) > len(known.queues)
                or info.settings != known.info.settings
                or (info.schema_id > known.info.schema_id and info.has_all_schemas)
            )
        ):
            self._adopt(info)

    def _on_altered(self, info: TopicInfo) -> None:
        """The topic, or its delay log, has a newer schema, which its batches are converted to."""
        info = info.topic
        known = self.by_topic.get(info.name)
        if known is not None and known.info.topic_id == info.topic_id:
            self._adopt(info)

    def _on_moved(self, info: TopicInfo) -> None:
        """The topic's queues were replaced, since hash slots moved."""
        known = self.by_topic.get(info.name)
        if known is not None and known.info.topic_id == info.topic_id:
            self._adopt(info)


def check_partitioner(info: TopicInfo, settings: ProducerSettings) -> None:
    """Check that the producer routes as the topic does. Raises InvalidSettingError."""
    partitioner = settings.partitioner
    if not info.slot_map_version:
        if partitioner == HASH_SLOTS:
            raise InvalidSettingError(
                f"partitioner is {HASH_SLOTS}, and topic {info.name!r} has no hash slots: create "
                f"one with --config partitioner={HASH_SLOTS}, or leave it out"
            )
    elif partitioner not in (None, HASH_SLOTS):
        raise InvalidSettingError(
            f"partitioner is {partitioner!r:.100}, and topic {info.name!r} routes by hash slots, "
            "so that keys keep their order when partitions are added: leave partitioner out"
        )
    elif settings.acks == 0:
        raise InvalidSettingError(
            f"acks is 0, and topic {info.name!r} routes by hash slots: their moves are seen in "
            "responses only, so set acks to 1 or all"
        )
