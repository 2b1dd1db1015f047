"""A scan of files reads each batch by the schema that it was written with."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pyarrow as pa
import pytest

from tailrace.batch import arrow_codec
from tailrace.format.schema import to_message
from tailrace.scanning.sources.local_source import LocalSource, read_partition_file
from tests.kit.batches import SEED, TIME_US, stamped
from tests.kit.log_files.logs import assignment
from workers.log.files.active_segment import PendingBatch
from workers.log.partition_log import PartitionLog
from workers.segment.files import DiskFiles

SCHEMAS = {
    1: pa.schema([("a", pa.int32()), ("b", pa.utf8())]),
    2: pa.schema([("b", pa.utf8()), ("a", pa.int32())]),  # as long as the first, in another order
}


@pytest.mark.parametrize("damaged", [-1, 0, 1])
def test_each_batch_has_the_schema_of_its_version_also_where_a_schema_message_is_damaged(
    tmp_path: pathlib.Path, damaged: int
) -> None:
    typed = replace(
        assignment(), typed=True, schema_id=2, schema=to_message(SCHEMAS[2]),
        older_schemas={1: to_message(SCHEMAS[1])},
    )  # fmt: skip
    log = PartitionLog(DiskFiles(), str(tmp_path), typed)
    log.open("first")
    for offset, number in enumerate((1, 1, 2)):
        rows = pa.RecordBatch.from_pylist([{"a": offset, "b": "x"}], schema=SCHEMAS[number])
        data = stamped(
            arrow_codec.encode(
                rows, schema_id=number, seed=SEED, compression="none",
                first_timestamp_us=TIME_US, max_timestamp_us=TIME_US,
            ),
            offset,
        )  # fmt: skip
        if log.live is None or log.has_other_schema(data):
            log.roll(data)
        log.place(PendingBatch(offset, offset + 1, TIME_US, TIME_US, data))
        log.write_pending()
        log.sync()
        log.settled()
    directory = tmp_path / "t-0"
    paths = sorted(directory.glob("*.arrows"))
    assert len(paths) == 2
    if damaged >= 0:
        with open(paths[damaged], "r+b") as file:
            file.write(b"\0" * 64)
    known = read_partition_file(str(directory))
    assert known is not None
    source = LocalSource(str(directory), known, headers_only=False, schema=SCHEMAS[2])
    found = list(source.frames(0, 3))
    assert [frame.schema for frame in found] == [SCHEMAS[1], SCHEMAS[1], SCHEMAS[2]]
    for offset, frame in enumerate(found):
        assert frame.data is not None
        _, rows = arrow_codec.decode(memoryview(frame.data), frame.schema, SEED)
        assert rows.to_pylist() == [{"a": offset, "b": "x"}]
