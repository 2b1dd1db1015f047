"""Frames into batches for `send_arrow`: columns conformed, rows given their partitions, pieces cut to size.

Invariants: rows of a partition keep their order; every piece has exactly the topic's schema and at least one row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.delays import HORIZON_DAYS, HORIZON_US, parse_levels, rounded_to_level
from tailrace.errors import InvalidRecordError, SchemaMismatchError
from tailrace.formats.arrow_batch import cut_out, null_headers, timestamp_range
from tailrace.hash_slots import slot_of
from tailrace.plain_frames import default_rows, typed_rows
from tailrace.plain_rows import PlainRows
from tailrace.producer_batch import STAYS
from tailrace.schema import DEFAULT_SCHEMA, DELAY_FIELDS, conform, schema_of, to_message, to_table
from tailrace.topics import TopicInfo

_DEFAULT_TYPES = dict(zip(DEFAULT_SCHEMA.names, DEFAULT_SCHEMA.types, strict=True))
_last_fit: pa.Schema | None = None
"""Of the last frame for a topic of the default schema: a program's frames are mostly alike, and to compare schemas costs less than to look at their columns."""
Frame = Any
"""A pyarrow Table or RecordBatch, a pandas or polars DataFrame, or anything else with `__arrow_c_stream__`."""


def schema_message_of(frame: Frame) -> bytes:
    """The canonical schema of a frame as a message: what a topic made for it has. Raises InvalidSchemaError."""
    return to_message(schema_of(to_table(frame)))


def with_due_times(frame: Frame, delay_column: str | None, due_us: int, levels: str) -> pa.Table:
    """The frame with the columns of a delay log. `delay_column` names the frame's column that says when each row is due: timestamps with a zone,
    or durations from `due_us` on. Without it all rows are due at `due_us`. Raises InvalidRecordError, SchemaMismatchError.
    """
    table = to_table(frame)
    if delay_column is None:
        dues = np.full(table.num_rows, due_us, np.int64)
    else:
        if delay_column not in table.column_names:
            raise SchemaMismatchError(f"delay_column is {delay_column!r}; the frame has {', '.join(table.column_names)}")
        column = table.column(delay_column)
        table = table.drop_columns([delay_column])
        if column.null_count:
            raise InvalidRecordError(f"delay_column {delay_column!r} has {column.null_count} rows without a due time")
        if pa.types.is_timestamp(column.type) and column.type.tz is not None:
            dues = _numbers(column.cast(pa.timestamp("us", "UTC")))
        elif pa.types.is_duration(column.type):
            after = _numbers(column.cast(pa.duration("us")))
            if len(after) and after.min() < 0:
                raise InvalidRecordError("a delay cannot be negative")
            dues = due_us + after
        else:
            raise InvalidRecordError(f"delay_column {delay_column!r} is {column.type}; it takes timestamps with a time zone, or durations")
    if levels and len(dues):
        known = parse_levels(levels)
        after = dues - due_us
        rounded_to_level(int(after.max()), known)
        dues = np.where(after > 0, due_us + np.asarray(known, np.int64)[np.searchsorted(known, after).clip(0, len(known) - 1)], due_us)
    if len(dues) and dues.max() - time.time_ns() // 1000 > HORIZON_US:
        raise InvalidRecordError(f"a row would be due in more than {HORIZON_DAYS} days, the longest delay that there is")
    count = table.num_rows
    table = table.append_column(DELAY_FIELDS[0], pa.array(np.maximum(dues, 0), pa.int64()))
    table = table.append_column(DELAY_FIELDS[1], pa.nulls(count, pa.int64()))
    return table.append_column(DELAY_FIELDS[2], pa.nulls(count, pa.utf8()))


