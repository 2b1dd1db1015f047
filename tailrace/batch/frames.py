"""Frames to batches for `send_arrow`: columns are cast, rows partitioned and pieces cut to size.

Invariants:
- Rows of a partition keep their order.
- Every piece has exactly the topic's schema and at least one row. Floats that the schema rounds
  stay beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.batch import exact_floats
from tailrace.batch.arrow_codec import cut_out, timestamp_range
from tailrace.batch.encoded_rows import EncodedRows
from tailrace.batch.frame_encoder import default_rows, typed_rows
from tailrace.batch.picked_rows import PickedRows
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import (
    InvalidRecordError,
    SchemaMismatchError,
    UnsupportedBatchError,
)
from tailrace.core.hash_slots import STAYS, slot_of
from tailrace.core.schedule.delays import HORIZON_DAYS, HORIZON_US, parse_levels, rounded_to_level
from tailrace.core.validation import before_1970_error
from tailrace.format.schema import (
    DEFAULT_SCHEMA,
    DELAY_FIELDS,
    conform,
    schema_of,
    to_message,
    to_table,
)
from tailrace.kernel.reference_arrow import null_headers

_DEFAULT_TYPES = dict(zip(DEFAULT_SCHEMA.names, DEFAULT_SCHEMA.types, strict=True))
_last_fit: pa.Schema | None = None
"""Schema of the last frame that fitted the default schema. Most frames of a program are alike, and
comparing schemas costs less than examining columns.
"""
Frame = Any
"""A pyarrow Table or RecordBatch, a pandas or polars DataFrame, or any object with
`__arrow_c_stream__`. Of Tailrace's own modules also PickedRows.
"""


def schema_message_of(frame: Frame) -> bytes:
    """The canonical schema of a frame as a message, for a topic created from it.

    Raises InvalidSchemaError.
    """
    return to_message(schema_of(to_table(frame)))


def with_due_times(frame: Frame, delay_column: str | None, due_us: int, levels: str) -> pa.Table:
    """The frame with the columns of a delay log.

    `delay_column` names the frame's column with due times: timestamps with a zone, or durations
    from `due_us` on. Without it all rows are due at `due_us`. Raises InvalidRecordError,
    SchemaMismatchError.
    """
    table = to_table(frame)
    if delay_column is None:
        dues = np.full(table.num_rows, due_us, np.int64)
    else:
        if delay_column not in table.column_names:
            raise SchemaMismatchError(
                f"delay_column is {delay_column!r}; the frame has the columns "
                f"{', '.join(table.column_names)}"
            )
        column = table.column(delay_column)
        table = table.drop_columns([delay_column])
        if column.null_count:
            raise InvalidRecordError(
                f"delay_column {delay_column!r} has {column.null_count} rows without a due time"
            )
        if pa.types.is_timestamp(column.type) and column.type.tz is not None:
            dues = _numbers(column.cast(pa.timestamp("us", "UTC")))
        elif pa.types.is_duration(column.type):
            after = _numbers(column.cast(pa.duration("us")))
            if len(after) and after.min() < 0:
                raise InvalidRecordError(
                    f"delay_column {delay_column!r} has a negative delay; use delays of 0 or more"
                )
            dues = due_us + after
        else:
            raise InvalidRecordError(
                f"delay_column {delay_column!r} has type {column.type}; use timestamps with a time "
                "zone, or durations"
            )
    if levels and len(dues):
        known = parse_levels(levels)
        after = dues - due_us
        rounded_to_level(int(after.max()), known)
        dues = np.where(
            after > 0,
            due_us
            + np.asarray(known, np.int64)[np.searchsorted(known, after).clip(0, len(known) - 1)],
            due_us,
        )
    if len(dues) and dues.max() - time.time_ns() // 1000 > HORIZON_US:
        raise InvalidRecordError(
            f"a row would be due in more than {HORIZON_DAYS} days, the longest delay; use an "
            "earlier due time"
        )
    count = table.num_rows
    table = table.append_column(DELAY_FIELDS[0], pa.array(np.maximum(dues, 0), pa.int64()))
    table = table.append_column(DELAY_FIELDS[1], pa.nulls(count, pa.int64()))
    return table.append_column(DELAY_FIELDS[2], pa.nulls(count, pa.utf8()))


def keyless_count(frame: Frame, key_column: str) -> tuple[Frame, int]:
    """The frame, which may have been read for it, and its number of rows without a key. Raises
    SchemaMismatchError.
    """
    if isinstance(frame, PickedRows):
        rows = frame.batch()
        found = rows.schema.get_field_index(key_column)
        return frame, rows.num_rows if found < 0 else rows.column(found).null_count
    table = to_table(frame)
    if key_column not in table.column_names:
        return table, table.num_rows
    return table, table.column(key_column).null_count


def fitting(
    frame: Frame, info: TopicInfo, key_column: str | None, delay_column: str | None = None
) -> tuple[Frame, str | None] | None:
    """A frame for a typed topic, with its key column: as it is if it has the topic's columns,
    converted if it has those of an earlier version. None: it has others. `delay_column`: a column
    beside them, which stays.

    Raises SchemaMismatchError.
    """
    if isinstance(frame, PickedRows):
        frame = frame.batch()
    if isinstance(frame, pa.Table | pa.RecordBatch) and frame.schema.equals(info.schema):
        return frame, key_column
    whole = table = to_table(frame)
    if delay_column in table.column_names:
        table = table.drop_columns([delay_column])
    names = table.column_names
    if len(names) == len(info.columns) and info.columns == set(names):
        return whole, key_column
    history = info.history
    version = None if len(info.schema_ids) == 1 else history.version_with(names)
    if version is None:
        return None
    older = conform(table, history.schema(version))
    converted, schema = [], history.target
    try:
        for batch in exact_floats.beside(table, older).to_batches():
            rows, exact = exact_floats.apart(batch, len(older.schema))
            history.check_kept(rows, version)
            rows = history.convert(rows, version)
            if exact is not None:  # `cut` rounds what the topic rounds
                places = [source.column for source in history.sources(version)]
                rows = exact_floats.with_exact(
                    rows,
                    {places.index(place): each for place, each in exact.items() if place in places},
                )
            converted.append(rows)
            schema = rows.schema
    except UnsupportedBatchError as error:
        raise SchemaMismatchError(error.detail) from None
    if key_column is not None:
        key_column = history.renamed(key_column, version) or key_column
    table = pa.Table.from_batches(converted, schema)
    if delay_column in whole.column_names:
        table = table.append_column(delay_column, whole.column(delay_column))
    return table, key_column


def _numbers(column: pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    found: np.ndarray[Any, np.dtype[np.int64]] = column.cast(pa.int64()).to_numpy()
    return found


def _with_default_columns(table: pa.Table, stamp_us: int) -> pa.Table:
    """Complete a frame for a topic of the default schema; the column `value` is required."""
    if "value" not in table.column_names:
        raise SchemaMismatchError(
            "the topic has the default schema: the frame needs a column `value` (and may have "
            "key, timestamp, headers)"
        )
    count = table.num_rows
    if "timestamp" not in table.column_names:
        table = table.append_column(
            "timestamp",
            pa.array(np.full(count, stamp_us, np.int64)).cast(DEFAULT_SCHEMA.field(0).type),
        )
    if "key" not in table.column_names:
        table = table.append_column("key", pa.nulls(count, pa.binary()))
    if "headers" not in table.column_names:
        table = table.append_column("headers", null_headers(count))
    return table


@lru_cache(maxsize=16)
def _nothing(name: str, count: int) -> pa.Array:
    """A column of nulls for the default schema, cached since frames often have the same length."""
    return null_headers(count) if name == "headers" else pa.nulls(count, pa.binary())


def _single_batch(frame: Frame) -> pa.RecordBatch | None:
    """The frame as one pyarrow batch, None if it is not exactly one."""
    if isinstance(frame, pa.Table):
        batches = frame.to_batches()
        frame = batches[0] if len(batches) == 1 else None
    return frame if isinstance(frame, pa.RecordBatch) else None


def _as_it_is(frame: pa.RecordBatch, info: TopicInfo, stamp_us: int) -> pa.RecordBatch | None:
    """The frame as one batch of the topic's schema. None if a cast or a concatenation is needed."""
    if frame.schema.equals(info.schema):
        return cut_out(frame, 0, frame.num_rows)
    if not _fits_default(frame.schema, info):
        return None
    given = set(frame.schema.names)
    columns = []
    for field in DEFAULT_SCHEMA:
        if field.name in given:
            column = frame.column(field.name)
        elif field.name == "timestamp":
            column = pa.array(np.full(frame.num_rows, stamp_us, np.int64)).view(field.type)
        else:
            column = _nothing(field.name, frame.num_rows)
        columns.append(column)
    batch = pa.RecordBatch.from_arrays(columns, schema=DEFAULT_SCHEMA)
    return cut_out(batch, 0, batch.num_rows) if "headers" in given else batch


