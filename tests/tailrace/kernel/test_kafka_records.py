"""Kafka's records: the compiled kernel against its reference, and both against damage."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace import kernel
from tailrace.format.record_batch.arrow_metadata import read_record_batch
from tailrace.format.record_batch.batch_header import (
    HEADER_BYTES,
    TRANSACTIONAL_PRODUCER_IDS,
    header_position,
)
from tailrace.kernel import reference_kafka
from tailrace.kernel.reference_kafka import RecordFault
from tests.kit.seeds import examples

NATIVE = kernel.load_compiled()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="there is no compiled kernel to compare")

CELL = st.none() | st.binary(max_size=40) | st.binary(min_size=60, max_size=70)
HEADERS = st.lists(st.tuples(st.text(max_size=12), st.none() | st.binary(max_size=20)), max_size=3)
TIME_MS = st.integers(-(10**12), 10**13)
ROWS = st.lists(st.tuples(CELL, CELL, TIME_MS, HEADERS), min_size=1, max_size=40)
PRODUCER = st.sampled_from(
    [(-1, -1, -1), (7, 0, 0), (7, 3, 2**31 - 3), (TRANSACTIONAL_PRODUCER_IDS + 5, 32767, 9)]
)
MISSING_US = 1_700_000_000_000_000


def encoded(rows: list[Any]) -> tuple[bytearray, int]:
    """Records as a producer of Kafka writes them, and the time that their deltas count from."""
    out, base_ms = bytearray(), rows[0][2]
    for row, (key, value, time_ms, headers) in enumerate(rows):
        record = bytearray(1)
        reference_kafka.put_zigzag(record, time_ms - base_ms)
        reference_kafka.put_zigzag(record, row)
        for cell in (key, value):
            reference_kafka.put_cell(record, cell)
        reference_kafka.put_zigzag(record, len(headers))
        for name, content in headers:
            reference_kafka.put_cell(record, name.encode())
            reference_kafka.put_cell(record, content)
        reference_kafka.put_zigzag(out, len(record))
        out += record
    return out, base_ms


def outcome(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except RecordFault as fault:
        return fault.args


def both(name: str, *arguments: Any) -> Any:
    """The outcome, which is the same of the compiled function and of its reference."""
    expected = outcome(getattr(reference_kafka, name), *arguments)
    found = outcome(getattr(NATIVE, name), *arguments)
    assert found == expected
    return found


def columns_of(batch: bytes | bytearray) -> tuple[list[memoryview], tuple[int, ...]]:
    """The buffers and the nodes of a batch."""
    metadata = read_record_batch(batch, 8)
    body = memoryview(batch)[header_position(batch) + HEADER_BYTES :]
    places = metadata.buffers
    return [body[a : a + n] for a, n in zip(places[::2], places[1::2], strict=True)], metadata.nodes


@given(ROWS, PRODUCER, st.sampled_from([2000, 3000, 8000, 1 << 20]), st.booleans())
@settings(max_examples=examples(100))
def test_records_become_the_same_batches(
    rows: list[Any], producer: tuple[int, int, int], bytes_max: int, requires_key: bool
) -> None:
    records, base_ms = encoded(rows)
    arguments = (len(rows), base_ms, MISSING_US, 3, *producer, 12345, bytes_max, requires_key)
    made = both("batches_from_kafka", records, *arguments)
    if isinstance(made, tuple):
        assert made[0] in (
            reference_kafka.Fault.KEY_MISSING,
            reference_kafka.Fault.RECORD_TOO_LARGE,
        )


@given(ROWS, st.integers(0, 3), st.booleans(), st.sampled_from([None, 0, 1]))
@settings(max_examples=examples(100))
def test_batches_become_the_same_records_and_these_are_what_they_were(
    rows: list[Any], cut: int, has_one_time: bool, gaps: int | None
) -> None:
    records, base_ms = encoded(rows)
    (batch,) = reference_kafka.batches_from_kafka(
        records, len(rows), base_ms, -1000, 0, -1, -1, -1, 0, 1 << 30, False
    )
    buffers, nodes = columns_of(batch)
    first = min(cut, len(rows) - 1)
    offsets = None
    if gaps is not None:
        numbers = [100 + row * (1 + gaps) for row in range(len(rows))]
        offsets = b"".join(number.to_bytes(8, "little") for number in numbers)
    found = both(
        "records_to_kafka", buffers, nodes, first, len(rows) - first, 5_500, has_one_time, offsets,
        100, 61,
    )  # fmt: skip
    if not first and not has_one_time and not gaps:
        assert found == (
            bytearray(61) + records,
            base_ms,
            max(time_ms for _, _, time_ms, _ in rows),
        )


@given(ROWS, st.data())
@settings(max_examples=examples(200))
def test_damaged_records_have_the_same_fault(rows: list[Any], data: Any) -> None:
    records, base_ms = encoded(rows)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(records) - 1))
        records[place] = data.draw(st.sampled_from([0, 1, 2, 3, 127, 128, 254, 255]))
    records = records[: data.draw(st.sampled_from([len(records), len(records) - 1, 8]))]
    count = data.draw(st.sampled_from([len(rows), len(rows) + 1, 1, 0, -1, 2**31 - 1]))
    base_ms = data.draw(st.sampled_from([base_ms, 2**63 - 1, -(2**63)]))
    both(
        "batches_from_kafka", bytes(records), count, base_ms, MISSING_US, 0, -1, -1, -1, 0,
        data.draw(st.sampled_from([1500, 1 << 20])), False,
    )  # fmt: skip


@given(ROWS, st.data())
@settings(max_examples=examples(200))
def test_damaged_columns_have_the_same_fault_or_records(rows: list[Any], data: Any) -> None:
    records, base_ms = encoded(rows)
    (batch,) = reference_kafka.batches_from_kafka(
        records, len(rows), base_ms, -1000, 0, -1, -1, -1, 0, 1 << 30, False
    )
    views, nodes = columns_of(batch)
    buffers, numbers = [bytearray(view) for view in views], list(nodes)
    for _ in range(data.draw(st.integers(1, 4))):
        buffer = buffers[data.draw(st.integers(0, len(buffers) - 1))]
        kind = data.draw(st.integers(0, 4))
        if kind == 0 and buffer:
            buffer[data.draw(st.integers(0, len(buffer) - 1))] = data.draw(st.integers(0, 255))
        elif kind == 1:
            del buffer[data.draw(st.integers(0, len(buffer))) :]
        elif kind == 2:
            numbers[data.draw(st.integers(0, 13))] = data.draw(
                st.sampled_from([-1, 0, 1, len(rows), len(rows) + 1, 2**62])
            )
        elif kind == 4:  # every second list is null, and every second name begins at 0 again
            hide_every_second(buffers, numbers, len(rows))
        else:
            buffers[data.draw(st.integers(0, 16))] = bytearray(data.draw(st.binary(max_size=8)))
    offsets = data.draw(st.none() | st.binary(max_size=8 * len(rows) + 8))
    both(
        "records_to_kafka", buffers, numbers, data.draw(st.integers(-1, 2)),
        data.draw(st.sampled_from([1, len(rows), 0, len(rows) + 1])), 7, False, offsets,
        data.draw(st.sampled_from([0, -5, 100])), 0,
    )  # fmt: skip


def hide_every_second(buffers: list[bytearray], nodes: list[int], count: int) -> None:
    """Make every second list null. The cells of headers end where their column ends, or at 0."""
    nodes[7] = count // 2
    buffers[8][:] = b"\x55" * ((count + 7) // 8)
    for offsets, cells in ((buffers[12], buffers[13]), (buffers[15], buffers[16])):
        for at in range(0, len(offsets) - 3, 8):
            offsets[at : at + 8] = struct.pack("<ii", 0, len(cells))[: len(offsets) - at]


def columns_with_hidden_headers(count: int, size: int) -> tuple[list[bytearray], list[int]]:
    """Columns whose visible headers all have the same `size` bytes as their name."""
    rows = [(None, None, 5, [("n" * (size if row == 0 else 0), None)]) for row in range(count)]
    records, base_ms = encoded(rows)
    (batch,) = reference_kafka.batches_from_kafka(
        records, count, base_ms, -1000, 0, -1, -1, -1, 0, 1 << 30, False
    )
    views, nodes = columns_of(batch)
    buffers, numbers = [bytearray(view) for view in views], list(nodes)
    hide_every_second(buffers, numbers, count)
    return buffers, numbers


@pytest.mark.parametrize("count", [2, 3, 64])
def test_headers_that_begin_again_behind_skipped_ones_are_refused(count: int) -> None:
    buffers, nodes = columns_with_hidden_headers(count, 40_000)
    found = both("records_to_kafka", buffers, nodes, 0, count, 0, False, None, 0, 0)
    if count == 2:  # one is visible
        assert len(found[0]) > 40_000
    else:
        assert found == (reference_kafka.Fault.COLUMNS, 2)


def test_headers_of_null_lists_are_skipped() -> None:
    rows = [(None, None, 5, [("ab", b"c")]) for _ in range(6)]
    records, base_ms = encoded(rows)
    (batch,) = reference_kafka.batches_from_kafka(
        records, 6, base_ms, -1000, 0, -1, -1, -1, 0, 1 << 30, False
    )
    buffers, nodes = columns_of(batch)
    hidden = [*buffers[:8], memoryview(b"\x15"), *buffers[9:]]
    numbers = [*nodes[:7], 3, *nodes[8:]]
    expected, _ = encoded([row if n % 2 == 0 else (*row[:3], []) for n, row in enumerate(rows)])
    found = both("records_to_kafka", hidden, numbers, 0, 6, 0, False, None, 0, 0)
    assert found == (expected, 5, 5)


def test_columns_of_another_number_are_refused() -> None:
    assert both("records_to_kafka", [b""] * 16, [0] * 14, 0, 1, 0, False, None, 0, 0) == (13, 0)
    assert both("records_to_kafka", [b""] * 17, [0] * 13, 0, 1, 0, False, None, 0, 0) == (13, 0)


def test_many_headers_are_kept_and_too_many_for_a_batch_refused() -> None:
    rows = [(None, None, 5, [(f"n{n}", b"%d" % n) for n in range(count)]) for count in (3, 700)]
    records, base_ms = encoded(rows)
    arguments = (2, base_ms, MISSING_US, 0, -1, -1, -1, 0)
    assert len(both("batches_from_kafka", records, *arguments, 1 << 20, False)) == 1
    assert both("batches_from_kafka", records, *arguments, 5592, False) == (11, 1)
