"""Rows picked out of several batches: as a batch, and as the message of one."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.batch.picked_rows import PickedRows
from tailrace.format.schema import DEFAULT_SCHEMA

ROWS = st.lists(
    st.tuples(st.none() | st.binary(max_size=9), st.none() | st.binary(max_size=9)),
    min_size=1, max_size=20,
)  # fmt: skip


@given(st.lists(st.tuples(ROWS, st.booleans()), min_size=1, max_size=3), st.booleans())
def test_the_message_has_the_rows_of_the_batch(
    parts: list[tuple[list[tuple[bytes | None, bytes | None]], bool]], has_keys: bool
) -> None:
    batches, rows = [], []
    for records, is_whole in parts:
        columns = {"value": pa.array([value for _, value in records], pa.binary())}
        if has_keys:
            columns = {"key": pa.array([key for key, _ in records], pa.binary()), **columns}
        batches.append(pa.record_batch(columns))
        chosen = list(range(0, len(records), 2))
        rows.append(None if is_whole else pa.array(chosen, pa.int64()).to_numpy())
    picked = PickedRows(batches, rows)
    joined = picked.batch()
    encoded = picked.encoded(stamp_us=7_000)
    assert encoded is not None
    message, _ = encoded.message(0)
    found = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(message)), DEFAULT_SCHEMA)
    found.validate(full=True)
    assert found.num_rows == joined.num_rows == encoded.num_rows
    assert found.column("value").equals(joined.column("value"))
    if has_keys:
        assert found.column("key").equals(joined.column("key"))
    else:
        assert found.column("key").null_count == found.num_rows
    assert set(found.column("timestamp").cast(pa.int64()).to_pylist()) == {7_000}
    assert encoded.batch().equals(found)


@pytest.mark.parametrize("column", ["word", "headers"])
def test_rows_that_are_not_plain_are_joined_and_not_laid_out(column: str) -> None:
    batch = pa.record_batch({"value": [b"a", b"b"], column: ["x", "y"]})
    picked = PickedRows([batch, batch], [pa.array([1]).to_numpy(), None])
    assert picked.encoded(0) is None
    assert picked.batch().to_pylist() == [
        {"value": b"b", column: "y"}, {"value": b"a", column: "x"}, {"value": b"b", column: "y"},
    ]  # fmt: skip
