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
    NO_SEQUENCE,
    BatchHeader,
    insert_header,
)

_METADATA_V5 = 4
_START = struct.Struct(
    "<II"  # continuation, metadata size
    "I"  # root: the Message table
    "HHHHHH"  # vtable: its size, the table's, version, header type, header, body length
    "iIqhBx4x"  # Message: vtable, header, body length, version, header type
    "HHHHH6x"  # vtable: its size, the table's, length, nodes, buffers
    "iIqI"  # RecordBatch: vtable, nodes, length, buffers
)
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
