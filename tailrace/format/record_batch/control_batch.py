"""Control batches: a batch without rows in a topic's schema, made without an Arrow library.

A worker ends a transaction with one in each partition. It is a complete Arrow message, so that a
file of batches stays an Arrow IPC stream.

Owner: pure.

Layout of the message's flatbuffer (Arrow's `Message.fbs`), all positions relative to its start:

    0        4               16               40                 56                  80
    +--------+---------------+----------------+------------------+-------------------+
    | root 16| Message vtable| Message table  | RecordBatch      | RecordBatch table,|
    |        |               |                | vtable, padding  | number of nodes   |
    +--------+---------------+----------------+------------------+-------------------+
    80 + 16 nodes: padding, number of buffers | 88 + 16 nodes: buffers, 16 B each

Every number in nodes and buffers is 0, and there is no body.
"""

from __future__ import annotations

import struct

from tailrace.format.record_batch.arrow_metadata import MESSAGE_RECORD_BATCH, SchemaLayout
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_CONTROL,
    ATTRIBUTE_TRANSACTIONAL,
    CONTINUATION,
    CONTROL_COMMIT,
    NO_SEQUENCE,
    OFFSET_BASE_OFFSET,
    BatchHeader,
    header_position,
)
from tailrace.format.record_batch.header_stamps import insert_header, seal_header

_METADATA_V5 = 4
_START = struct.Struct(
    "<II"  # continuation, metadata size
    "I"  # root: the Message table
    "HHHHHH"  # vtable: its size, the table's, version, header type, header, body length
    "iIqhBx4x"  # Message: vtable, header, body length, version, header type
    "HHHHH6x"  # vtable: its size, the table's, length, nodes, buffers
    "iIqI"  # RecordBatch: vtable, nodes, length, buffers
)
_MARKED = struct.Struct("<qIIqqqqihHiIq")
"""The header's fields from the base offset to the durable offset."""
_COUNT = struct.Struct("<I")
_ENTRY_BYTES = 16
assert _START.size == 8 + 76


def empty_message(layout: SchemaLayout) -> bytes:
    """Return the encapsulated Arrow message of a record batch without rows."""
    node_count, buffer_count = len(layout.nodes), layout.buffer_count
    nodes_end = 80 + _ENTRY_BYTES * node_count
    buffers_at = nodes_end + 4
    size = buffers_at + 4 + _ENTRY_BYTES * buffer_count
    start = _START.pack(
        CONTINUATION, size,
        16,
        12, 20, 16, 18, 4, 8,
        16 - 4, 56 - 20, 0, _METADATA_V5, MESSAGE_RECORD_BATCH,
        10, 20, 8, 4, 16,
        56 - 40, 76 - 60, 0, buffers_at - 72,
    )  # fmt: skip
    return b"".join(
        (
            start,
            _COUNT.pack(node_count),
            bytes(_ENTRY_BYTES * node_count + 4),
            _COUNT.pack(buffer_count),
            bytes(_ENTRY_BYTES * buffer_count),
        )
    )


def encode_marker(
    empty: bytes,
    *,
    control_type: int,
    producer_id: int,
    producer_epoch: int,
    schema_id: int,
    time_us: int,
    seed: int,
) -> tuple[bytearray, BatchHeader]:
    """Return the marker that ends a transaction, and its header. `empty`: the `empty_message` of
    the topic's schema; `control_type`: CONTROL_COMMIT or CONTROL_ABORT.
    """
    header = BatchHeader(
        attributes=ATTRIBUTE_TRANSACTIONAL | ATTRIBUTE_CONTROL,
        first_timestamp_us=time_us, max_timestamp_us=time_us,
        producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=NO_SEQUENCE,
        schema_id=schema_id, control_type=control_type,
    )  # fmt: skip
    return insert_header(empty, header, seed), header


class MarkerTemplate:
    """The markers of one partition: all but the fields of one transaction is made once."""

    def __init__(self, empty: bytes, schema_id: int, seed: int) -> None:
        """`empty`: the `empty_message` of the topic's schema. `seed`: of the partition."""
        self._seed = seed
        self._schema_id = schema_id
        marker, _ = encode_marker(
            empty, control_type=CONTROL_COMMIT, producer_id=0, producer_epoch=0,
            schema_id=schema_id, time_us=0, seed=seed,
        )  # fmt: skip
        self._bytes = bytes(marker)
        self._position = header_position(self._bytes)
        self.length = len(marker)

    def write(
        self, target: memoryview, *, control_type: int, producer_id: int, producer_epoch: int,
        base_offset: int, time_us: int, leader_epoch: int, durable_offset: int,
    ) -> None:  # fmt: skip
        """Write an appended marker into `target`, which is `length` bytes."""
        target[:] = self._bytes
        at = self._position
        _MARKED.pack_into(
            target, at + OFFSET_BASE_OFFSET, base_offset, 0, 0, time_us, time_us, time_us,
            producer_id, NO_SEQUENCE, producer_epoch, control_type, leader_epoch,
            self._schema_id, durable_offset,
        )  # fmt: skip
        seal_header(target, at, 0, self._seed)
