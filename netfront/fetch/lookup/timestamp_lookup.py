"""Timestamp lookup for LIST_OFFSETS: the first record at or after a time, and the time at an
offset.

A segment's index leads to the first batch whose largest time, with all before it, reaches the
requested one. Batch headers are read from there. If a batch's largest time reaches it, its
`timestamp` column is read and decompressed, and no other column. Times within a batch need not
ascend.

A record's time, as consumers see it, is the value of that column. It is the batch's largest time
where the column is null, and for all records:
- On topics with LogAppendTime.
- On topics without a column `timestamp` of type timestamp[us, UTC].
- In occurrences of a recurring record in a typed topic (BatchHeader.has_one_time).

The rows of a sparse batch have their offsets in its last column, which is read in the same way.

Owner: one front; reads only, keeps nothing.

Invariants:
- A result lies at or above the log start offset and below the end of the isolation level.
- A search of committed records finds no record of an aborted transaction.
- Between two yields at most PIECE_BYTES of a batch and one decompressed piece are read, of one
  column only. Stored data decides the number of yields, never the time between two.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple

from netfront.fetch.log.isolation import Isolation, end_of
from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.log.read_result import ColdRead, Place
from netfront.fetch.lookup.decompression import UnpackError
from netfront.fetch.lookup.stored_columns import (
    UNITS_OF_A_PIECE,
    VALUE_BYTES,
    StoredBatch,
    StoredBuffer,
    UnreadableColumnError,
    first_null,
    number_at,
)
from netfront.session.time_slicing import UNITS_OF_A_FILE
from shm.messages.lane_messages import Assignment
from shm.tables.partition_table import PartitionState
from tailrace.format.record_batch.arrow_metadata import (
    ArrowMetadataError,
    nodes_of,
    read_record_batch,
)
from tailrace.format.record_batch.batch_header import (
    PREFIX_BYTES,
    BatchFormatError,
    BatchHeader,
    checksum_seed,
    compute_header_crc,
    header_position,
    metadata_size_of,
    read_header,
)
from tailrace.format.record_batch.flatbuffer import FlatbufferError

_UNITS_OF_A_HEADER = 4
REPLACED_MAX = 8
"""Replacements of segments by cleaned ones that a search survives."""
_HEAD_BYTES = 4 << 10
"""Bytes read first of a batch. Most metadata is smaller."""
_COLUMN = "timestamp"
_KIND = (10, 2, "UTC")
"""`NodeSpec.kind` of a timestamp in microseconds, UTC."""


class FoundTime(NamedTuple):
    """Result of a search."""

    offset: int
    timestamp_us: int
    """Time of the record as consumers see it, -1 if not exact."""
    is_exact: bool
    """False if the front could not read the batch's times: the record is at this offset or later.
    """


class _Column(NamedTuple):
    """Position of the time column in a batch's metadata."""

    node: int
    buffer: int


