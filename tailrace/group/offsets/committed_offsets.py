"""Lookup of committed offsets: for callers, and as the start positions of assigned partitions.

Owner: one Consumer, one thread.

Invariants: a lookup never moves a cursor that was moved since the lookup began.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Call, Steps, decode_answer
from tailrace.client.topics.offsets import Offsets
from tailrace.core.error_codes import ERROR_TABLE, ErrorCode
from tailrace.core.errors import TailraceError, error_for
from tailrace.core.records import OffsetAndMetadata
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.partition_position import PartitionPosition
from tailrace.group.offsets.offset_commit import POLL_INTERVAL_NS, RETRY_NS
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import encode_json
from tailrace.protocol.session import Response

PARTITIONS_PER_REQUEST = 2_000
DECISION_RETRY_NS = 10 * RETRY_NS
"""Interval of requests for a partition that waits for the decision of a prepared transaction."""
"""Partitions in one request."""


def request_items(connection: Connection, cursors: Iterable[PartitionPosition]) -> list[list[Any]]:
    """The partitions of the cursors as FETCH_OFFSETS takes them, with topic ids if the appliance's
    version has them.
    """
    has_ids = connection.version(Api.FETCH_OFFSETS) > 1
    return [
        [*cursor.key, cursor.info.topic_id.hex()] if has_ids else [*cursor.key]
        for cursor in cursors
    ]


def fetch_committed(
    call: Call,
    group: str,
    topic_ids: Mapping[TopicPartition, str],
    *,
    has_ids: bool,
    is_to_begin: bool = False,
) -> Steps[dict[TopicPartition, OffsetAndMetadata | None]]:
    """Look up the group's committed offset of each partition; None: nothing is committed.
    `topic_ids`: the topic id of each partition, in hexadecimal; empty: the current topic of the
    name. `has_ids`: the appliance takes ids. `is_to_begin`: see `start_offsets_in`. `call` makes a
    request. Raises the error of the response.
    """
    requested = list(topic_ids)
    found: dict[TopicPartition, OffsetAndMetadata | None] = dict.fromkeys(requested)
    for start in range(0, len(requested), PARTITIONS_PER_REQUEST):
        after: Any = None
        while True:
            request = {
                "group": group,
                "partitions": [
                    [*key, topic_ids[key]] if has_ids and topic_ids[key] else [*key]
                    for key in requested[start : start + PARTITIONS_PER_REQUEST]
                ],
                "after": after,
            }
            try:
                answer = yield from call(Api.FETCH_OFFSETS, request)
            except TailraceError as error:
                if error.code is ErrorCode.UNKNOWN_GROUP:
                    return found
                raise
            found.update(start_offsets_in(answer) if is_to_begin else committed_offsets_in(answer))
            after = answer.get("next")
            if after is None:
                break
    return found


NOT_COMMITTED_MS = -1
"""The commit time of an offset that was never committed. A consumer with auto_offset_reset "latest"
begins there, so that it misses no record of an added partition.
"""


def committed_offsets_in(answer: Mapping[str, Any]) -> Offsets:
    """The committed offsets in one page of FETCH_OFFSETS, without partitions that have none."""
    return {
        TopicPartition(topic, partition): OffsetAndMetadata(offset, metadata, epoch)
        for topic, partition, offset, epoch, metadata, committed_ms, *_ in answer["offsets"]
        if offset >= 0 and committed_ms != NOT_COMMITTED_MS
    }


def start_offsets_in(answer: Mapping[str, Any]) -> Offsets:
    """The committed offsets in one page of FETCH_OFFSETS. Where nothing is committed, they include
    the start that the appliance knows for a consumer with auto_offset_reset "latest".
    """
    return {
        TopicPartition(topic, partition): OffsetAndMetadata(offset, metadata, epoch)
        for topic, partition, offset, epoch, metadata, *_ in answer["offsets"]
        if offset >= 0
    }


class PositionLookup:
    """The start positions of newly assigned partitions, looked up without waiting while other
    partitions are read.
    """

    def __init__(
        self,
        connection: Connection,
        group: str,
        on_found: Callable[[TopicPartition, OffsetAndMetadata], None],
        *,
        begins_at_end: bool,
    ) -> None:
        """`on_found` is called with each committed offset. With `begins_at_end`, the offsets of
        `start_offsets_in` are used where nothing is committed.
        """
        self._connection = connection
        self._group = group
        self._on_found = on_found
        self._begins_at_end = begins_at_end
        self._cursors: dict[TopicPartition, PartitionPosition] = {}
        self._is_sent = False
        self._send_at_ns = 0
        self._count_max = PARTITIONS_PER_REQUEST
        """Partitions of the next request. A request is refused as a whole if a prepared transaction
        has an offset of one of them, so fewer are asked for then, and the refused ones come last.
        """
        self.error: TailraceError | None = None
        """The lookup's error, for poll to raise."""

    def __bool__(self) -> bool:
        return bool(self._cursors)

    def add(self, cursors: Iterable[PartitionPosition]) -> None:
        """Look up where these cursors begin, unless they are moved before."""
        for cursor in cursors:
            cursor.from_committed = True
            self._cursors[cursor.key] = cursor

    def due_ns(self) -> int | None:
        """The time of the next `poll` without input."""
        return (
            None
            if self._is_sent or not self._cursors
            else max(self._send_at_ns, self._connection.now_ns() + POLL_INTERVAL_NS)
        )

    def poll(self, now_ns: int) -> None:
        """Send a request if one is due."""
        if self._is_sent or now_ns < self._send_at_ns:
            return
        for key in [key for key, cursor in self._cursors.items() if not cursor.from_committed]:
            del self._cursors[key]
        requested = dict(list(self._cursors.items())[: self._count_max])
        if not requested:
            return
        request = {
            "group": self._group,
            "partitions": request_items(self._connection, requested.values()),
            "after": None,
        }
        self._is_sent = self._connection.request(
            Api.FETCH_OFFSETS,
            [encode_json(request)],
            lambda response: self._on_response(requested, response),
        )

    def _on_response(
        self, requested: dict[TopicPartition, PartitionPosition], response: Response | None
    ) -> None:
        self._is_sent = False
        if response is None:
            return
        found: Offsets = {}
        known: Collection[TopicPartition] = requested
        if response.code is ErrorCode.OK:
            answer = decode_answer(Api.FETCH_OFFSETS, response)
            found = (
                start_offsets_in(answer) if self._begins_at_end else committed_offsets_in(answer)
            )
            if answer.get("next") is not None:  # the others are requested again
                known = [
                    key
                    for topic, partition, *_ in answer["offsets"]
                    if (key := TopicPartition(topic, partition)) in requested
                ]
        elif response.code is ErrorCode.CONCURRENT_TRANSACTIONS:
            self._ask_others(requested)
            return
        elif response.code is not ErrorCode.UNKNOWN_GROUP:
            self._send_at_ns = self._connection.now_ns() + RETRY_NS
            if not ERROR_TABLE[response.code].retriable:
                self.error = error_for(response.code, response.detail(), response.correlation_id)
            return
        self._count_max = min(PARTITIONS_PER_REQUEST, 2 * self._count_max)
        for key in known:
            self.place(requested[key], found.get(key))
            if self._cursors.get(key) is requested[key]:
                del self._cursors[key]

    def _ask_others(self, refused: Mapping[TopicPartition, PartitionPosition]) -> None:
        """Have the next request ask for fewer partitions, and for the refused ones last. A single
        one that is refused is asked for again after a pause.
        """
        self._count_max = max(1, len(refused) // 2)
        if len(refused) == 1:
            self._send_at_ns = self._connection.now_ns() + DECISION_RETRY_NS
        for key, cursor in refused.items():
            if self._cursors.get(key) is cursor:
                self._cursors[key] = self._cursors.pop(key)

    def place(self, cursor: PartitionPosition, committed: OffsetAndMetadata | None) -> None:
        """Move the cursor to its committed offset, unless it was moved meanwhile. None:
        auto_offset_reset decides.
        """
        if not cursor.from_committed:
            return
        if committed is None:
            cursor.from_committed = False
            return
        cursor.seek(int(committed))
        cursor.leader_epoch = cursor.taken_epoch = committed.leader_epoch
        self._on_found(cursor.key, committed)