def _fits_default(schema: pa.Schema, info: TopicInfo) -> bool:
    """True if topic and frame have the default schema; the frame needs only the column `value`."""
    global _last_fit
    if info.typed or info.delay_of:
        return False
    if _last_fit is not None and schema.equals(_last_fit):
        return True
    names, types = schema.names, schema.types
    if "value" not in names or len(set(names)) < len(names):
        return False
    if any(_DEFAULT_TYPES.get(name) != kind for name, kind in zip(names, types, strict=True)):
        return False
    _last_fit = schema
    return True


def _rows_of(
    batch: pa.RecordBatch, info: TopicInfo, stamp_us: int
) -> pa.RecordBatch | EncodedRows | None:
    """The rows of a non-empty batch as buffers if possible, else as `_as_it_is` returns them."""
    plain, schema = None, batch.schema
    if info.delay_of:
        pass
    elif schema.equals(info.schema):
        plain = typed_rows(batch, info.schema_message) if info.typed else None
    elif _fits_default(schema, info):
        plain = default_rows(
            batch, schema.names, stamp_us, lambda: _as_it_is(batch, info, stamp_us)
        )
    return _as_it_is(batch, info, stamp_us) if plain is None else plain


def _by_key(
    column: pa.ChunkedArray, number_of: Callable[[bytes | None], int]
) -> np.ndarray[Any, Any]:
    """A number for each row by its key, computed once per distinct key (text or bytes). Raises
    SchemaMismatchError for nested types.
    """
    encoded = column.combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = pa.concat_arrays(encoded.chunks)
    if not pa.types.is_dictionary(encoded.type):
        try:
            encoded = pc.dictionary_encode(encoded)
        except pa.ArrowNotImplementedError:
            raise SchemaMismatchError(
                f"key_column is of type {column.type}, which cannot be a key; choose a column of "
                "text, bytes, numbers or times"
            ) from None
    chosen = [number_of(_key_bytes(key)) for key in encoded.dictionary.to_pylist()]
    chosen.append(number_of(None))
    indices = pc.fill_null(encoded.indices.cast(pa.int64()), len(chosen) - 1).to_numpy(
        zero_copy_only=False
    )
    numbers: np.ndarray[Any, Any] = np.asarray(chosen, np.int64)[indices]
    return numbers


