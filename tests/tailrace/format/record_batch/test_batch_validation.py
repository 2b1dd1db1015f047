"""The structural check: good batches pass, bent ones with right checksums do not."""

from __future__ import annotations

import pathlib
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.batch import arrow_codec as arrow_batch
from tailrace.format.record_batch.arrow_metadata import SchemaLayout, read_schema
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_DELAYED,
    ATTRIBUTE_LOG_APPEND_TIME,
    ATTRIBUTE_SPARSE,
    ATTRIBUTE_TRANSACTIONAL,
    TRANSACTIONAL_PRODUCER_IDS,
    BatchFormatError,
    header_position,
    read_header,
    verify_batch,
)
from tailrace.format.record_batch.batch_validation import (
    UnpackedTooLargeError,
    UnsafeBatchError,
    rows_max,
    unpacked_bytes,
    unpacked_max,
    validate_batch,
)
from tailrace.format.schema import DEFAULT_SCHEMA, to_message
from tests.kit.batches import SEED, make_batch, reseal, with_wild_buffer
from tests.kit.seeds import examples

LAYOUT = read_schema(to_message(DEFAULT_SCHEMA))


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_good_batches_pass(compression: str, count: int) -> None:
    data = make_batch(count, compression=compression)
    validate_batch(data, verify_batch(memoryview(data), SEED), LAYOUT)


def test_wild_offsets_under_a_right_checksum_are_refused() -> None:
    data = with_wild_buffer(make_batch(50))
    header = verify_batch(memoryview(data), SEED)  # both checksums are right
    with pytest.raises(UnsafeBatchError, match="outside the body"):
        validate_batch(data, header, LAYOUT)


def test_such_a_batch_does_harm_a_reader_that_trusts_it() -> None:
    """Reason of the check: a reader that does not validate dies or fails on it."""
    code = (
        "import sys, pyarrow as pa; from tailrace.format.schema import DEFAULT_SCHEMA; data = "
        "sys.stdin.buffer.read();"
        "print(pa.ipc.read_record_batch(pa.ipc.read_message(data), DEFAULT_SCHEMA).to_pydict())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=bytes(with_wild_buffer(make_batch(50))),
        capture_output=True,
        check=False,
    )
    assert done.returncode != 0


def test_another_number_of_rows_than_the_header_says_is_refused() -> None:
    data = make_batch(4)
    position = header_position(data)
    struct.pack_into("<II", data, position + 24, 2, 3)
    reseal(data)
    with pytest.raises(UnsafeBatchError, match="claims 4 rows"):
        validate_batch(data, verify_batch(memoryview(data), SEED), LAYOUT)


def test_a_batch_of_another_schema_is_refused() -> None:
    layout = read_schema(to_message(pa.schema([("a", pa.int64())])))
    data = make_batch(4)
    with pytest.raises(UnsafeBatchError, match="columns"):
        validate_batch(data, verify_batch(memoryview(data), SEED), layout)


def test_a_column_shorter_than_the_rows_is_refused() -> None:
    schema = pa.schema([("a", pa.int64())])
    layout = read_schema(to_message(schema))
    short = arrow_batch.encode(
        pa.RecordBatch.from_pydict({"a": [1, 2, 3]}, schema=pa.schema([("a", pa.int8())])),
        schema_id=1, seed=SEED, compression="none", first_timestamp_us=0, max_timestamp_us=0,
    )  # fmt: skip
    with pytest.raises(UnsafeBatchError, match="3 values need 24"):
        validate_batch(short, verify_batch(memoryview(short), SEED), layout)


def test_a_compressed_bomb_is_refused() -> None:
    data = make_batch(100, compression="zstd")
    position = header_position(data)
    body = position + 136
    for at in range(body, len(data) - 8, 8):
        if 0 < struct.unpack_from("<q", data, at)[0] < 100_000:
            struct.pack_into("<q", data, at, 1 << 45)
            break
    reseal(data)
    with pytest.raises(UnsafeBatchError, match="unpacks to"):
        validate_batch(data, verify_batch(memoryview(data), SEED), LAYOUT)


MESSAGE_BYTES = 1 << 20


def bomb(rows: pa.RecordBatch) -> bytearray:
    data = arrow_batch.encode(
        rows, schema_id=1, seed=SEED, compression="zstd", first_timestamp_us=0, max_timestamp_us=0
    )
    assert len(data) < 200_000
    return data