def _numbers(column: pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    found: np.ndarray[Any, np.dtype[np.int64]] = column.cast(pa.int64()).to_numpy()
    return found


def _with_default_columns(table: pa.Table, stamp_us: int) -> pa.Table:
    """A frame for a topic of the default schema: `value` is needed, the rest is filled in."""
    if "value" not in table.column_names:
        raise SchemaMismatchError(
            "the topic has the default schema: the frame needs a column `value` (and may have key, timestamp, headers)"
        )
    count = table.num_rows
    if "timestamp" not in table.column_names:
        table = table.append_column("timestamp", pa.array(np.full(count, stamp_us, np.int64)).cast(DEFAULT_SCHEMA.field(0).type))
    if "key" not in table.column_names:
        table = table.append_column("key", pa.nulls(count, pa.binary()))
    if "headers" not in table.column_names:
        table = table.append_column("headers", null_headers(count))
    return table


@lru_cache(maxsize=16)
def _nothing(name: str, count: int) -> pa.Array:
    """A column of the default schema of which a frame says nothing; frames of one length come one after the other."""
    return null_headers(count) if name == "headers" else pa.nulls(count, pa.binary())


def _single_batch(frame: Frame) -> pa.RecordBatch | None:
    """The frame, if it is one batch of pyarrow."""
    if isinstance(frame, pa.Table):
        batches = frame.to_batches()
        frame = batches[0] if len(batches) == 1 else None
    return frame if isinstance(frame, pa.RecordBatch) else None


def _as_it_is(frame: pa.RecordBatch, info: TopicInfo, stamp_us: int) -> pa.RecordBatch | None:
    """The frame as one batch of the topic's schema, where nothing has to be cast or put together. None: it takes the long way."""
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
    """Whether the topic has the default schema and the frame some of its columns, `value` among them."""
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


def _rows_of(batch: pa.RecordBatch, info: TopicInfo, stamp_us: int) -> pa.RecordBatch | PlainRows | None:
    """A batch's rows, at least one, as buffers where they are what the topic's batches have, else as `_as_it_is` says."""
    plain, schema = None, batch.schema
    if info.delay_of:
        pass
    elif schema.equals(info.schema):
        plain = typed_rows(batch, info.schema_message) if info.typed else None
    elif _fits_default(schema, info):
        plain = default_rows(batch, schema.names, stamp_us, lambda: _as_it_is(batch, info, stamp_us))
    return _as_it_is(batch, info, stamp_us) if plain is None else plain


def _by_key(column: pa.ChunkedArray, number_of: Callable[[bytes | None], int]) -> np.ndarray[Any, Any]:
    """A number for each row by its key, asked once per distinct key, taken as text or bytes."""
    encoded = column.combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = pa.concat_arrays(encoded.chunks)
    if not pa.types.is_dictionary(encoded.type):
        encoded = pc.dictionary_encode(encoded)
    chosen = [number_of(_key_bytes(key)) for key in encoded.dictionary.to_pylist()]
    chosen.append(number_of(None))
    indices = pc.fill_null(encoded.indices.cast(pa.int64()), len(chosen) - 1).to_numpy(zero_copy_only=False)
    numbers: np.ndarray[Any, Any] = np.asarray(chosen, np.int64)[indices]
    return numbers


def _key_bytes(key: Any) -> bytes | None:
    if key is None or isinstance(key, bytes):
        return key
    return str(key).encode()


class Piece(NamedTuple):
    """Rows that become one batch of a partition."""

    partition: int
    rows: pa.RecordBatch | PlainRows
    byte_count: int
    stamps_us: tuple[int, int]
    """The first and the largest timestamp."""
    slots: np.ndarray[Any, Any] | None = None
    """Of a topic with hash slots, by `key_column`: each row's, STAYS without a key."""


def cut(
    frame: Frame,
    info: TopicInfo,
    key_column: str | None,
    partition: int | None,
    choose: Callable[[bytes | None, int], int],
    target_bytes: int,
    stamp_us: int,
) -> Iterator[Piece]:
    """Pieces of at most `target_bytes` where rows are not larger, as few and as equal as can be. Raises SchemaMismatchError."""
    single = _single_batch(frame) if key_column is None else None
    rows = None if single is None or not single.num_rows else _rows_of(single, info, stamp_us)
    if single is not None and rows is not None:
        is_stamped_here = not info.typed and "timestamp" not in single.schema.names
        for piece, size, source in _cut_rows(rows, single, info, stamp_us, target_bytes):
            yield Piece(partition or 0, piece, size, (stamp_us, stamp_us) if is_stamped_here else timestamp_range(source, stamp_us))
        return
    table = to_table(frame)
    if key_column is not None and key_column not in table.column_names:
        raise SchemaMismatchError(f"key_column is {key_column!r}; the frame has {', '.join(table.column_names)}")
    if not info.typed:
        table = _with_default_columns(table, stamp_us)
    table = conform(table, info.schema)
    if not table.num_rows:
        return
    numbers = slots = None
    if partition is None and key_column is not None:
        column = table.column(key_column)
        numbers = _by_key(column, lambda key: choose(key, len(info.partitions)))
        if info.slot_map_version:
            slots = _by_key(column, lambda key: STAYS if key is None else slot_of(key))
    for number in [partition or 0] if numbers is None else np.unique(numbers):
        chosen = None if numbers is None else numbers == number
        part = table if chosen is None else table.filter(pa.array(chosen))
        its_slots = None if slots is None else slots[chosen]
        start = 0
        for batch in part.combine_chunks().to_batches():
            for piece, size in _cut_to_size(cut_out(batch, 0, batch.num_rows), target_bytes):
                piece_slots = None if its_slots is None else its_slots[start : start + piece.num_rows]
                start += piece.num_rows
                yield Piece(int(number), piece, size, timestamp_range(piece, stamp_us), piece_slots)


def _cut_to_size(batch: pa.RecordBatch, target_bytes: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Pieces of a batch, and the bytes of each as a message."""
    size = pa.ipc.get_record_batch_size(batch)
    if size <= target_bytes or batch.num_rows < 2:
        yield batch, size
        return
    rows_per_piece = -(-batch.num_rows // -(-size // target_bytes))
    for start in range(0, batch.num_rows, rows_per_piece):
        yield from _cut_to_size(cut_out(batch, start, min(rows_per_piece, batch.num_rows - start)), target_bytes)


def _cut_rows(
    rows: pa.RecordBatch | PlainRows, source: pa.RecordBatch, info: TopicInfo, stamp_us: int, target_bytes: int
) -> Iterator[tuple[pa.RecordBatch | PlainRows, int, pa.RecordBatch]]:
    """The rows of a batch in pieces: each, its bytes as a message, and what it was made of."""
    if not isinstance(rows, PlainRows):
        yield from ((piece, size, piece) for piece, size in _cut_to_size(rows, target_bytes))
    elif rows.byte_count <= target_bytes or rows.num_rows < 2:
        yield rows, rows.byte_count, source
    else:
        rows_per_piece = -(-rows.num_rows // -(-rows.byte_count // target_bytes))
        for start in range(0, rows.num_rows, rows_per_piece):
            part = source.slice(start, rows_per_piece)
            made = _rows_of(part, info, stamp_us)
            assert made is not None  # it fits as the whole does
            yield from _cut_rows(made, part, info, stamp_us, target_bytes)
