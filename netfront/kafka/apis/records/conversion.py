"""Record batches between Kafka's clients and the log: which partition, which settings.

Owner: pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from netfront.kafka.apis.cluster.leader_epochs import base_epoch
from netfront.kafka.apis.records.producer_codecs import codecs_of_producer
from netfront.kafka.apis.records.tail_cache import TailCache
from netfront.kafka.records.batch_layout import (
    ATTRIBUTE_CONTROL,
    ATTRIBUTE_TRANSACTIONAL,
    HEADER_BYTES,
    KafkaHeader,
    raise_epochs,
    write_kafka_header,
)
from netfront.kafka.records.errors import KafkaRecordsError
from netfront.kafka.records.incoming import ConvertedBatch, to_batches
from netfront.kafka.records.outgoing import from_batch
from netfront.kafka.wire.definitions import Readable
from shm.messages.lane_messages import Assignment
from tailrace.format.record_batch.arrow_metadata import SchemaLayout, read_schema
from tailrace.format.record_batch.batch_header import checksum_seed, read_header

if TYPE_CHECKING:
    from netfront.kafka.records.typed import TypedRows

TYPED_MAX = 256
"""Schemas whose conversion is kept."""
_SKIPPED_NAME = b"\0\0\0\1"
_SKIPPED_VALUE = b"\0\0\0\0\0\0"
"""Key and value of a control record: version 0, type 1 (commit); version 0, coordinator epoch 0."""
_NO_PRODUCER = 0
Versions = tuple[tuple[int, bytes], ...]
"""Id and schema message of each version of a topic's schema, the oldest first."""


class Converted(NamedTuple):
    """Result of a fetch for one partition."""

    records: bytes | bytearray
    next_offset: int
    """Behind the last batch; -1: there is none."""
    is_cut: bool
    """True if batches are left over."""


def convert_incoming(
    route: Assignment, records: Readable, now_us: int, version: int
) -> Sequence[ConvertedBatch]:
    """Convert the records of one partition of a Produce request of a version. Raises
    KafkaRecordsError.
    """
    return to_batches(
        records,
        seed=checksum_seed(route.topic_id, route.partition),
        now_us=now_us,
        max_message_bytes=int(route.settings["max.message.bytes"]),
        schema_id=route.schema_id,
        requires_key="compact" in str(route.settings.get("cleanup.policy", "")),
        typed=_incoming_rows_of(route),
        codec_count=codecs_of_producer(version),
    )


def _incoming_rows_of(route: Assignment) -> TypedRows | None:
    """The conversion of rows that come in, in the newest version or an earlier one."""
    if not route.older_schemas:
        return typed_rows_of(route, route.schema)
    versions = (*sorted(route.older_schemas.items()), (route.schema_id, route.schema))
    return typed_rows_of(route, route.schema, versions)


def typed_rows_of(route: Assignment, schema: bytes, versions: Versions = ()) -> TypedRows | None:
    """The conversion of a typed topic's rows; None: the topic has the default schema."""
    if not route.typed:
        return None
    settings = route.settings
    return _typed_rows(
        schema, str(settings.get("kafka.value.format", "json")),
        str(settings.get("key.column", "")), versions,
    )  # fmt: skip


@lru_cache(maxsize=TYPED_MAX)
def _typed_rows(schema: bytes, value_format: str, key_column: str, versions: Versions) -> TypedRows:
    from netfront.kafka.records.typed import TypedRows  # imports pyarrow, for typed topics only

    return TypedRows(schema, value_format=value_format, key_column=key_column, versions=versions)


def convert_outgoing(
    route: Assignment, batches: memoryview, bytes_max: int, compression: str, cache: TailCache
) -> Converted:
    """Convert the batches that a fetch has of a partition: the first one, and more until there are
    `bytes_max` bytes, packed with `compression`. Raises KafkaRecordsError: a batch cannot be
    served, and there is none before it.
    """
    seed, base = checksum_seed(route.topic_id, route.partition), base_epoch(route)
    parts: list[bytes | bytearray] = []
    at, next_offset, size = 0, -1, 0
    while at < len(batches) and (not parts or size < bytes_max):
        header = read_header(batches, at)
        batch = batches[at : at + header.batch_length]
        kept = cache.find(route, header, compression, base)
        if kept is not None:
            parts.append(kept)
            size += len(kept)
            next_offset = header.next_offset
            at += header.batch_length
            continue
        message = route.older_schemas.get(header.schema_id, route.schema)
        schema: SchemaLayout = read_schema(message)
        typed = typed_rows_of(route, message)
        try:
            made = from_batch(batch, seed=seed, schema=schema, compression=compression, typed=typed)
        except KafkaRecordsError:
            if not parts:
                raise
            break
        made = raise_epochs(made, base)
        cache.add_packed(route, header, compression, made)
        parts.append(made)
        size += len(parts[-1])
        next_offset = header.next_offset
        at += header.batch_length
    records = parts[0] if len(parts) == 1 else b"".join(parts)
    return Converted(records, next_offset, at < len(batches))


def skipped_range(first: int, end: int, leader_epoch: int) -> bytearray:
    """A control batch that stands for the offsets from `first` to `end`, which have no records that
    the reader gets. Clients skip it, and go on behind it.
    """
    delta = end - first - 1
    record = bytearray(b"\0\0")
    _append_signed(record, delta)
    _append_signed(record, len(_SKIPPED_NAME))
    record += _SKIPPED_NAME
    _append_signed(record, len(_SKIPPED_VALUE))
    record += _SKIPPED_VALUE
    record.append(0)
    batch = bytearray(HEADER_BYTES)
    _append_signed(batch, len(record))
    batch += record
    write_kafka_header(
        batch,
        KafkaHeader(
            base_offset=first,
            leader_epoch=leader_epoch,
            attributes=ATTRIBUTE_TRANSACTIONAL | ATTRIBUTE_CONTROL,
            last_offset_delta=delta,
            producer_id=_NO_PRODUCER,
            producer_epoch=0,
            record_count=1,
        ),
    )
    return batch


def _append_signed(out: bytearray, value: int) -> None:
    """Append a zigzag varint of a value that is not negative."""
    value <<= 1
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
