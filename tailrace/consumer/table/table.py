"""The table: a topic as a dictionary of the latest value of each key.

    with tailrace.Table("users", bootstrap=address) as users:
        users["u1"]

Its thread (`tailrace.consumer.table.follower`) reads the topic from the beginning, and goes on
reading. Lookups read memory and send nothing.

Owner: any thread may use a Table. Its thread ends with `close`.

Invariants:
- A lookup never waits for the appliance.
- Values are those of committed records. A key whose latest record has no value is not in the table.
- Nothing is dropped to save memory: beyond `max_records` or `max_bytes` every use raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

from tailrace.client.config.from_context import FromContext
from tailrace.client.config.setting_fields import build, documented, merged
from tailrace.consumer.table.follower import Follower, Shared
from tailrace.consumer.table.key_codec import KeyCodec
from tailrace.consumer.table.latest_store import LatestStore
from tailrace.consumer.table.settings import TableOptions, TableSettings
from tailrace.core import fork
from tailrace.core.errors import (
    ClientClosedError,
    InvalidRequestError,
    NotReachableError,
    RequestTimeoutError,
    TailraceError,
)
from tailrace.core.log import logger
from tailrace.core.records import BatchMetadata, Record, RecordMetadata
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import name_of, timeout_s_of

CLOSE_WAIT_S = 5.0
"""The longest time that `close` waits for the thread, which may be in `on_change`."""

Offsets = (
    RecordMetadata
    | BatchMetadata
    | Iterable[RecordMetadata | BatchMetadata]
    | Mapping[TopicPartition, int]
)
_MISSING = object()


@documented(TableSettings)
class Table(FromContext):
    """The latest value of each key of a topic, in memory and kept up to date.

        with tailrace.Table("users", bootstrap=address) as users:
            users["u1"], users.get("u2"), "u3" in users, len(users)

    A context manager; `with` waits until the table is ready. It reads the topic from the beginning
    in a thread of its own, and goes on until `close`. Values are bytes, or rows (dicts) of a typed
    topic, or results of `value_deserializer`.
    """

    def __init__(
        self,
        topic: str,
        bootstrap: str | Sequence[str] | None = None,
        **settings: Unpack[TableOptions],
    ) -> None:
        """Begin to read `topic`. `bootstrap` is the appliance's address.

        Raises InvalidSettingError. Other errors are raised by the first use: a topic that does not
        exist is waited for until then.
        """
        self.settings = built(bootstrap, settings)
        self.topic = name_of("topic", topic)
        self._shared = Shared()
        self._is_forked = False
        self._serializes = (
            self.settings.key_serializer is not None or self.settings.key_column is not None
        )
        self._deserializer = self.settings.value_deserializer
        self._thread = threading.Thread(
            target=Follower(self.topic, self.settings, self._shared).run,
            name=f"tailrace-table-{self.topic}",
            daemon=True,
        )
        fork.add(self)
        self._thread.start()

    def after_fork(self) -> None:
        """Refuse every use in a child of the process that made the table."""
        self._is_forked = True
        self._shared = Shared()
        self._shared.is_closed = True

    def __enter__(self) -> Table:
        try:
            self.ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        shared = self._shared
        state = (
            "closed"
            if shared.is_closed
            else "stopped"
            if shared.error is not None
            else "ready"
            if shared.is_ready
            else "not ready"
        )
        return f"<Table of topic {self.topic!r}, {self.metrics()['records']} keys, {state}>"

    def close(self) -> None:
        """End the thread, and free the memory. A repeated call does nothing. A call of `on_change`
        that has begun is waited for, for CLOSE_WAIT_S at most.
        """
        shared = self._shared
        with shared.changed:
            shared.is_closed = True
            shared.notify()
        if not self._is_forked and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_WAIT_S)
            if self._thread.is_alive():
                logger.warning(
                    "table_closed topic=%s although its thread has not ended: it does when "
                    "on_change returns, or with the timeout of a request",
                    self.topic,
                )
        with shared.changed:
            shared.store = None

    # ---- waiting ---------------------------------------------------------------------------------

    def ready(self, timeout: float | None = None) -> None:
        """Wait until the table has all records that the topic had when it began to read.

        Raises RequestTimeoutError after `timeout` seconds (None: request_timeout_ms without
        progress), UnknownTopicError, NotReachableError, TableFullError.
        """
        self._wait(self._readiness(timeout))

    def wait_until(self, offsets: Offsets, timeout: float | None = None) -> None:
        """Wait until the table has these records, so that a program reads what it has written.

            users.wait_until(producer.send("users", b"v", key=b"u1").result())

        `offsets`: the metadata of a record or of several, or a dict of TopicPartition to the offset
        behind the last record requested, as of `end_offsets`. Raises as `ready`.
        """
        self._wait(self._arrival(offsets, timeout))

    def _offsets_of(self, offsets: Offsets) -> dict[TopicPartition, int]:
        """Partition -> the offset that the position must reach. Raises InvalidRequestError."""
        if isinstance(offsets, Mapping):
            items = [(key[0], key[1], offset) for key, offset in offsets.items()]
        else:
            one = isinstance(offsets, RecordMetadata | BatchMetadata | str)
            given: list[Any] = (
                list(offsets) if isinstance(offsets, Iterable) and not one else [offsets]
            )
            items = [(*_place_of(item), _behind(item)) for item in given]
        requested: dict[TopicPartition, int] = {}
        for topic, partition, offset in items:
            if topic != self.topic:
                raise InvalidRequestError(
                    f"the offset is one of topic {topic!r}, but the table is of {self.topic!r}"
                )
            key = TopicPartition(self.topic, partition)
            requested[key] = max(offset, requested.get(key, 0))
        return requested

    def _wait(self, waits: Iterator[float]) -> None:
        changed = self._shared.changed
        with changed:
            for deadline_s in waits:
                changed.wait(max(0.0, deadline_s - time.monotonic()))

    # The waits are generators, which an event loop can run, too: each yields the time
    # (`time.monotonic`) until which to wait for a change. They run under the lock.

    def _readiness(self, timeout: float | None) -> Iterator[float]:
        return self._until(lambda: self._shared.is_ready, timeout, "is not ready")

    def _arrival(self, offsets: Offsets, timeout: float | None) -> Iterator[float]:
        requested = self._offsets_of(offsets)

        def is_reached() -> bool:
            positions = self._shared.positions
            if any(key not in positions for key in requested):
                self._shared.needs_partitions = True
            return all(positions.get(key, -1) >= offset for key, offset in requested.items())

        return self._until(is_reached, timeout, f"has not reached {_shown(requested)}")

    def _until(
        self, is_done: Callable[[], bool], timeout: float | None, missing: str
    ) -> Iterator[float]:
        timeout_s = timeout_s_of(timeout)
        patience_s = self.settings.request_timeout_ms / 1_000 if timeout_s is None else timeout_s
        shared = self._shared
        deadline_s, before = time.monotonic() + patience_s, shared.positions
        while not is_done():
            self._check_usable()
            if time.monotonic() >= deadline_s:
                raise self._late(missing, patience_s)
            yield deadline_s
            if timeout_s is None and shared.positions != before:  # it makes progress
                deadline_s, before = time.monotonic() + patience_s, shared.positions
        self._check_usable()

    def _late(self, missing: str, seconds: float) -> TailraceError:
        if self._shared.missing is not None:
            return self._shared.missing
        if self._shared.store is None:
            return NotReachableError(
                f"no appliance answers at {self.settings.bootstrap_servers}: the table of topic "
                f"{self.topic!r} {missing} within {seconds:g} s"
            )
        return RequestTimeoutError(
            f"the table of topic {self.topic!r} {missing} within {seconds:g} s"
        )

    # ---- lookups ---------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        """The value of a key. Raises KeyError."""
        value = self.get(key, _MISSING)
        if value is _MISSING:
            raise KeyError(key)
        return value

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, `default` if the table does not have it."""
        shared = self._shared
        with shared.lock:
            store, codec = shared.store, shared.codec
            if store is None or codec is None or not shared.is_ready:
                store, codec = self._store()
            if type(key) is not bytes or self._serializes or not codec.is_variable:
                key = codec.encode(key)
            place = store.place_of(key)
            if place < 0:
                return default
            value = store.value_at(place)
        return value if self._deserializer is None else self._value(value)

    def __contains__(self, key: Any) -> bool:
        with self._shared.lock:
            store, codec = self._store()
            return codec.encode(key) in store

    def __len__(self) -> int:
        """The number of keys."""
        with self._shared.lock:
            return self._store()[0].record_count

    def record(self, key: Any) -> Record | None:
        """The latest record of a key, with its partition, offset, timestamp and headers; None if
        the table does not have the key.
        """
        with self._shared.lock:
            store, codec = self._store()
            data = codec.encode(key)
            row = store.row_of(data)
        if row is None:
            return None
        return Record(
            self.topic, row.partition, row.offset, row.time_us // 1_000, 0, codec.decode(data),
            self._value(row.value), row.headers, row.time_us,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        """The keys of a snapshot, in no order."""
        with self._shared.lock:
            store, codec = self._store()
            keys = store.key_snapshot()
        return map(codec.decode, keys)

    keys = __iter__

    def items(self) -> Iterator[tuple[Any, Any]]:
        """The keys and values of a snapshot, in no order: changes that come meanwhile are not in
        it.
        """
        with self._shared.lock:
            store, codec = self._store()
            pairs = store.snapshot()
        return ((codec.decode(key), self._value(value)) for key, value in pairs)

    def values(self) -> Iterator[Any]:
        """The values of a snapshot, in no order."""
        return (value for _, value in self.items())

    def positions(self) -> dict[TopicPartition, int]:
        """The offset behind the last applied record of each partition."""
        with self._shared.lock:
            self._check_usable()
            return dict(self._shared.positions)

    def metrics(self) -> dict[str, int]:
        """`records` (keys with a value), `bytes` (their memory), `callback_errors`."""
        with self._shared.lock:
            store = self._shared.store
            return {
                "records": 0 if store is None else store.record_count,
                "bytes": 0 if store is None else store.byte_count,
                "callback_errors": self._shared.callback_errors,
            }

    # ---- keys, values, state ---------------------------------------------------------------------

    def _value(self, value: Any) -> Any:
        return value if self._deserializer is None else self._deserializer(value)

    def _store(self) -> tuple[LatestStore, KeyCodec]:
        """The store of a table that is ready. Raises what is wrong. The lock is taken."""
        self._check_usable()
        shared = self._shared
        if shared.missing is not None:
            raise shared.missing
        if shared.store is None or shared.codec is None or not shared.is_ready:
            raise InvalidRequestError(
                f"the table of topic {self.topic!r} is not ready: call ready(), or use `with`"
            )
        return shared.store, shared.codec

    def _check_usable(self) -> None:
        if self._is_forked:
            raise fork.forked_error("Table")
        if self._shared.is_closed:
            raise ClientClosedError(f"the table of topic {self.topic!r} is closed")
        if self._shared.error is not None:
            raise self._shared.error


def built(bootstrap: str | Sequence[str] | None, settings: Mapping[str, Any]) -> TableSettings:
    """The settings of these keyword arguments. Raises InvalidSettingError."""
    given = {**settings, **({} if bootstrap is None else {"bootstrap": bootstrap})}
    return build(TableSettings, merged(None, given))


def _place_of(item: Any) -> tuple[str, int]:
    """The topic and partition of a record or a batch. Raises InvalidRequestError."""
    if not isinstance(item, RecordMetadata | BatchMetadata):
        raise InvalidRequestError(
            f"wait_until takes the metadata of records, or a dict of offsets, not {item!r:.100}; "
            "the metadata of a sent record is its future's result()"
        )
    return item.topic, item.partition


def _behind(item: RecordMetadata | BatchMetadata) -> int:
    """The offset behind a record or a batch. Raises InvalidRequestError without one."""
    if isinstance(item, RecordMetadata):
        if item.offset is not None:
            return item.offset + 1
    elif item.base_offset is not None:
        return item.base_offset + item.record_count
    raise InvalidRequestError(
        "the metadata has no offset (acks=0, or a delayed record), so nothing says when the table "
        "has it"
    )


def _shown(requested: Mapping[TopicPartition, int]) -> str:
    return ", ".join(f"{key.topic}-{key.partition}:{offset}" for key, offset in requested.items())
