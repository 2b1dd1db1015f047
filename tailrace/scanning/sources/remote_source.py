"""RemoteSource: reads a partition's batches from the appliance over ZeroMQ.

It serves other hosts, other users, and directories that cannot be opened here.

Owner: one reader, one thread at a time. It holds the connection.

Invariants:
- Batches come in offset order from the first requested offset on, each verified by both checksums.
- It waits up to request_timeout_ms without a batch for an appliance that is away.
- After a restart of the appliance it requests the missing batches again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from tailrace.client.config.settings import ConsumerSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.runtime import SYSTEM
from tailrace.client.connections.steps import Steps, call_json, run_on
from tailrace.client.topics.list_offsets import At, list_offsets, offset_in
from tailrace.client.topics.metadata_cache import MetadataCache
from tailrace.core.errors import (
    CorruptBatchError,
    NotReachableError,
    RequestTimeoutError,
    UnknownTopicError,
    UnknownTopicIdError,
)
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.fetch_loop import FetchLoop
from tailrace.fetch.partition_position import PartitionPosition
from tailrace.fetch.timestamp_search import first_records_at
from tailrace.format.record_batch.batch_header import BatchFormatError, verify_batch
from tailrace.format.record_batch.header_peek import header_is_intact
from tailrace.protocol.frame import Api
from tailrace.scanning.batch import StoredBatch, damage_error
from tailrace.scanning.options import ScanSettings

FETCH_BYTES = 8 << 20
POLL_INTERVAL_NS = 1_000_000_000


class RemoteSource:
    """The batches of one partition from the appliance."""

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        topic_id: bytes,
        partition: int,
        settings: ScanSettings,
        schema: pa.Schema,
    ) -> None:
        """`topic_id` is the topic's at planning time."""
        self.key = TopicPartition(topic, partition)
        self._topic_id = topic_id
        self._schema = schema
        self._timeout_ms = settings.request_timeout_ms
        self._settings = ConsumerSettings(
            bootstrap_servers=bootstrap, auto_offset_reset="none", client_id=settings.client_id,
            request_timeout_ms=settings.request_timeout_ms,
            max_partition_fetch_bytes=FETCH_BYTES, fetch_max_bytes=2 * FETCH_BYTES,
        )  # fmt: skip
        self._connection = Connection(bootstrap, settings.client_id, SYSTEM, "scan")
        self._now_ns = SYSTEM.monotonic_ns
        self._fetch_loop = FetchLoop(
            self._connection, self._settings, self._now_ns, self._offsets, lambda _key: None
        )

    def close(self) -> None:
        """Close the connection. Does nothing a second time."""
        self._connection.close()

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        return call_json(self._connection, api, request, self._timeout_ms)

    def _offsets(self, keys: Iterable[TopicPartition], at: At) -> Steps[dict[TopicPartition, int]]:
        found = yield from list_offsets(self._call, [(key, at) for key in keys])
        return {key: offset_in(item) for key, item in found.items()}

    def frames(self, start: int, end: int) -> Iterator[StoredBatch]:
        """Yield the batches of offsets `start` to `end - 1`, as `Source` specifies.

        Raises UnknownTopicError if the topic was deleted, OffsetOutOfRangeError if retention
        removed the offsets, NotReachableError and RequestTimeoutError after request_timeout_ms
        without a batch.
        """
        info = run_on(self._connection, MetadataCache(self._call).of(self.key.topic))
        if info.topic_id != self._topic_id:
            raise UnknownTopicIdError(
                f"topic {self.key.topic!r} was deleted while it was scanned, at offset {start}, "
                "and created again"
            )
        cursor = PartitionPosition(self.key, info)
        cursor.seek(start)
        self._fetch_loop.cursors = {self.key: cursor}
        position = start
        while position < end:
            self._await_batches(cursor, position, end)
            if not cursor.buffered:  # no record is left up to the cursor
                position = max(position, cursor.position or 0)
            while cursor.buffered and position < end:
                position = max(position, cursor.position or 0)
                data, next_offset = cursor.buffered.popleft()
                cursor.buffered_bytes -= len(data)
                frame = self._proven(data, position, next_offset, info.seeds[self.key.partition])
                position = cursor.position = next_offset
                if position < end:
                    self._fetch_loop.ask_ahead()
                yield frame

    def _proven(self, data: memoryview, position: int, next_offset: int, seed: int) -> StoredBatch:
        try:
            header = verify_batch(data, seed)
        except BatchFormatError as error:
            # The length in offsets counts only if the header is intact.
            if header_is_intact(data, seed):
                following = next_offset
            else:
                following = run_on(
                    self._connection, self._offsets([self.key], {"behind": position})
                )[self.key]
            raise damage_error(self.key, position, following, error.reason) from None
        if header.base_offset > position:
            raise damage_error(
                self.key,
                position,
                header.base_offset,
                "the batch with this offset is missing in the response",
            )
        return StoredBatch(header, data, self._schema)

    def _await_batches(self, cursor: PartitionPosition, position: int, end: int) -> None:
        """Wait until a batch is buffered, or the cursor has passed over offsets without one."""

        def has_moved() -> bool:
            return cursor.position is not None and cursor.position > position

        deadline_ns = self._now_ns() + self._timeout_ms * 1_000_000
        where = (
            f"the scan of {self.key.topic}-{self.key.partition} is at offset {position} of {end}"
        )
        try:
            while not run_on(
                self._connection,
                self._fetch_loop.poll(
                    min(deadline_ns, self._now_ns() + POLL_INTERVAL_NS), has_moved
                ),
            ):
                if self._now_ns() < deadline_ns:
                    continue
                if not self._connection.is_ready:
                    raise NotReachableError(
                        f"no appliance answers at {self._connection.address} for "
                        f"{self._timeout_ms} ms (request_timeout_ms): {where}"
                    )
                raise RequestTimeoutError(
                    f"the appliance at {self._connection.address} sent no batch for "
                    f"{self._timeout_ms} ms (request_timeout_ms): {where}"
                )
        except CorruptBatchError as error:
            following = error.next_offset if error.next_offset is not None else position + 1
            raise damage_error(
                self.key, position, max(following, position + 1), "it cannot be read"
            ) from None
        except UnknownTopicError:
            raise UnknownTopicIdError(
                f"topic {self.key.topic!r} was deleted while it was scanned: {where}"
            ) from None


