"""Search for the first record at or after a time. The appliance answers from its indexes. Where it
cannot, because its host has no codec for a batch or a batch is damaged, the client reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pyarrow.compute as pc

from tailrace.batch import arrow_codec
from tailrace.client.config.settings import ConsumerSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Call, Steps
from tailrace.client.topics.list_offsets import list_offsets, offset_in
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import RequestTimeoutError
from tailrace.core.records import OffsetAndTimestamp
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.fetch_loop import FetchLoop
from tailrace.fetch.fetcher import Fetcher
from tailrace.fetch.partition_position import PartitionPosition
from tailrace.fetch.read_errors import UnknownSchemaError


def first_records_at(
    connection: Connection,
    fetch_loop: FetchLoop,
    settings: ConsumerSettings,
    call: Call,
    info: Callable[[str], Steps[TopicInfo]],
    requested: Mapping[TopicPartition, int],
) -> Steps[dict[TopicPartition, OffsetAndTimestamp | None]]:
    """The first record of each partition at or after a time in microseconds; None: there is none.
    `info` looks a topic up. Raises UnknownTopicError, PartitionOutOfRangeError.
    """
    result: dict[TopicPartition, OffsetAndTimestamp | None] = {}
    found = yield from list_offsets(call, requested.items(), settings.isolation_level)
    for key, item in found.items():
        offset = offset_in(item)
        if offset < 0:
            result[key] = None
        elif item.get("exact"):
            result[key] = OffsetAndTimestamp(offset, item["timestamp_us"] // 1000)
        else:
            cursor = PartitionPosition(key, (yield from info(key.topic)))
            cursor.seek(offset)
            ends = yield from list_offsets(call, [(key, "latest")], settings.isolation_level)
            end = offset_in(ends[key])
            fetch = _fetching(connection, fetch_loop, settings)
            result[key] = yield from offset_for_time(cursor, requested[key], end, fetch, settings)
    return result


def _fetching(
    connection: Connection, fetch_loop: FetchLoop, settings: ConsumerSettings
) -> Callable[[PartitionPosition], Steps[None]]:
    """Fetch a cursor beside the loop's own ones, for request_timeout_ms in all."""
    fetcher = Fetcher(connection, settings, connection.now_ns)
    timeout_ms = settings.request_timeout_ms
    deadline_ns = connection.now_ns() + timeout_ms * 1_000_000

    def fetch(cursor: PartitionPosition) -> Steps[None]:
        if connection.now_ns() >= deadline_ns:
            raise RequestTimeoutError(
                f"the search for a time in {cursor.key.topic}-{cursor.key.partition} did not end "
                f"within {timeout_ms} ms (request_timeout_ms)"
            )
        return fetch_loop.step(fetcher, [cursor], deadline_ns)

    return fetch


def offset_for_time(
    cursor: PartitionPosition,
    when_us: int,
    end: int,
    fetch: Callable[[PartitionPosition], Steps[None]],
    settings: ConsumerSettings,
) -> Steps[OffsetAndTimestamp | None]:
    """The first record at or after `when_us`, from the cursor's position to the offset `end`; None:
    there is none. `fetch` waits until the cursor has a batch. Raises the cursor's error.
    """
    while cursor.position is not None and cursor.position < end:
        yield from fetch(cursor)
        try:
            found = first_buffered(cursor, when_us, settings)
        except UnknownSchemaError:
            continue  # the next fetch looks it up
        if found is not None:
            return found
    return None


def first_buffered(
    cursor: PartitionPosition, when_us: int, settings: ConsumerSettings
) -> OffsetAndTimestamp | None:
    """The first row at or after a time in the buffered batches, which are consumed. Raises the
    cursor's error.
    """
    if cursor.error is not None:
        raise cursor.error
    while (taken := cursor.take(settings)) is not None:
        header, rows, first_offset, offsets = taken
        if header.max_timestamp_us < when_us:
            continue
        stamps = arrow_codec.timestamps_of(rows, header, is_typed=cursor.info.typed)
        if stamps is None:
            return OffsetAndTimestamp(first_offset, header.max_timestamp_us // 1000)
        row = pc.index(pc.greater_equal(stamps, when_us), True).as_py()
        if row >= 0:
            offset = first_offset + row if offsets is None else offsets[row].as_py()
            return OffsetAndTimestamp(offset, stamps[row].as_py() // 1000)
    return None
