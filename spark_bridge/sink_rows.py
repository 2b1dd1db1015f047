"""A task's rows as a topic stores them, and the partition of each. Columns and sentences are those of Spark's Kafka sink (KafkaWriter, KafkaRowWriter).

Topics without a schema take key and value (string or binary; value is required), headers (array<struct<key: string, value: binary>>), topic (string) and
partition (int); other columns are not written. A typed topic takes its own columns, by name. A key's partition is the Producer's: murmur2 as Kafka's default
partitioner, or the owner of its hash slot; a row without a key goes where the task's other such rows go, until a batch is full (KIP-480's sticky choice).

Owner: pure. Invariants: rows of one partition keep their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import InvalidRecordError, SchemaMismatchError
from tailrace.formats.arrow_batch import null_headers
from tailrace.hash_slots import SLOT_COUNT
from tailrace.schema import DEFAULT_SCHEMA, HEADER_TYPE, conform
from tailrace.topics import TopicInfo

NO_KEY = -1
"""In the place of a partition: the row has no key, and may go anywhere."""
Numbers = np.ndarray[Any, np.dtype[np.int64]]
_SLOT_TABLE: list[np.ndarray[Any, np.dtype[np.uint16]]] = []


# ---- which columns there are -----------------------------------------------------------------------------------------------------------------


def check_columns(schema: pa.Schema, topic: TopicInfo | None, key_column: str | None) -> None:
    """Whether rows of these columns can be written. `topic`: of the option; None: each row says it. Raises SchemaMismatchError, which names the column."""
    if topic is not None and topic.typed:
        _check_typed(schema, topic, key_column)
        return
    if key_column is not None:
        raise SchemaMismatchError("the option keyColumn is for typed topics; the keys of others are in the column `key`")
    if topic is None and "topic" not in schema.names:
        raise SchemaMismatchError("topic option required when no 'topic' attribute is present. Use the topic option for setting a topic.")
    if "value" not in schema.names:
        where = "" if topic is None else f": the topic {topic.name!r} has no schema of its own, and takes key and value"
        raise SchemaMismatchError(f"Required attribute 'value' not found{where}; the columns are {', '.join(schema.names)}")
    for name, allowed, said in (
        ("topic", (pa.types.is_string, pa.types.is_large_string), "string"),
        ("key", _BYTES, "string or binary"),
        ("value", _BYTES, "string or binary"),
        ("partition", (pa.types.is_int32,), "int"),
        ("headers", (_is_headers,), "array<struct<key: string, value: binary>>"),
    ):
        if name == "topic" and topic is not None:
            continue  # the option overrides the column
        if name in schema.names and not any(fits(schema.field(name).type) for fits in allowed):
            raise SchemaMismatchError(f"{name} attribute unsupported type {schema.field(name).type}; it must be {said}")


def _is_headers(kind: pa.DataType) -> bool:
    if not pa.types.is_list(kind) or not pa.types.is_struct(kind.value_type) or kind.value_type.num_fields != 2:
        return False
    key, value = kind.value_type.field(0), kind.value_type.field(1)
    return bool(key.name == "key" and value.name == "value" and pa.types.is_string(key.type) and pa.types.is_binary(value.type))


_BYTES = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)


def _check_typed(schema: pa.Schema, topic: TopicInfo, key_column: str | None) -> None:
    empty = pa.Table.from_batches([], schema)
    try:
        conform(empty, topic.schema)
    except SchemaMismatchError as error:
        has = ", ".join(f"{field.name} {field.type}" for field in topic.schema)
        raise SchemaMismatchError(f"the rows do not fit the typed topic {topic.name!r}: {error.detail}. It has {has}") from None
    if key_column is not None and key_column not in schema.names:
        raise SchemaMismatchError(f"the option keyColumn is {key_column!r}; the columns are {', '.join(schema.names)}")


# ---- rows ------------------------------------------------------------------------------------------------------------------------------------


def default_rows(batch: pa.RecordBatch) -> pa.Table:
    """Rows of Kafka's columns as rows of the default schema, written now. Raises InvalidRecordError for a header without a key."""
    count = batch.num_rows
    stamps = pa.array(np.full(count, time.time_ns() // 1000, np.int64)).view(DEFAULT_SCHEMA.field("timestamp").type)
    names = batch.schema.names
    key = batch.column("key").cast(pa.binary()) if "key" in names else pa.nulls(count, pa.binary())
    headers = _headers(batch.column("headers")) if "headers" in names else null_headers(count)
    return pa.Table.from_arrays([stamps, key, batch.column("value").cast(pa.binary()), headers], schema=DEFAULT_SCHEMA)


def _headers(given: pa.ListArray) -> pa.Array:
    of_all_rows = given.flatten()
    if of_all_rows.null_count or of_all_rows.field("key").null_count:
        raise InvalidRecordError(
            "a row has a header without a key in the column headers; a header is a key and a value, of which the value may be null"
        )
    return given.cast(HEADER_TYPE)


def typed_rows(batch: pa.RecordBatch, info: TopicInfo) -> pa.Table:
    """Rows as those of a typed topic. Raises SchemaMismatchError for a value that does not fit."""
    return conform(pa.Table.from_batches([batch]), info.schema)


def by_topic(batch: pa.RecordBatch) -> list[tuple[str, pa.RecordBatch]]:
    """The rows of each topic that the column `topic` names. Raises InvalidRecordError for a row that names none."""
    column = batch.column("topic")
    if column.null_count:
        raise InvalidRecordError("null topic present in the data. Use the topic option for setting a topic.")
    names = pc.unique(column).to_pylist()
    if len(names) == 1:
        return [(names[0], batch)]
    return [(name, batch.filter(pc.equal(column, pa.scalar(name, column.type)))) for name in names]


def partitions_of(rows: pa.Table, batch: pa.RecordBatch, info: TopicInfo, key_column: str | None) -> Numbers:
    """Each row's partition, or NO_KEY. `batch`: the rows as Spark gave them. Raises InvalidRecordError for a partition that the topic does not have."""
    count = len(info.partitions)
    keys = rows.column("key") if not info.typed else None if key_column is None else batch.column(key_column)
    if keys is None or keys.null_count == len(keys):
        numbers = np.full(rows.num_rows, NO_KEY, np.int64)
    else:
        # A Producer takes a key that is neither bytes nor text by its text, too (see `tailrace.arrow_frames`).
        text = keys if any(fits(keys.type) for fits in _BYTES) else pa.array([None if k is None else str(k) for k in keys.to_pylist()])
        plain = text.combine_chunks() if isinstance(text, pa.ChunkedArray) else text
        plain = pa.concat_arrays(plain.chunks) if isinstance(plain, pa.ChunkedArray) else plain
        numbers = key_numbers(plain.cast(pa.binary()), info)
    if not info.typed and "partition" in batch.schema.names:
        given = batch.column("partition")
        wanted = np.asarray(given.fill_null(NO_KEY).cast(pa.int64()).to_numpy(zero_copy_only=False))
        is_given = np.asarray(given.is_valid().to_numpy(zero_copy_only=False))
        wrong = wanted[is_given & ((wanted < 0) | (wanted >= count))]
        if len(wrong):
            raise InvalidRecordError(
                f"a row names partition {wrong[0]} of topic {info.name!r}, which has 0 to {count - 1}; without the column `partition` the key says it"
            )
        numbers = np.where(is_given, wanted, numbers)
    return numbers


def key_numbers(keys: pa.BinaryArray, info: TopicInfo) -> Numbers:
    """Each key's partition, as the Producer chooses it; NO_KEY for a null."""
    if info.owners is not None:
        owners = np.asarray(info.owners, np.int64)
        numbers = owners[_hashed(keys, slots) % SLOT_COUNT]
    else:
        numbers = (_hashed(keys, murmur2s) & 0x7FFFFFFF) % len(info.partitions)
    if keys.null_count:
        numbers = np.where(np.asarray(keys.is_valid().to_numpy(zero_copy_only=False)), numbers, NO_KEY)
    return numbers


# ---- hashes of many keys at a time -----------------------------------------------------------------------------------------------------------

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def _hashed(keys: pa.BinaryArray, function: Callable[[Bytes], np.ndarray[Any, Any]]) -> Numbers:
    """A hash of each key; `function` takes keys of one length, a row each."""
    _, offsets_buffer, data_buffer = keys.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32, len(keys) + 1, keys.offset * 4).astype(np.int64)
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    starts, lengths = offsets[:-1], np.diff(offsets)
    if len(keys) and (lengths == lengths[0]).all():  # keys of one length, one behind the other
        return function(data[offsets[0] : offsets[-1]].reshape(len(keys), lengths[0])).astype(np.int64)
    numbers = np.empty(len(keys), np.int64)
    for length in np.unique(lengths):
        chosen = np.flatnonzero(lengths == length)
        matrix = data[starts[chosen, None] + np.arange(length)] if length else np.empty((len(chosen), 0), np.uint8)
        numbers[chosen] = function(matrix)
    return numbers


def murmur2s(keys: Bytes) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """`tailrace.partitioners.murmur2` of keys of one length, a row each (A. Appleby's MurmurHash2, with Kafka's seed)."""
    count, length = keys.shape
    m = np.uint32(0x5BD1E995)
    hashed = np.full(count, (0x9747B28C ^ length) & 0xFFFFFFFF, np.uint32)
    whole = length // 4 * 4
    words = np.ascontiguousarray(keys[:, :whole]).view("<u4") if whole else np.empty((count, 0), np.uint32)
    for word in words.T:
        k = word * m
        k ^= k >> np.uint32(24)
        hashed = hashed * m ^ k * m
    for position in range(length - 1, whole - 1, -1):
        hashed ^= keys[:, position].astype(np.uint32) << np.uint32(8 * (position - whole))
    if length > whole:
        hashed *= m
    hashed ^= hashed >> np.uint32(13)
    hashed *= m
    hashed ^= hashed >> np.uint32(15)
    return hashed


def slots(keys: Bytes) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """CRC-16/XMODEM of keys of one length, a row each: `tailrace.hash_slots.slot_of`, before the modulo."""
    if not _SLOT_TABLE:
        from binascii import crc_hqx

        _SLOT_TABLE.append(np.array([crc_hqx(bytes([value]), 0) for value in range(256)], np.uint16))
    crc = np.zeros(len(keys), np.uint16)
    for column in keys.T:
        crc = (crc << np.uint16(8)) ^ _SLOT_TABLE[0][(crc >> np.uint16(8)) ^ column]
    return crc


def split(rows: pa.Table, numbers: Numbers) -> Sequence[tuple[int, pa.Table]]:
    """The rows of each partition, in their order."""
    first = int(numbers[0])
    if (numbers == first).all():
        return [(first, rows)]
    order = np.argsort(numbers.astype(np.int16), kind="stable")  # of 16 bits it is a radix sort
    ordered = rows.take(pa.array(order))
    sorted_numbers = numbers[order]
    bounds = [0, *(np.flatnonzero(np.diff(sorted_numbers)) + 1).tolist(), len(order)]
    return [(int(sorted_numbers[a]), ordered.slice(a, b - a)) for a, b in pairwise(bounds)]
