"""The structural check: good batches pass, bent ones with right checksums do not."""

from __future__ import annotations

import pathlib
import struct
import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.arrow_metadata import read_schema
from tailrace.batch_header import BatchFormatError, header_position, read_header, verify_batch
from tailrace.schema import DEFAULT_SCHEMA, to_message
from tailrace.structure import UnsafeBatchError, check_structure
from tests.kit.batches import SEED, make_batch, reseal, with_wild_buffer

LAYOUT = read_schema(to_message(DEFAULT_SCHEMA))


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_good_batches_pass(compression: str, count: int) -> None:
    data = make_batch(count, compression=compression)
    check_structure(data, verify_batch(memoryview(data), SEED), LAYOUT)


def test_wild_offsets_under_a_right_checksum_are_refused() -> None:
    data = with_wild_buffer(make_batch(50))
    header = verify_batch(memoryview(data), SEED)  # both checksums are right
    with pytest.raises(UnsafeBatchError, match="outside the body"):
        check_structure(data, header, LAYOUT)


def test_such_a_batch_does_harm_a_reader_that_trusts_it() -> None:
    """Why the check exists: a reader that does not validate dies or fails on it."""
    code = (
        "import sys, pyarrow as pa; from tailrace.schema import DEFAULT_SCHEMA; data = sys.stdin.buffer.read();"
        "print(pa.ipc.read_record_batch(pa.ipc.read_message(data), DEFAULT_SCHEMA).to_pydict())"
    )
    done = subprocess.run([sys.executable, "-c", code], input=bytes(with_wild_buffer(make_batch(50))), capture_output=True, check=False)
    assert done.returncode != 0


def test_another_number_of_rows_than_the_header_says_is_refused() -> None:
    data = make_batch(4)
    position = header_position(data)
    struct.pack_into("<II", data, position + 24, 2, 3)
    reseal(data)
    with pytest.raises(UnsafeBatchError, match="claims 4 rows"):
        check_structure(data, verify_batch(memoryview(data), SEED), LAYOUT)


def test_a_batch_of_another_schema_is_refused() -> None:
    layout = read_schema(to_message(pa.schema([("a", pa.int64())])))
    data = make_batch(4)
    with pytest.raises(UnsafeBatchError, match="columns"):
        check_structure(data, verify_batch(memoryview(data), SEED), layout)


def test_a_column_shorter_than_the_rows_is_refused() -> None:
    schema = pa.schema([("a", pa.int64())])
    layout = read_schema(to_message(schema))
    from tailrace import arrow_batch

    short = arrow_batch.encode(
        pa.RecordBatch.from_pydict({"a": [1, 2, 3]}, schema=pa.schema([("a", pa.int8())])),
        schema_id=1, seed=SEED, compression="none", first_timestamp_us=0, max_timestamp_us=0,
    )  # fmt: skip
    with pytest.raises(UnsafeBatchError, match="3 values need 24"):
        check_structure(short, verify_batch(memoryview(short), SEED), layout)


def test_a_compressed_bomb_is_refused() -> None:
    data = make_batch(100, compression="zstd")
    position = header_position(data)
    body = position + 136
    for at in range(body, len(data) - 8, 8):
        if 0 < struct.unpack_from("<q", data, at)[0] < 100_000:
            struct.pack_into("<q", data, at, 1 << 45)
            break
    reseal(data)
    with pytest.raises(UnsafeBatchError, match="unpacks to more"):
        check_structure(data, verify_batch(memoryview(data), SEED), LAYOUT)


@settings(max_examples=300, deadline=None)
@given(st.integers(8, 600), st.binary(min_size=1, max_size=8))
def test_what_passes_can_be_read(at: int, junk: bytes) -> None:
    """Bend the flatbuffer anywhere, make the checksums right: whatever passes the check is read by pyarrow without harm."""
    data = make_batch(20)
    end = header_position(data)
    at = min(at, end - len(junk))
    data[at : at + len(junk)] = junk
    reseal(data)
    try:
        header = verify_batch(memoryview(data), SEED)
        check_structure(data, header, LAYOUT)
    except (BatchFormatError, UnsafeBatchError):
        return
    try:
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(bytes(data))), DEFAULT_SCHEMA)
        batch.validate(full=True)
    except (pa.ArrowInvalid, OSError):
        return
    assert batch.num_rows == 20


def test_the_check_needs_no_arrow_library() -> None:
    modules = "workers.worker, workers.flusher, netfront.front, appliance.supervisor, appliance.coordinator"
    code = f"import sys, {modules}; print('pyarrow' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=pathlib.Path(__file__).parents[2])
    assert done.stdout.split() == ["False", "False"]
    assert read_header(make_batch()).record_count == 3
