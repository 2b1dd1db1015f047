"""The batches of one partition from the appliance, over ZeroMQ: for other hosts, other users, and directories that cannot be opened here.

Owner: one reader, one thread at a time; it holds the connection.
Invariants: batches come in offset order from the one that holds the first offset asked for, each proven by both checksums. An appliance that is away is waited
    for, request_timeout_ms at a time without a batch; a restarted one is asked again for what has not come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from tailrace.connection import Connection
from tailrace.environment import REAL
from tailrace.errors import CorruptBatchError, NotReachableError, RequestTimeoutError, UnknownTopicError
from tailrace.fetcher import PartitionCursor
from tailrace.formats.batch_header import BatchFormatError, header_is_intact, verify_batch
from tailrace.offset_lookup import At, list_offsets, offset_in
from tailrace.protocol.wire import Api
from tailrace.reading import Reading
from tailrace.records import TopicPartition
from tailrace.scanning.frames import Frame, damage_error
from tailrace.scanning.options import ScanSettings
from tailrace.settings import ConsumerSettings
from tailrace.topic_infos import TopicInfos

FETCH_BYTES = 8 << 20
LOOK_NS = 1_000_000_000


class RemoteBatches:
    """Of one partition. See the module's docstring."""

    def __init__(self, bootstrap: str, topic: str, topic_id: bytes, partition: int, settings: ScanSettings, schema: pa.Schema) -> None:
        """`topic_id`: the topic that the scan was planned for."""
        self.key = TopicPartition(topic, partition)
        self._topic_id = topic_id
        self._schema = schema
        self._timeout_ms = settings.request_timeout_ms
        self._settings = ConsumerSettings(
            bootstrap=bootstrap, auto_offset_reset="none", client_id=settings.client_id, request_timeout_ms=settings.request_timeout_ms,
            max_partition_fetch_bytes=FETCH_BYTES, fetch_max_bytes=2 * FETCH_BYTES,
        )  # fmt: skip
        self._connection = Connection(bootstrap, settings.client_id, REAL, "scan")
        self._now_ns = REAL.monotonic_ns
        self._reading = Reading(self._connection, self._settings, self._now_ns, self._offsets, lambda _key: None)

    def close(self) -> None:
        """End the connection; a second time it does nothing."""
        self._connection.close()

    def _call(self, api: Api, request: dict[str, Any]) -> dict[str, Any]:
        return self._connection.call_json(api, request, self._timeout_ms)

    def _offsets(self, keys: Iterable[TopicPartition], at: At) -> dict[TopicPartition, int]:
        return {key: offset_in(item) for key, item in list_offsets(self._call, [(key, at) for key in keys]).items()}

    def frames(self, start: int, end: int) -> Iterator[Frame]:
        """See `Source`. Raises UnknownTopicError when the topic was deleted, OffsetOutOfRangeError when retention was faster, NotReachableError and
        RequestTimeoutError when nothing comes for request_timeout_ms.
        """
        info = TopicInfos(self._call).of(self.key.topic)
        if info.topic_id != self._topic_id:
            raise UnknownTopicError(f"topic {self.key.topic!r} was deleted while it was scanned, at offset {start}, and made anew")
        cursor = PartitionCursor(self.key, info)
        cursor.seek(start)
        self._reading.cursors = {self.key: cursor}
        position = start
        while position < end:
            self._await_batches(cursor, position, end)
            while cursor.buffered and position < end:
                data, next_offset = cursor.buffered.popleft()
                cursor.buffered_bytes -= len(data)
                frame = self._proven(data, position, next_offset, info.seeds[self.key.partition])
                position = cursor.position = next_offset
                if position < end:
                    self._reading.ask_ahead()
                yield frame

    def _proven(self, data: memoryview, position: int, next_offset: int, seed: int) -> Frame:
        try:
            header = verify_batch(data, seed)
        except BatchFormatError as error:
            # What the header says of its length in offsets counts only if the header itself is intact.
            following = next_offset if header_is_intact(data, seed) else self._offsets([self.key], {"behind": position})[self.key]
            raise damage_error(self.key, position, following, error.reason) from None
        if header.base_offset > position:
            raise damage_error(self.key, position, header.base_offset, "the batch that holds it did not come")
        return Frame(header, data, self._schema)

    def _await_batches(self, cursor: PartitionCursor, position: int, end: int) -> None:
        """Until something is buffered."""
        deadline_ns = self._now_ns() + self._timeout_ms * 1_000_000
        where = f"the scan of {self.key.topic}-{self.key.partition} stands at offset {position} of {end}"
        try:
            while not self._reading.advance(min(deadline_ns, self._now_ns() + LOOK_NS)):
                if self._now_ns() < deadline_ns:
                    continue
                if not self._connection.is_ready:
                    raise NotReachableError(f"no appliance answers at {self._connection.address} for {self._timeout_ms} ms: {where}")
                raise RequestTimeoutError(f"the appliance at {self._connection.address} gave nothing for {self._timeout_ms} ms: {where}")
        except CorruptBatchError as error:
            following = error.next_offset if error.next_offset is not None else position + 1
            raise damage_error(self.key, position, max(following, position + 1), "it cannot be read") from None
        except UnknownTopicError:
            raise UnknownTopicError(f"topic {self.key.topic!r} was deleted while it was scanned: {where}") from None
