"""Rows of a task in a topic's columns, and the partition of each. Columns and error messages are
those of Spark's Kafka sink (KafkaWriter, KafkaRowWriter).

Topics without a schema take key and value (string or binary; value is required), headers
(array<struct<key: string, value: binary>>), topic (string) and partition (int). Other columns are
not written. A typed topic takes its own columns, by name. A key's partition is the Producer's:
murmur2 as in Kafka's default partitioner, or the owner of its hash slot. Rows without a key go to
one partition until a batch is full (KIP-480's sticky partitioner).

Owner: pure.
Invariants: rows of one partition keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace import kernel
from tailrace.batch.frames import fitting
from tailrace.batch.picked_rows import PickedRows
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import InvalidRecordError, SchemaMismatchError
from tailrace.core.hash_slots import SLOT_COUNT, STAYS
from tailrace.format.schema import HEADER_TYPE, conform
from tailrace.kernel.reference_gather import hashed

ROW_BYTES = 12
"""Bytes of a stored row beside key and value: its timestamp, and that it has no headers."""
NO_KEY = -1
"""Partition number of a row without a key, which may go to any partition."""
Numbers = np.ndarray[Any, np.dtype[np.int64]]
_SLOT_TABLE: list[np.ndarray[Any, np.dtype[np.uint16]]] = []


# ---- which columns there are ---------------------------------------------------------------------


def check_columns(schema: pa.Schema, topic: TopicInfo | None, key_column: str | None) -> None:
    """Check that rows of these columns can be written. `topic`: that of the option; None: each row
    names its topic.

    Raises: SchemaMismatchError, which names the column.
    """
    if topic is not None and topic.typed:
        _check_typed(schema, topic, key_column)
        return
    if key_column is not None:
        raise SchemaMismatchError(
            "the option keyColumn needs a typed topic; the keys of other topics are in the "
            "column `key`"
        )
    if topic is None and "topic" not in schema.names:
        raise SchemaMismatchError(
            "topic option required when no 'topic' attribute is present. Use the topic option for "
            "setting a topic."
        )
    if "value" not in schema.names:
        where = (
            ""
            if topic is None
            else f": the topic {topic.name!r} has no schema of its own, and takes key and value"
        )
        raise SchemaMismatchError(
            f"Required attribute 'value' not found{where}; the columns are "
            f"{', '.join(schema.names)}"
        )
    for name, allowed, requirement in (
        ("topic", (pa.types.is_string, pa.types.is_large_string), "string"),
        ("key", _BYTES, "string or binary"),
        ("value", _BYTES, "string or binary"),
        ("partition", (pa.types.is_int32,), "int"),
        ("headers", (_is_headers,), "array<struct<key: string, value: binary>>"),
    ):
        if name == "topic" and topic is not None:
            continue  # the option overrides the column
        if name in schema.names and not any(fits(schema.field(name).type) for fits in allowed):
            raise SchemaMismatchError(
                f"{name} attribute unsupported type {schema.field(name).type}; it must be "
                f"{requirement}"
            )


def _is_headers(kind: pa.DataType) -> bool:
    if (
        not pa.types.is_list(kind)
        or not pa.types.is_struct(kind.value_type)
        or kind.value_type.num_fields != 2
    ):
        return False
    key, value = kind.value_type.field(0), kind.value_type.field(1)
    return bool(
        key.name == "key"
        and value.name == "value"
        and pa.types.is_string(key.type)
        and pa.types.is_binary(value.type)
    )


_BYTES = (
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_large_string,
    pa.types.is_large_binary,
)


def _check_typed(schema: pa.Schema, topic: TopicInfo, key_column: str | None) -> None:
    empty = pa.Table.from_batches([], schema)
    try:
        _fitted(empty, topic)
    except SchemaMismatchError as error:
        has = ", ".join(f"{field.name} {field.type}" for field in topic.schema)
        raise SchemaMismatchError(
            f"the rows do not fit the typed topic {topic.name!r}: {error.detail}. It has {has}"
        ) from None
    if key_column is not None and key_column not in schema.names:
        raise SchemaMismatchError(
            f"the option keyColumn is {key_column!r}; the columns are {', '.join(schema.names)}"
        )


# ---- rows ----------------------------------------------------------------------------------------


def default_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of Kafka's columns as those of the default schema: value, and key and headers where they
    are given. A producer adds the rest when it sends them.

    Raises InvalidRecordError for a header without a key.
    """
    columns = {
        name: batch.column(name).cast(pa.binary())
        for name in ("key", "value")
        if name in batch.schema.names
    }
    if "headers" in batch.schema.names:
        columns["headers"] = _headers(batch.column("headers"))
    return pa.RecordBatch.from_pydict(columns)


