"""Every byte of a schema or batch message bent, every length: a layout or ArrowMetadataError,
nothing else; and what is accepted, pyarrow opens.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from tailrace.format.record_batch.arrow_metadata import (
    FIELDS_MAX,
    ArrowMetadataError,
    read_record_batch,
    read_schema,
)
from tests.kit.processes import HANG_LIMIT_S

GOLDEN = {
    "plain": pa.schema([("timestamp", pa.timestamp("us", "UTC")), ("key", pa.binary()),
    ("x", pa.float32()), ("n", pa.uint16()), ("d", pa.date32())]),
    "times": pa.schema(
        [("a", pa.time32("ms")), ("b", pa.time64("ns")), ("c", pa.duration("s")),
        ("d", pa.month_day_nano_interval()), ("e", pa.decimal128(9, 2))]
    ),
    "nested": pa.schema(
        [("l", pa.list_(pa.struct([("k", pa.utf8()), ("v", pa.list_(pa.int8(), 3))]))),
        ("m", pa.map_(pa.utf8(), pa.bool_())), ("f", pa.binary(5))]
    ),
    "with metadata": pa.schema([pa.field("a", pa.int64(), metadata={"unit": "m"})],
    metadata={"origin": "a test"}),
}  # fmt: skip
VALUES = (0, 1, 4, 7, 0x7F, 0x80, 0xFF)


def bent(message: bytes) -> Iterator[bytes]:
    for index in range(len(message)):
        for value in {
            *VALUES,
            message[index] ^ 1,
            message[index] ^ 0x10,
            (message[index] + 4) % 256,
        }:
            yield message[:index] + bytes([value]) + message[index + 1 :]
    for length in range(len(message)):
        yield message[:length]
    for index in range(
        0, len(message) - 3, 4
    ):  # offsets that are in range, and lead somewhere else
        for value in range(0, len(message), 12):
            yield message[:index] + struct.pack("<I", value) + message[index + 4 :]


def accepted(read: Callable[[bytes], object], messages: Iterator[bytes]) -> list[bytes]:
    taken = []
    for message in messages:
        try:
            read(message)
        except ArrowMetadataError:
            continue
        taken.append(message)
    return taken


OPEN_EACH = """
import struct, sys, pyarrow as pa
data, position = sys.stdin.buffer.read(), 0
while position < len(data):
    (length,) = struct.unpack_from("<I", data, position)
    message = data[position + 4 : position + 4 + length]
    position += 4 + length
    schema = pa.ipc.read_schema(pa.py_buffer(message))
    schema.names, str(schema)
    columns = [pa.nulls(1, field.type) for field in schema]
    pa.RecordBatch.from_arrays(columns, schema=schema).serialize()
"""


@pytest.mark.parametrize("name", GOLDEN)
def test_a_bent_schema_is_refused_or_one_that_pyarrow_opens(name: str) -> None:
    message = GOLDEN[name].serialize().to_pybytes()
    assert read_schema(message)
    taken = accepted(read_schema, bent(message))
    assert taken, "nothing bent was accepted: names and units may be bent"
    piped = b"".join(struct.pack("<I", len(each)) + each for each in set(taken))
    opened = subprocess.run(
        [sys.executable, "-c", OPEN_EACH],
        input=piped,
        capture_output=True,
        check=False,
        timeout=HANG_LIMIT_S,
    )
    assert opened.returncode == 0, opened.stderr.decode()[-2000:]


@pytest.mark.parametrize("name", GOLDEN)
def test_a_bent_record_batch_gives_its_numbers_or_is_refused(name: str) -> None:
    schema = GOLDEN[name]
    columns = [pa.nulls(3, field.type) for field in schema]
    message = pa.RecordBatch.from_arrays(columns, schema=schema).serialize().to_pybytes()
    message = message[: 8 + struct.unpack_from("<I", message, 4)[0]]
    assert read_record_batch(message).row_count == 3
    assert accepted(read_record_batch, bent(message))


def test_columns_are_counted_where_many_offsets_lead_to_one_table() -> None:
    """Structs of structs, the offsets of each vector of children all turned to the last child:
    200^8 columns in some kilobytes.
    """
    kind: pa.DataType = pa.int8()
    for _ in range(8):
        kind = pa.struct([("a", kind), *((f"c{i}", pa.int8()) for i in range(200))])
    message = bytearray(pa.schema([("a", kind)]).serialize().to_pybytes())
    vectors = [
        at
        for at in range(8, len(message) - 4, 4)
        if struct.unpack_from("<I", message, at)[0] == 201
    ]
    assert len(vectors) == 8
    for vector in vectors:
        first = vector + 4
        target = first + struct.unpack_from("<I", message, first)[0]
        for entry in range(first, first + 4 * 201, 4):
            struct.pack_into("<I", message, entry, target - entry)
    with pytest.raises(ArrowMetadataError, match=f"more than {FIELDS_MAX} columns"):
        read_schema(bytes(message))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (pa.schema([pa.field("a", pa.timestamp("us", "5"))]), "time zone"),
        (
            pa.schema(
                [pa.field("a", pa.binary(), metadata={"ARROW:extension:name": "arrow.uuid"})]
            ),
            "extension",
        ),
        (pa.schema([("a", pa.decimal128(3, 200))]), "scale"),
        (pa.schema([("a", pa.list_(pa.int8(), 1 << 25))]), "size"),
        (pa.schema([("n" * 1001, pa.int8())]), "1000 are allowed"),
        (pa.schema([]), "has no columns"),
        (pa.schema([("a", pa.int8())], metadata={f"k{i}": "v" for i in range(300)}), "metadata"),
    ],
)
def test_what_arrow_takes_and_a_topic_does_not(schema: pa.Schema, reason: str) -> None:
    with pytest.raises(ArrowMetadataError, match=reason):
        read_schema(schema.serialize().to_pybytes())
