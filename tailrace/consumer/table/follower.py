"""Follower: the thread of a table, which reads the topic and applies its records to the store.

    begin --> consumer of all partitions, from the beginning --> apply, publish positions, call back
      ^                          |
      +--- topic deleted or cut -+  (the store is emptied; waits until the topic is there again)

Owner: the thread. `Shared` is what others read, under its lock.

Invariants:
- Positions are published after the records before them were applied.
- The table is ready when it has reached the ends that the partitions had when it began.
- Callbacks are called by this thread, without the lock, in offset order for each partition. An
  exception of a callback is logged and counted; the thread goes on.
- An error that waiting does not mend ends the thread and is kept in `Shared.error`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tailrace.admin.admin import Admin
from tailrace.batch.topic_batch import TopicBatch
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.consumer.consumer import Consumer
from tailrace.consumer.table.changes import TableChange
from tailrace.consumer.table.fetched_rows import rows_of
from tailrace.consumer.table.key_codec import KeyCodec
from tailrace.consumer.table.latest_store import LatestStore, Rows
from tailrace.consumer.table.settings import FOR_CONSUMER, TableSettings
from tailrace.core.errors import (
    LogTruncatedError,
    NotReachableError,
    OffsetOutOfRangeError,
    RequestTimeoutError,
    TableFullError,
    TailraceError,
    UnknownTopicError,
)
from tailrace.core.log import logger
from tailrace.core.topic_partition import TopicPartition
from tailrace.scanning.latest.key_column import chosen_key

POLL_MS = 100
"""The longest wait of the thread before it checks whether the table was closed."""
METADATA_INTERVAL_S = 5.0
"""The time between two checks whether partitions were added."""
RETRY_S = 0.1
ADMIN_TIMEOUT_MS = 2_000
"""The longest wait for a description of the topic: `close` may have to wait for it."""


class Shared:
    """The state of a table that its thread and its users share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        """Notified when positions, readiness, or the error changes, and at the end."""
        self.store: LatestStore | None = None
        """None until the topic is known, and while it is deleted."""
        self.codec: KeyCodec | None = None
        self.positions: dict[TopicPartition, int] = {}
        """The offset behind the last applied record of each partition."""
        self.is_ready = False
        self.is_closed = False
        self.error: TailraceError | None = None
        """The error that ended the thread."""
        self.missing: TailraceError | None = None
        """The error of a topic that was deleted, until it is there again."""
        self.needs_partitions = False
        """True if someone waits for a partition that may be new."""
        self.callback_errors = 0
        self.listeners: set[Callable[[], None]] = set()
        """Called where `changed` is notified, under the lock."""

    def notify(self) -> None:
        """Wake all that wait for a change. The lock is taken."""
        self.changed.notify_all()
        for listener in tuple(self.listeners):
            try:
                listener()
            except RuntimeError:  # the event loop of the listener has ended
                self.listeners.discard(listener)

    def note_callback_error(self, topic: str, partition: int, offset: int) -> None:
        """Log and count the exception of `on_change` that is being handled. The lock is taken."""
        self.callback_errors += 1
        logger.exception(
            "table_callback_failed topic=%s partition=%d offset=%d", topic, partition, offset
        )


class _TopicReplaced(Exception):  # no error
    """The topic is another one, or its log was cut: the table begins again."""