def _headers(given: pa.ListArray) -> pa.Array:
    of_all_rows = given.flatten()
    if of_all_rows.null_count or of_all_rows.field("key").null_count:
        raise InvalidRecordError(
            "a row has a header without a key in the column headers: a header has a key, and a "
            "value that may be null"
        )
    return given.cast(HEADER_TYPE)


def typed_rows(batch: pa.RecordBatch, info: TopicInfo) -> pa.RecordBatch:
    """Rows, one at least, as those of a typed topic. Raises SchemaMismatchError for a value that
    does not fit.
    """
    return _fitted(pa.Table.from_batches([batch]), info).combine_chunks().to_batches()[0]


def _fitted(rows: pa.Table, info: TopicInfo) -> pa.Table:
    """The rows in the topic's newest schema. They may have the columns of an earlier version.
    Raises SchemaMismatchError.
    """
    fits = fitting(rows, info, None)
    return conform(rows if fits is None else fits[0], info.schema)


def by_topic(batch: pa.RecordBatch) -> list[tuple[str, pa.RecordBatch]]:
    """The rows of each topic that the column `topic` names. Raises InvalidRecordError for a row
    that names none.
    """
    column = batch.column("topic")
    if column.null_count:
        raise InvalidRecordError(
            "null topic present in the data. Use the topic option for setting a topic."
        )
    names = pc.unique(column).to_pylist()
    if len(names) == 1:
        return [(names[0], batch)]
    return [(name, batch.filter(pc.equal(column, pa.scalar(name, column.type)))) for name in names]


def routed_parts(
    rows: pa.RecordBatch, batch: pa.RecordBatch, info: TopicInfo, key_column: str | None
) -> list[tuple[int, Part]]:
    """The rows of each partition, in their order; NO_KEY for rows that may go to any. `batch`: the
    rows as Spark gave them. Raises InvalidRecordError for a partition that the topic does not have.
    """
    keys = _keys(rows, batch, info, key_column)
    has_partitions = not info.typed and "partition" in batch.schema.names
    if keys is not None and info.owners is None and not has_partitions:
        return _by_murmur2(rows, keys, len(info.partitions))
    routes = (
        Routes(np.full(rows.num_rows, NO_KEY, np.int64), _staying(rows, info))
        if keys is None
        else key_routes(keys, info)
    )
    return split(rows, _with_partitions(routes, batch, info) if has_partitions else routes)


def _keys(
    rows: pa.RecordBatch, batch: pa.RecordBatch, info: TopicInfo, key_column: str | None
) -> pa.BinaryArray | None:
    """The keys, None if no row has one."""
    if info.typed:
        keys = None if key_column is None else batch.column(key_column)
    else:
        keys = rows.column("key") if "key" in rows.schema.names else None
    if keys is None or keys.null_count == len(keys):
        return None
    # A Producer takes a key that is neither bytes nor text by its text, too (see
    # `tailrace.batch.frames`).
    if not any(fits(keys.type) for fits in _BYTES):
        keys = pa.array([None if key is None else str(key) for key in keys.to_pylist()])
    return keys.cast(pa.binary())


class Routes(NamedTuple):
    """Each row's partition, or NO_KEY. `slots`: each row's hash slot, or STAYS, on topics that have
    them; None elsewhere.
    """

    partitions: Numbers
    slots: Numbers | None = None


def _with_partitions(routes: Routes, batch: pa.RecordBatch, info: TopicInfo) -> Routes:
    """The routes, where the column `partition` names no other. Raises InvalidRecordError."""
    given, count = batch.column("partition"), len(info.partitions)
    requested = np.asarray(given.fill_null(NO_KEY).cast(pa.int64()).to_numpy(zero_copy_only=False))
    is_given = np.asarray(given.is_valid().to_numpy(zero_copy_only=False))
    wrong = requested[is_given & ((requested < 0) | (requested >= count))]
    if len(wrong):
        raise InvalidRecordError(
            f"a row has partition {wrong[0]} of topic {info.name!r}, which has 0 to {count - 1}; "
            "without the column `partition` the key decides"
        )
    partitions, slots = routes
    return Routes(
        np.where(is_given, requested, partitions),
        None if slots is None else np.where(is_given, STAYS, slots),
    )


def _staying(rows: pa.RecordBatch, info: TopicInfo) -> Numbers | None:
    return None if info.owners is None else np.full(rows.num_rows, STAYS, np.int64)


