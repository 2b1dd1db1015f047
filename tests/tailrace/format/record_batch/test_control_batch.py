"""Control batches that are made without an Arrow library, read by Arrow's own reader."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tailrace.format.record_batch.arrow_metadata import read_record_batch, read_schema
from tailrace.format.record_batch.batch_header import (
    CONTROL_ABORT,
    CONTROL_COMMIT,
    TRANSACTIONAL_PRODUCER_IDS,
    header_position,
    verify_batch,
)
from tailrace.format.record_batch.batch_validation import validate_batch
from tailrace.format.record_batch.control_batch import MarkerTemplate, empty_message, encode_marker
from tailrace.format.record_batch.header_stamps import stamp_appended
from tailrace.format.schema import to_message
from tests.kit.log_files.schemas import SCHEMAS


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_message_without_rows_is_what_arrow_reads_as_an_empty_batch(name: str) -> None:
    schema = SCHEMAS[name]
    layout = read_schema(to_message(schema))
    message = empty_message(layout)
    assert len(message) % 8 == 0
    batch = pa.ipc.read_record_batch(pa.py_buffer(message), schema)
    batch.validate(full=True)
    assert (batch.num_rows, batch.schema) == (0, schema)
    found = read_record_batch(message)
    assert (found.row_count, found.body_length, found.compressed) == (0, 0, False)
    assert found.nodes == (0,) * 2 * len(layout.nodes)
    assert found.buffers == (0,) * 2 * layout.buffer_count


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("control_type", [CONTROL_COMMIT, CONTROL_ABORT])
def test_a_marker_is_a_valid_batch_in_a_stream_of_its_schema(name: str, control_type: int) -> None:
    schema = SCHEMAS[name]
    layout = read_schema(to_message(schema))
    marker, header = encode_marker(
        empty_message(layout), control_type=control_type,
        producer_id=TRANSACTIONAL_PRODUCER_IDS + 7, producer_epoch=32_767, schema_id=3,
        time_us=1_700_000_000_000_000, seed=99,
    )  # fmt: skip
    template = MarkerTemplate(empty_message(layout), 3, 99)
    written = bytearray(template.length)
    template.write(
        memoryview(written), control_type=control_type,
        producer_id=TRANSACTIONAL_PRODUCER_IDS + 7, producer_epoch=32_767, base_offset=0,
        time_us=1_700_000_000_000_000, leader_epoch=4, durable_offset=5,
    )  # fmt: skip
    stamp_appended(
        memoryview(marker), header_position(marker), header, base_offset=0,
        append_time_us=1_700_000_000_000_000, leader_epoch=4, durable_offset=5, seed=99,
    )  # fmt: skip
    assert written == marker, "a partition's template writes the same"
    with memoryview(marker) as view:
        found = verify_batch(view, 99)
        validate_batch(view, found, layout, is_ours=True)
    assert found.is_marker
    assert found.is_transactional
    assert found.is_control
    assert not found.is_delay_mark
    assert (found.control_type, found.producer_id, found.producer_epoch, found.base_sequence) == (
        control_type,
        TRANSACTIONAL_PRODUCER_IDS + 7,
        32_767,
        -1,
    )
    assert (found.record_count, found.last_offset_delta, found.schema_id) == (0, 0, 3)
    assert found.max_timestamp_us == header.max_timestamp_us == 1_700_000_000_000_000
    rows = pa.RecordBatch.from_pylist([{}], schema=schema)
    stream = to_message(schema) + marker + rows.serialize().to_pybytes() + marker
    assert pa.ipc.open_stream(stream).read_all().num_rows == 1