class TimeLookup:
    """Looks up the first offsets at or after a time at the appliance."""

    def __init__(self, bootstrap: str, settings: ScanSettings) -> None:
        self._settings = ConsumerSettings(
            bootstrap_servers=bootstrap,
            client_id=settings.client_id,
            request_timeout_ms=settings.request_timeout_ms,
            max_decompressed_batch_bytes=settings.max_decompressed_batch_bytes,
        )
        self._connection = Connection(bootstrap, settings.client_id, SYSTEM, "scan")

    def close(self) -> None:
        """Close the connection. Does nothing a second time."""
        self._connection.close()

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        return call_json(self._connection, api, request, self._settings.request_timeout_ms)

    def _offsets(self, keys: Iterable[TopicPartition], at: At) -> Steps[dict[TopicPartition, int]]:
        found = yield from list_offsets(self._call, [(key, at) for key in keys])
        return {key: offset_in(item) for key, item in found.items()}

    def offsets(self, requested: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """The first offset at or after each time in microseconds; None: there is none. Raises
        UnknownTopicError, NotReachableError, RequestTimeoutError.
        """
        fetch_loop = FetchLoop(
            self._connection,
            self._settings,
            self._connection.now_ns,
            self._offsets,
            lambda _key: None,
        )
        found = run_on(
            self._connection,
            first_records_at(
                self._connection,
                fetch_loop,
                self._settings,
                self._call,
                MetadataCache(self._call).of,
                requested,
            ),
        )
        return {key: None if item is None else item.offset for key, item in found.items()}
