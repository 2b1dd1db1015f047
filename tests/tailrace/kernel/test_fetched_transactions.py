"""Batches of transactions without Arrow: the compiled kernel takes them, but no markers."""

from __future__ import annotations

import pytest

from tailrace import kernel
from tailrace.batch import arrow_codec
from tailrace.core.records import Record
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS, header_position
from tailrace.format.record_batch.header_stamps import seal_header
from tailrace.format.schema import DEFAULT_SCHEMA
from tests.kit.batches import SEED, make_batch, stamped


def test_a_batch_of_a_transaction_has_the_records_that_arrow_finds() -> None:
    batch = memoryview(stamped(make_batch(5, producer_id=TRANSACTIONAL_PRODUCER_IDS), 7))
    header, decoded = arrow_codec.decode(batch, DEFAULT_SCHEMA, SEED)
    model = arrow_codec.to_records("t", 0, 7, decoded, header, typed=False)
    found = arrow_codec.plain_rows(batch, SEED, "t", 0, 7)
    if kernel.compiled is None:
        assert found is None
        return
    assert found is not None
    rows, following, epoch = found
    records: list[Record] = []
    rows.take(records, 10)
    assert (records, following, epoch) == (model, 12, 0)


@pytest.mark.parametrize(("attributes", "version"), [(1, 1), (0, 2), (2, 1), (3, 2)])
def test_what_contradicts_itself_and_markers_are_left_to_arrow(
    attributes: int, version: int
) -> None:
    batch = stamped(make_batch(5, producer_id=TRANSACTIONAL_PRODUCER_IDS), 7)
    with memoryview(batch) as view:
        position = header_position(view)
        view[position + 4] = attributes
        view[position + 130] = version
        seal_header(view, position, 0, SEED)
    assert arrow_codec.plain_rows(memoryview(batch), SEED, "t", 0, 7) is None