def layout_of(rows: pa.RecordBatch) -> SchemaLayout:
    return read_schema(rows.schema.serialize().to_pybytes())


def test_what_unpacks_to_much_more_than_a_message_is_refused() -> None:
    rows = pa.RecordBatch.from_pydict(
        {"a": [b"x" * (unpacked_max(MESSAGE_BYTES) + 1)]}, schema=pa.schema([("a", pa.binary())])
    )
    data = bomb(rows)
    header = verify_batch(memoryview(data), SEED)
    assert unpacked_bytes(data, header) > 16 * MESSAGE_BYTES
    validate_batch(
        data, header, layout_of(rows)
    )  # the largest max.message.bytes allows it: readers go by that
    with pytest.raises(UnpackedTooLargeError, match="unpacks to"):
        validate_batch(data, header, layout_of(rows), max_message_bytes=MESSAGE_BYTES)


@pytest.mark.parametrize("limit", [1024, MESSAGE_BYTES, 64 << 20])
def test_a_batch_unpacked_to_its_bound_passes(limit: int) -> None:
    size = unpacked_max(limit) - 64
    rows = pa.RecordBatch.from_pydict({"a": [b"x" * size]}, schema=pa.schema([("a", pa.binary())]))
    data = bomb(rows)
    validate_batch(
        data, verify_batch(memoryview(data), SEED), layout_of(rows), max_message_bytes=limit
    )


@pytest.mark.parametrize(
    "rows",
    [
        pa.RecordBatch.from_arrays([pa.nulls(100_000_000)], ["a"]),
        pa.RecordBatch.from_arrays([pa.nulls(1 << 17)], ["a"]),
        pa.RecordBatch.from_arrays([pa.array(np.zeros(12_000_000, bool))], ["a"]),
        pa.RecordBatch.from_arrays([pa.FixedSizeListArray.from_arrays(pa.nulls(1 << 24), 1 << 24)],
        ["a"]),
        pa.RecordBatch.from_arrays([pa.ListArray.from_arrays(pa.array([0, 100_000_000], pa.int32()),
        pa.nulls(100_000_000))], ["a"]),
        pa.RecordBatch.from_arrays([pa.ListArray.from_arrays(pa.array([0, 100_000_000], pa.int32()),
        pa.array(np.zeros(100_000_000, bool)))], ["a"]),
        pa.RecordBatch.from_arrays([pa.StructArray.from_arrays([pa.nulls(100_000_000)], ["b"])],
        ["a"]),
    ],
    ids=["null rows", "fewer null rows", "bool rows", "a wide list of nulls", "a list of nulls",
    "a list of bools", "structs of nulls"],
)  # fmt: skip
def test_rows_and_values_that_cost_no_bytes_are_refused(rows: pa.RecordBatch) -> None:
    data = bomb(rows)
    assert len(data) < 20_000
    with pytest.raises(UnpackedTooLargeError, match=r"rows in|values in|unpacks to"):
        validate_batch(
            data,
            verify_batch(memoryview(data), SEED),
            layout_of(rows),
            max_message_bytes=MESSAGE_BYTES,
        )


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_the_narrowest_rows_of_a_full_message_pass(compression: str) -> None:
    rows = pa.RecordBatch.from_arrays(
        [pa.array(np.arange(MESSAGE_BYTES - 4096) % 100, pa.int8())], ["a"]
    )
    data = arrow_batch.encode(
        rows,
        schema_id=1,
        seed=SEED,
        compression=compression,
        first_timestamp_us=0,
        max_timestamp_us=0,
    )
    assert rows.num_rows < rows_max(MESSAGE_BYTES)
    validate_batch(
        data, verify_batch(memoryview(data), SEED), layout_of(rows), max_message_bytes=MESSAGE_BYTES
    )


def test_a_compressed_buffer_shorter_than_its_values_is_refused() -> None:
    rows = pa.RecordBatch.from_arrays([pa.array(np.zeros(10_000, np.int8))], ["a"])
    layout = read_schema(pa.schema([("a", pa.int64())]).serialize().to_pybytes())
    with pytest.raises(UnsafeBatchError, match="10000 values need 80000"):
        validate_batch(bomb(rows), verify_batch(memoryview(bomb(rows)), SEED), layout)