def _key_bytes(key: Any) -> bytes | None:
    if key is None or isinstance(key, bytes):
        return key
    return str(key).encode()


class FrameSlice(NamedTuple):
    """Rows that become one batch of a partition."""

    partition: int
    rows: pa.RecordBatch | EncodedRows
    byte_count: int
    stamps_us: tuple[int, int]
    """The first and the largest timestamp."""
    slots: np.ndarray[Any, Any] | None = None
    """The hash slot of each row, STAYS without a key. Only for topics with hash slots, and rows
    that were routed by it.
    """
    exact: exact_floats.Exact | None = None
    """The given values of float columns that the schema rounds."""


def cut(
    frame: Frame,
    info: TopicInfo,
    key_column: str | None,
    partition: int | None,
    choose: Callable[[bytes | None, int], int],
    target_bytes: int,
    stamp_us: int,
    given_slots: np.ndarray[Any, Any] | None = None,
) -> Iterator[FrameSlice]:
    """Cut a frame into few pieces of about equal size, at most `target_bytes` unless a row is
    larger. `given_slots`: the hash slot of each row, where the caller has routed the rows by it to
    `partition`.

    Raises SchemaMismatchError, InvalidRecordError.
    """
    if isinstance(frame, PickedRows):
        picked = None if info.typed or info.delay_of else frame.encoded(stamp_us)
        if picked is not None and picked.byte_count <= target_bytes:
            stamps = stamp_us, stamp_us
            yield FrameSlice(partition or 0, picked, picked.byte_count, stamps, given_slots)
            return
        frame = frame.batch()
    single = _single_batch(frame) if key_column is None else None
    rows = None if single is None or not single.num_rows else _rows_of(single, info, stamp_us)
    if single is not None and rows is not None:
        is_stamped_here = not info.typed and "timestamp" not in single.schema.names
        if not info.typed and not is_stamped_here:
            _check_timestamps(single.column("timestamp"))
        start = 0
        for piece, size, source in _cut_rows(rows, single, info, stamp_us, target_bytes):
            first, start = start, start + piece.num_rows
            yield FrameSlice(
                partition or 0,
                piece,
                size,
                (stamp_us, stamp_us) if is_stamped_here else timestamp_range(source, stamp_us),
                None if given_slots is None else given_slots[first:start],
            )
        return
    table = to_table(frame)
    if key_column is not None and key_column not in table.column_names:
        raise SchemaMismatchError(
            f"key_column is {key_column!r}; the frame has the columns "
            f"{', '.join(table.column_names)}"
        )
    if not info.typed:
        table = _with_default_columns(table, stamp_us)
        _check_timestamps(table.column("timestamp"))
    given, table = table, conform(table, info.schema)
    if info.typed:
        table = exact_floats.beside(given, table)
    if not table.num_rows:
        return
    numbers, slots = None, given_slots
    if partition is None and key_column is not None:
        column = table.column(key_column)
        numbers = _by_key(column, lambda key: choose(key, len(info.partitions)))
        if info.slot_map_version:
            slots = _by_key(column, lambda key: STAYS if key is None else slot_of(key))
    for number in [partition or 0] if numbers is None else np.unique(numbers):
        chosen = None if numbers is None else numbers == number
        part = table if chosen is None else table.filter(pa.array(chosen))
        its_slots = slots if slots is None or chosen is None else slots[chosen]
        start = 0
        for batch in part.combine_chunks().to_batches():
            for piece, size in _cut_to_size(cut_out(batch, 0, batch.num_rows), target_bytes):
                piece_slots = (
                    None if its_slots is None else its_slots[start : start + piece.num_rows]
                )
                start += piece.num_rows
                rows, exact = exact_floats.apart(piece, len(info.schema))
                yield FrameSlice(
                    int(number), rows, size, timestamp_range(rows, stamp_us), piece_slots, exact
                )