class TimestampLookup:
    """Timestamp searches in one front's logs."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader

    def find(
        self,
        route: Assignment,
        state: PartitionState,
        timestamp_us: int,
        isolation: Isolation,
    ) -> Generator[int, None, FoundTime | None]:
        """Find the first record at or after `timestamp_us`. Yield the cost since the last yield.

        Raises LogReadError, OSError.
        """

        def search(base: int, end: int) -> Generator[int, None, FoundTime | None]:
            place = self._reader.place_of_time(route, base, timestamp_us, state.log_start_offset)
            if place is None:
                return None
            return (yield from self._search(route, state, place, end, timestamp_us, isolation))

        return (yield from self._first(route, state, state.log_start_offset, isolation, search))

    def time_of(
        self,
        route: Assignment,
        state: PartitionState,
        offset: int,
        isolation: Isolation,
    ) -> Generator[int, None, FoundTime | None]:
        """Find the first record at or after `offset`, with its time. Return None at or above the
        end of the isolation level.

        If the time cannot be read, it is the largest of the batch, or -1 if the header is damaged.
        Yields the cost since the last yield. Raises LogReadError, OSError.
        """
        requested = max(offset, state.log_start_offset)

        def search(base: int, end: int) -> Generator[int, None, FoundTime | None]:
            place = self._reader.locate(route, state, max(requested, base), end)
            return (yield from self._record_at(route, state, place, requested, end, isolation))

        return (yield from self._first(route, state, requested, isolation, search))

    def _first(
        self,
        route: Assignment,
        state: PartitionState,
        requested: int,
        isolation: Isolation,
        search: Callable[[int, int], Generator[int, None, FoundTime | None]],
    ) -> Generator[int, None, FoundTime | None]:
        """Return what `search` (base, end) finds first in the segments with offsets from
        `requested` on.
        """
        attempts_left = REPLACED_MAX
        following = requested
        while True:
            for base, end in self._reader.files.segments_of(route, state, end_of(state, isolation)):
                if end <= max(base, following):
                    continue
                yield UNITS_OF_A_FILE
                try:
                    found = yield from search(base, end)
                except FileNotFoundError:
                    if self._reader.state(route).log_start_offset >= end:
                        # Retention has deleted the segment since. Its records cannot be found.
                        continue
                    if not attempts_left:
                        raise
                    break  # a cleaned segment has taken its place
                if found is not None:
                    return found
                following = max(following, end)
            else:
                return None
            attempts_left -= 1
            self._reader.files.forget_segments(route)

    def _is_left_out(
        self,
        route: Assignment,
        state: PartitionState,
        isolation: Isolation,
        base: int,
        header: BatchHeader,
    ) -> Generator[int, None, bool]:
        """Return True for a batch without records for this level: of an aborted transaction, or a
        marker. Raises LogReadError.
        """
        if not header.record_count:
            return True
        if not header.is_transactional or isolation is not Isolation.COMMITTED:
            return False
        while True:
            try:
                return self._reader.files.is_aborted(
                    route,
                    state,
                    base,
                    header.producer_id,
                    header.producer_epoch,
                    header.base_offset,
                )
            except ColdRead:
                yield UNITS_OF_A_PIECE

    def _record_at(
        self,
        route: Assignment,
        state: PartitionState,
        place: Place,
        requested: int,
        end: int,
        isolation: Isolation,
    ) -> Generator[int, None, FoundTime | None]:
        """Do `time_of` within a segment, from `place` up to offset `end`."""
        seed = checksum_seed(route.topic_id, route.partition)
        base, position, offset = place.segment_base, place.file_position, place.offset
        while offset < end:
            yield _UNITS_OF_A_HEADER
            first, largest_us = max(offset, requested), -1
            try:
                head = self._read_head(route, base, position)
                header = _proven_header(head, seed)
                largest_us = header.max_timestamp_us
                if header.next_offset > requested and not (
                    yield from self._is_left_out(route, state, isolation, base, header)
                ):
                    batch = StoredBatch(self._reader, route, base, position, head, header)
                    row = yield from batch.row_from(first)
                    if row < header.record_count:
                        time_us = yield from self._time_of_row(batch, row)
                        return FoundTime((yield from batch.offset_of(row)), time_us, True)
            except (
                BatchFormatError,
                ArrowMetadataError,
                FlatbufferError,
                UnpackError,
                UnreadableColumnError,
            ):
                return FoundTime(first, largest_us, False)
            position += header.batch_length
            offset = header.next_offset
        return None

    def _search(
        self,
        route: Assignment,
        state: PartitionState,
        place: Place,
        end: int,
        timestamp_us: int,
        isolation: Isolation,
    ) -> Generator[int, None, FoundTime | None]:
        """Search the batches of a segment, from `place` up to offset `end`."""
        seed = checksum_seed(route.topic_id, route.partition)
        base, position, offset = place.segment_base, place.file_position, place.offset
        while offset < end:
            yield _UNITS_OF_A_HEADER
            start = max(offset, state.log_start_offset)
            try:
                head = self._read_head(route, base, position)
                header = _proven_header(head, seed)
                if (
                    header.next_offset > start
                    and header.max_timestamp_us >= timestamp_us
                    and not (yield from self._is_left_out(route, state, isolation, base, header))
                ):
                    batch = StoredBatch(self._reader, route, base, position, head, header)
                    first = yield from batch.row_from(start)
                    row = yield from self._find_row(batch, first, timestamp_us)
                    if row is not None:
                        return FoundTime((yield from batch.offset_of(row[0])), row[1], True)
            except (
                BatchFormatError,
                ArrowMetadataError,
                FlatbufferError,
                UnpackError,
                UnreadableColumnError,
            ):
                return FoundTime(start, -1, False)  # the consumer's read reports the damage
            position += header.batch_length
            offset = header.next_offset
        return None

    def _read_head(self, route: Assignment, base: int, position: int) -> bytes:
        """Read a batch at least up to its body. Raises BatchFormatError."""
        head = self._reader.files.read_at(route, base, _HEAD_BYTES, position)
        if len(head) < PREFIX_BYTES:
            raise BatchFormatError("the segment ends where a batch should begin")
        needed = PREFIX_BYTES + metadata_size_of(head)
        return (
            head
            if len(head) >= needed
            else self._reader.files.read_at(route, base, needed, position)
        )

    # ---- in a batch ------------------------------------------------------------------------------

    def _find_row(
        self, batch: StoredBatch, first: int, timestamp_us: int
    ) -> Generator[int, None, tuple[int, int] | None]:
        """Find the first row from `first` on whose time reaches `timestamp_us`, in a batch whose
        largest time does. Return (row, its time).
        """
        header = batch.header
        if first >= header.record_count:
            return None
        stored = yield from self._times_of(batch)
        if stored is None:
            return first, header.max_timestamp_us
        validity, times, rows = stored
        end = rows
        if validity is not None:
            end = yield from first_null(validity.pieces((rows + 7) // 8, first // 8), first, rows)
        for at, piece in times.pieces(VALUE_BYTES * end, VALUE_BYTES * first):
            yield UNITS_OF_A_PIECE
            with memoryview(piece)[max(0, VALUE_BYTES * first - at) :].cast("q") as values:
                if len(values) and max(values) >= timestamp_us:
                    index, found = next(
                        (n, value) for n, value in enumerate(values) if value >= timestamp_us
                    )
                    return max(first, at // VALUE_BYTES) + index, found
        return (end, header.max_timestamp_us) if end < rows else None

    def _time_of_row(self, batch: StoredBatch, row: int) -> Generator[int, None, int]:
        """Return the time of one row of a batch."""
        header = batch.header
        stored = yield from self._times_of(batch)
        if stored is None:
            return header.max_timestamp_us
        validity, times, rows = stored
        if row >= rows:
            raise UnreadableColumnError
        if validity is not None:
            null = yield from first_null(validity.pieces(row // 8 + 1, row // 8), row, row + 1)
            if null == row:
                return header.max_timestamp_us
        return (yield from number_at(times, row))

    def _times_of(
        self, batch: StoredBatch
    ) -> Generator[int, None, tuple[StoredBuffer | None, StoredBuffer, int] | None]:
        """Return (validity bitmap or None, times, row count) of a batch, or None if all rows have
        its largest time.
        """
        header, route = batch.header, batch.route
        if header.has_one_time(is_typed=route.typed):
            return None
        schema = (
            route.schema
            if header.schema_id == route.schema_id
            else route.older_schemas.get(header.schema_id)
        )
        if schema is None:
            raise UnreadableColumnError
        column = yield from _time_column(schema)
        if column is None:
            return None
        metadata = read_record_batch(batch.head, PREFIX_BYTES)
        validity, times = (batch.buffer(metadata, column.buffer + n) for n in (0, 1))
        try:
            rows, null_count = metadata.nodes[2 * column.node : 2 * column.node + 2]
        except ValueError:
            raise UnreadableColumnError from None
        if rows != header.record_count:
            raise UnreadableColumnError
        return validity if null_count else None, times, rows


def _proven_header(head: bytes, seed: int) -> BatchHeader:
    """Return the header of a batch whose bytes up to the body are given. Raises BatchFormatError if
    its checksum is wrong.
    """
    header = read_header(head)
    with memoryview(head) as view:
        if (
            compute_header_crc(view, header_position(view), header.extension_length, seed)
            != header.header_crc32c
        ):
            raise BatchFormatError("the header's checksum does not match")
    return header


def _time_column(schema: bytes) -> Generator[int, None, _Column | None]:
    """Find the time column in a topic's schema, or None.

    Yields for each column: there may be thousands.
    """
    buffer = 0
    for node, spec in enumerate(nodes_of(schema)):
        yield 2
        if spec.top_level and spec.name == _COLUMN:
            return _Column(node, buffer) if spec.kind == _KIND else None
        buffer += len(spec.buffers)
    return None