class Follower:
    """Reads a topic into a store."""

    def __init__(self, topic: str, settings: TableSettings, shared: Shared) -> None:
        self._topic = topic
        self._settings = settings
        self._shared = shared
        self._info: TopicInfo | None = None
        self._key = ""
        self._requested: str | None = None
        """The key column that the program has named, under the name that it has now."""
        self._ends: dict[TopicPartition, int] = {}
        """The ends to reach before the table is ready; empty: it is."""
        self._checked_s = 0.0
        self._reason = ""
        """The error that the table waits after; empty: none."""

    def run(self) -> None:
        """Follow the topic until the table is closed, or fails."""
        shared = self._shared
        try:
            while not shared.is_closed:
                try:
                    self._follow()
                except _TopicReplaced:
                    self._empty(None)
                except UnknownTopicError as error:
                    if self._info is None:
                        raise
                    self._empty(error)
                except (NotReachableError, RequestTimeoutError) as error:
                    self._wait_after(error)
        except TailraceError as error:
            self._fail(error)
        except Exception as error:
            if shared.is_closed:
                return  # its store is gone
            logger.exception("table_failed topic=%s", self._topic)
            self._fail(TailraceError(f"the table of topic {self._topic!r} has failed: {error!r}"))

    def _fail(self, error: TailraceError) -> None:
        logger.error("table_stopped topic=%s reason=%r", self._topic, str(error))
        with self._shared.changed:
            self._shared.error, self._shared.store = error, None
            self._shared.notify()

    def _wait_after(self, error: TailraceError) -> None:
        """Wait a little before the next attempt. Logs an error once."""
        if self._reason != str(error):
            self._reason = str(error)
            logger.warning("table_waits topic=%s reason=%r", self._topic, self._reason)
        self._pause()

    def _pause(self) -> None:
        with self._shared.changed:
            if not self._shared.is_closed:
                self._shared.changed.wait(RETRY_S)

    def _empty(self, error: TailraceError | None) -> None:
        """The topic is gone, or another one: its keys are gone."""
        shared = self._shared
        with shared.changed:
            store, codec, was_ready = shared.store, shared.codec, shared.is_ready
            shared.store, shared.positions, shared.is_ready = None, {}, False
            shared.missing = error
            shared.notify()
        if (
            store is not None
            and codec is not None
            and was_ready
            and self._settings.on_change is not None
        ):
            for data in store.key_snapshot():
                self._call(codec.decode, data, None, -1, -1, -1)
        if error is not None:
            self._pause()

    # ---- one life of the topic -------------------------------------------------------------------

    def _follow(self) -> None:
        settings = self._settings
        chosen: dict[str, Any] = {name: getattr(settings, name) for name in FOR_CONSUMER}
        with (
            Admin(
                settings.bootstrap_servers,
                client_id=settings.client_id,
                request_timeout_ms=min(settings.request_timeout_ms, ADMIN_TIMEOUT_MS),
            ) as admin,
            Consumer(
                bootstrap=settings.bootstrap_servers, auto_offset_reset="none", **chosen
            ) as consumer,
        ):
            self._begin(consumer, admin)
            while not self._shared.is_closed:
                try:
                    self._step(consumer, admin)
                    self._reason = ""
                except UnknownTopicError:
                    raise
                except TailraceError as error:
                    if not error.retriable and not isinstance(
                        error, NotReachableError | RequestTimeoutError
                    ):
                        raise
                    self._wait_after(error)  # the consumer goes on from its positions

    def _step(self, consumer: Consumer, admin: Admin) -> None:
        try:
            batches = consumer.poll_arrow(POLL_MS)
        except OffsetOutOfRangeError:
            self._go_to_beginning(consumer)
            return
        except LogTruncatedError as error:
            raise _TopicReplaced from error
        for batch in batches:
            if self._info is not None and self._info.typed:
                self._follow_schema(batch.schema_id, admin)
        changes = self._apply(batches)
        self._publish(consumer.positions())
        for change in changes:
            self._call(*change)
        self._check_partitions(consumer, admin)

    def _follow_schema(self, schema_id: int, admin: Admin) -> None:
        """Convert what is kept to the newest version of the topic's schema, if a batch has one that
        is not known. Raises _TopicReplaced if the keys have another type now: they are read again.
        """
        before = self._info
        assert before is not None
        if schema_id in before.history:
            return
        info = admin.topic_info([self._topic])[self._topic]
        while schema_id not in info.history:  # the front does not have it yet
            self._pause()
            if self._shared.is_closed:
                return
            info = admin.topic_info([self._topic])[self._topic]
        if info.topic_id != before.topic_id:
            raise _TopicReplaced
        name = info.history.renamed(self._key, before.schema_id) or self._key
        if self._requested is not None:
            self._requested = name
        key = chosen_key(self._topic, info.schema, name, typed=info.typed)
        if key.kind != before.schema.field(self._key).type:
            raise _TopicReplaced
        with self._shared.lock:
            store = self._shared.store
            assert store is not None
            store.convert(lambda rows: info.history.convert(rows, before.schema_id))
            self._info, self._key = info, key.name

    def _begin(self, consumer: Consumer, admin: Admin) -> None:
        settings = self._settings
        before, info = self._info, admin.topic_info([self._topic])[self._topic]
        self._info = info
        if before is None or info.topic_id != before.topic_id:
            self._requested = settings.key_column
        requested = self._requested or info.settings.get("key.column") or None
        key = chosen_key(self._topic, info.schema, requested, typed=info.typed)
        self._key = key.name
        codec = KeyCodec(key.kind, settings.key_serializer, settings.key_deserializer)
        self._checked_s = time.monotonic()
        keys = [TopicPartition(self._topic, number) for number in range(len(info.partitions))]
        consumer.assign(keys)
        consumer.seek_to_beginning()
        self._ends = consumer.end_offsets(keys)
        with self._shared.changed:
            self._shared.store = LatestStore(typed=info.typed)
            self._shared.codec = codec
            self._shared.missing = None
        self._publish(consumer.positions())

    def _publish(self, positions: Mapping[TopicPartition, int]) -> None:
        self._ends = {key: end for key, end in self._ends.items() if positions.get(key, -1) < end}
        shared = self._shared
        with shared.changed:
            if positions != shared.positions or (not self._ends and not shared.is_ready):
                shared.positions = dict(positions)
                shared.is_ready = shared.is_ready or not self._ends
                shared.notify()

    def _check_partitions(self, consumer: Consumer, admin: Admin) -> None:
        """Read partitions that were added, and begin again with a topic that was made again."""
        now_s = time.monotonic()
        if not self._shared.needs_partitions and now_s - self._checked_s < METADATA_INTERVAL_S:
            return
        self._checked_s, self._shared.needs_partitions = now_s, False
        info = admin.topic_info([self._topic])[self._topic]
        assert self._info is not None
        if info.topic_id != self._info.topic_id:
            raise _TopicReplaced
        known = consumer.assignment()
        added = [
            TopicPartition(self._topic, number)
            for number in range(len(known), len(info.partitions))
        ]
        if added:
            consumer.assign([*known, *added])
            consumer.seek_to_beginning(*added)
            self._info = info

    def _go_to_beginning(self, consumer: Consumer) -> None:
        """Offsets that were not read are gone from the log: what was read before them, too, is
        outdated. Raises _TopicReplaced if the log was cut at its end.
        """
        positions = consumer.positions()
        first_offsets = consumer.beginning_offsets(consumer.assignment())
        behind = {key: at for key, at in first_offsets.items() if positions.get(key, -1) < at}
        if not behind:
            raise _TopicReplaced
        for key, beginning in behind.items():
            logger.warning(
                "table_skipped topic=%s partition=%d from=%d to=%d",
                key.topic, key.partition, positions.get(key, -1), beginning,
            )  # fmt: skip
            with self._shared.lock:
                store = self._shared.store
                assert store is not None
                removed = store.remove_below(key.partition, beginning)
            consumer.seek(key, beginning)
            if self._shared.is_ready:
                for data in removed:
                    self._call(self._codec().decode, data, None, key.partition, -1, -1)
        self._publish(consumer.positions())

    # ---- records ---------------------------------------------------------------------------------

    def _apply(self, batches: list[TopicBatch]) -> list[tuple[Any, ...]]:
        """Apply fetched batches; returns the arguments of the callbacks."""
        store = self._shared.store
        assert store is not None
        assert self._info is not None
        changes: list[tuple[Any, ...]] = []
        by_partition: dict[int, list[TopicBatch]] = {}
        for batch in batches:
            if len(batch):
                by_partition.setdefault(batch.partition, []).append(batch)
        for partition, parts in by_partition.items():
            rows = rows_of(self._info, self._key, partition, parts)
            with self._shared.lock:
                applied = store.apply(rows)
                store.tidy(len(self._info.partitions))
            if self._settings.on_change is not None and self._shared.is_ready:
                changes.extend(self._changes(rows, applied))
        if batches:
            self._check_size(store)
        return changes

    def _changes(self, rows: Rows, applied: Any) -> Iterator[tuple[Any, ...]]:
        assert self._info is not None
        shown = self._codec().shown
        for row in applied.tolist():
            yield (
                shown,
                rows.keys[row].as_py(),
                rows.values.slice(row, 1).to_pylist()[0]
                if self._info.typed
                else rows.values.column(0)[row].as_py(),
                rows.partition,
                int(rows.offsets[row]),
                int(rows.times_us[row]) // 1_000,
            )

    def _check_size(self, store: LatestStore) -> None:
        settings = self._settings
        for name, size, limit in (
            ("max_records", store.record_count, settings.max_records),
            ("max_bytes", store.byte_count, settings.max_bytes),
        ):
            if size > limit:
                raise TableFullError(
                    f"the table of topic {self._topic!r} has {size} of {name}={limit}, and has "
                    f"stopped; raise {name}, or keep fewer keys"
                )

    def _codec(self) -> KeyCodec:
        codec = self._shared.codec
        assert codec is not None
        return codec

    def _call(
        self,
        shown: Callable[[Any], Any],
        key: Any,
        value: Any,
        partition: int,
        offset: int,
        timestamp: int,
    ) -> None:
        """Call on_change, with `shown(key)`, unless the table is closed. An exception is logged and
        counted.
        """
        settings = self._settings
        if self._shared.is_closed:
            return
        try:
            if value is not None and settings.value_deserializer is not None:
                value = settings.value_deserializer(value)
            settings.on_change(TableChange(shown(key), value, partition, offset, timestamp))
        except Exception:
            with self._shared.lock:
                self._shared.note_callback_error(self._topic, partition, offset)
                self._shared.notify()