def _check_timestamps(column: pa.Array | pa.ChunkedArray) -> None:
    """Raise InvalidRecordError if a time is before 1970."""
    if pa.types.is_timestamp(column.type):  # else the cast to the topic's schema refuses it
        earliest = pc.min(column)
        if earliest.is_valid and earliest.value < 0:
            raise before_1970_error(earliest)


def _cut_to_size(batch: pa.RecordBatch, target_bytes: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield pieces of a batch, each with its length as a message."""
    size = pa.ipc.get_record_batch_size(batch)
    if size <= target_bytes or batch.num_rows < 2:
        yield batch, size
        return
    rows_per_piece = -(-batch.num_rows // -(-size // target_bytes))
    for start in range(0, batch.num_rows, rows_per_piece):
        yield from _cut_to_size(
            cut_out(batch, start, min(rows_per_piece, batch.num_rows - start)), target_bytes
        )


def _cut_rows(
    rows: pa.RecordBatch | EncodedRows,
    source: pa.RecordBatch,
    info: TopicInfo,
    stamp_us: int,
    target_bytes: int,
) -> Iterator[tuple[pa.RecordBatch | EncodedRows, int, pa.RecordBatch]]:
    """Yield pieces of the rows: each with its length as a message,
    and the part of `source` in it.
    """
    if not isinstance(rows, EncodedRows):
        yield from ((piece, size, piece) for piece, size in _cut_to_size(rows, target_bytes))
    elif rows.byte_count <= target_bytes or rows.num_rows < 2:
        yield rows, rows.byte_count, source
    else:
        rows_per_piece = -(-rows.num_rows // -(-rows.byte_count // target_bytes))
        for start in range(0, rows.num_rows, rows_per_piece):
            part = source.slice(start, rows_per_piece)
            made = _rows_of(part, info, stamp_us)
            assert made is not None  # a part fits because the whole does
            yield from _cut_rows(made, part, info, stamp_us, target_bytes)