def key_routes(keys: pa.BinaryArray, info: TopicInfo) -> Routes:
    """Each key's route, as the Producer chooses it; NO_KEY and STAYS for a null."""
    numbers: Numbers
    slots: Numbers | None = None
    if info.owners is not None:
        slots = hashed(keys, crc16s) % SLOT_COUNT
        numbers = np.asarray(info.owners, np.int64)[slots]
    else:
        rows, counts = kernel.rows_by_partition(keys, len(info.partitions))
        numbers = np.empty(len(keys), np.int64)
        numbers[np.frombuffer(rows, np.int64)] = np.repeat(np.arange(len(counts)), counts)
    if keys.null_count:
        is_valid = np.asarray(keys.is_valid().to_numpy(zero_copy_only=False))
        numbers = np.where(is_valid, numbers, NO_KEY)
        slots = None if slots is None else np.where(is_valid, slots, STAYS)
    return Routes(numbers, slots)


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


# ---- hash slots of many keys at a time -----------------------------------------------------------


def crc16s(keys: Bytes) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """CRC-16/XMODEM of keys of one length, a row each: `tailrace.core.hash_slots.slot_of`, before
    the modulo.
    """
    if not _SLOT_TABLE:
        from binascii import crc_hqx

        _SLOT_TABLE.append(
            np.array([crc_hqx(bytes([value]), 0) for value in range(256)], np.uint16)
        )
    crc = np.zeros(len(keys), np.uint16)
    for column in keys.T:
        crc = (crc << np.uint16(8)) ^ _SLOT_TABLE[0][(crc >> np.uint16(8)) ^ column]
    return crc


# ---- rows of one partition, in pieces ------------------------------------------------------------


class Part(NamedTuple):
    """Rows of a batch that go to one partition. They are copied when a piece is made of them: until
    then the batch stays.
    """

    batch: pa.RecordBatch
    rows: Numbers | None
    """Numbers of the rows, ascending; None: all."""
    row_bytes: float
    """Average bytes of a row of the batch."""
    slots: Numbers | None = None
    """Hash slots of the batch's rows, on topics that have them."""

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return self.batch.num_rows if self.rows is None else len(self.rows)

    def cut(self, count: int) -> tuple[Part, Part]:
        """Split into the first `count` rows and the others."""
        if self.rows is None:
            slots = self.slots
            return (
                self._replace(
                    batch=self.batch.slice(0, count), slots=None if slots is None else slots[:count]
                ),
                self._replace(
                    batch=self.batch.slice(count), slots=None if slots is None else slots[count:]
                ),
            )
        return self._replace(rows=self.rows[:count]), self._replace(rows=self.rows[count:])


def _by_murmur2(
    batch: pa.RecordBatch, keys: pa.BinaryArray, partition_count: int
) -> list[tuple[int, Part]]:
    """The rows of each partition by Kafka's partitioner."""
    row_bytes = batch.nbytes / batch.num_rows + ROW_BYTES
    rows, counts = kernel.rows_by_partition(keys, partition_count)
    order, found, start = np.frombuffer(rows, np.int64), [], 0
    for number, count in enumerate(counts):
        if count:
            chosen = None if count == batch.num_rows else order[start : start + count]
            found.append(
                (
                    number if number < partition_count else NO_KEY,
                    Part(batch, chosen, row_bytes),
                )
            )
            start += count
    return found


def split(batch: pa.RecordBatch, routes: Routes) -> list[tuple[int, Part]]:
    """The rows of each partition, in their order."""
    numbers, slots = routes
    row_bytes = batch.nbytes / len(numbers) + ROW_BYTES
    first = int(numbers[0])
    if (numbers == first).all():
        return [(first, Part(batch, None, row_bytes, slots))]
    order = np.argsort(numbers.astype(np.int16), kind="stable")  # of 16 bits it is a radix sort
    ordered = numbers[order]
    bounds = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(order)]
    return [
        (int(ordered[a]), Part(batch, order[a:b], row_bytes, slots)) for a, b in pairwise(bounds)
    ]


def slots_of(parts: Sequence[Part]) -> Numbers | None:
    """The hash slots of all parts' rows, on topics that have them."""
    found = [
        part.slots if part.rows is None else part.slots[part.rows]
        for part in parts
        if part.slots is not None
    ]
    return np.concatenate(found) if found else None


def joined(parts: Sequence[Part]) -> PickedRows:
    """Join the rows of all parts."""
    return PickedRows([part.batch for part in parts], [part.rows for part in parts])