def test_a_delay_log_takes_only_what_can_be_delivered_uncompressed() -> None:
    fits, does_not = ({"a": [b"x" * size]} for size in (MESSAGE_BYTES - 4096, MESSAGE_BYTES - 100))
    schema = pa.schema([("a", pa.binary())])
    for columns, expected in ((fits, True), (does_not, False)):
        rows = pa.RecordBatch.from_pydict(columns, schema=schema)
        data = bomb(rows)
        header = verify_batch(memoryview(data), SEED)
        uncompressed = arrow_batch.encode(
            rows,
            schema_id=1,
            seed=SEED,
            compression="none",
            first_timestamp_us=0,
            max_timestamp_us=0,
        )
        assert (len(uncompressed) <= MESSAGE_BYTES) is expected
        if expected:
            validate_batch(
                data, header, layout_of(rows), max_message_bytes=MESSAGE_BYTES, is_delay_log=True
            )
            continue
        with pytest.raises(UnpackedTooLargeError, match="uncompressed batch"):
            validate_batch(
                data, header, layout_of(rows), max_message_bytes=MESSAGE_BYTES, is_delay_log=True
            )


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"attributes": ATTRIBUTE_TRANSACTIONAL}, UnsafeBatchError),
        ({"producer_id": TRANSACTIONAL_PRODUCER_IDS}, UnsafeBatchError),
        ({"attributes": ATTRIBUTE_SPARSE}, BatchFormatError),
        ({"attributes": ATTRIBUTE_DELAYED}, UnsafeBatchError),
        ({"attributes": ATTRIBUTE_LOG_APPEND_TIME}, UnsafeBatchError),
        ({"due_us": 1 << 32}, UnsafeBatchError),
        ({"delay_position": 1}, UnsafeBatchError),
        ({"min_tick": -2}, UnsafeBatchError),
        ({"previous_position": 7}, UnsafeBatchError),
        ({"control_type": 1}, BatchFormatError),
        ({"merged_count": 1}, BatchFormatError),
    ],
)
def test_what_only_the_appliance_may_say_is_refused_from_outside(
    change: dict[str, int], error: type[Exception]
) -> None:
    data = make_batch(3)
    position = header_position(data)
    header = replace(read_header(data), **change)
    data[position : position + 136] = header.to_bytes()
    reseal(data)
    header = verify_batch(memoryview(data), SEED)
    with pytest.raises(error):
        validate_batch(data, header, LAYOUT)
    if not header.attributes & ATTRIBUTE_SPARSE:
        validate_batch(data, header, LAYOUT, is_ours=True)


def test_unset_fields_may_be_minus_one_or_zero() -> None:
    data = make_batch(3)
    position = header_position(data)
    data[position : position + 136] = replace(
        read_header(data), due_us=0, delay_position=0, min_tick=0
    ).to_bytes()
    validate_batch(data, read_header(data), LAYOUT)


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(8, 600), st.binary(min_size=1, max_size=8))
def test_what_passes_can_be_read(at: int, junk: bytes) -> None:
    """Bend the flatbuffer anywhere, make the checksums right: whatever passes the check is read by
    pyarrow without harm.
    """
    data = make_batch(20)
    end = header_position(data)
    at = min(at, end - len(junk))
    data[at : at + len(junk)] = junk
    reseal(data)
    try:
        header = verify_batch(memoryview(data), SEED)
        validate_batch(data, header, LAYOUT)
    except (BatchFormatError, UnsafeBatchError):
        return
    try:
        batch = pa.ipc.read_record_batch(
            pa.ipc.read_message(pa.py_buffer(bytes(data))), DEFAULT_SCHEMA
        )
        batch.validate(full=True)
    except (pa.ArrowInvalid, OSError):
        return
    assert batch.num_rows == 20


def test_the_check_needs_no_arrow_library() -> None:
    modules = (
        "workers.append.worker, workers.flush.flusher, netfront.front, "
        "appliance.supervise.supervisor, appliance.control.controller"
    )
    code = f"import sys, {modules}; print('pyarrow' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=pathlib.Path(__file__).parents[4],
    )
    assert done.stdout.split() == ["False", "False"]
    assert read_header(make_batch()).record_count == 3
