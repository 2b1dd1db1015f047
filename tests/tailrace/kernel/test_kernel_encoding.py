"""A producer's batch in bytes: the compiled functions against their reference, and what both make
against the header's own check.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace import kernel
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS, verify_batch
from tailrace.kernel import reference, reference_codec

compiled_only = pytest.mark.skipif(
    kernel.compiled_file() is None, reason="no kernel is compiled here (make kernel)"
)
CELL = st.none() | st.binary(max_size=20)
HEADERS = st.none() | st.lists(st.tuples(st.text("abc", max_size=4), CELL), max_size=3)
RECORDS = st.lists(st.tuples(CELL, CELL, st.integers(0, 2**62), HEADERS), min_size=1, max_size=40)
U32 = st.integers(0, 2**32 - 1)
IDENTITY = st.tuples(
    st.integers(0, 2**63 - 1), st.integers(0, 2**15 - 1), st.integers(0, 2**31 - 1)
)


@compiled_only
@given(RECORDS, U32, U32, IDENTITY)
def test_batches_are_encoded_and_numbered_as_the_reference_does(
    records: list[tuple[bytes | None, bytes | None, int, list[tuple[str, bytes | None]] | None]],
    schema_id: int,
    seed: int,
    identity: tuple[int, int, int],
) -> None:
    native = kernel.load_compiled()
    assert native is not None
    rows, expected_rows = native.RecordBuffer(), reference.RecordBuffer()
    for record in records:
        rows.add(*record)
        expected_rows.add(*record)
    batch, expected = (
        native.encoded_batch(rows, schema_id, seed),
        reference_codec.encoded_batch(expected_rows, schema_id, seed),
    )
    assert batch == expected
    native.stamp_batch(batch, *identity, seed)
    reference_codec.stamp_batch(expected, *identity, seed)
    assert batch == expected
    header = verify_batch(memoryview(batch), seed)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == identity
    assert (header.record_count, header.max_timestamp_us) == (
        len(records),
        max(record[2] for record in records),
    )


@compiled_only
def test_what_is_no_batch_is_not_written_to() -> None:
    native = kernel.load_compiled()
    assert native is not None
    with pytest.raises(ValueError, match="record"):
        native.encoded_batch(native.RecordBuffer(), 1, 1)
    for junk in (
        b"",
        b"\xff" * 7,
        b"\xff" * 300,
        b"\xff" * 4 + b"\x00" * 300,
        b"\xff" * 4 + (400).to_bytes(4, "little") + b"\x00" * 300,
    ):
        batch = bytearray(junk)
        with pytest.raises(ValueError, match="header"):
            native.stamp_batch(batch, 1, 1, 1, 1)
        assert batch == junk
    rows = native.RecordBuffer()
    rows.add(None, b"x", 5)
    batch = native.encoded_batch(rows, 1, 1)
    position = 8 + int.from_bytes(batch[4:8], "little") - 136
    batch[position + 112 : position + 116] = (
        b"\xff" * 4
    )  # an extension that would begin before the batch
    before = bytes(batch)
    with pytest.raises(ValueError, match="header"):
        native.stamp_batch(batch, 1, 1, 1, 1)
    assert batch == before


def test_a_header_with_an_extension_is_sealed_with_it() -> None:
    rows = kernel.RecordBuffer()
    rows.add(b"key", b"value", 5)
    stamped = []
    for stamp in (kernel.stamp_batch, reference_codec.stamp_batch):
        batch = kernel.encoded_batch(rows, 1, 9)
        position = 8 + int.from_bytes(batch[4:8], "little") - 136
        batch[position + 112 : position + 116] = (8).to_bytes(4, "little")
        stamp(batch, 1, 2, 3, 9)
        stamped.append(bytes(batch))
    assert stamped[0] == stamped[1]


def test_the_producers_id_says_if_a_batch_is_of_a_transaction_also_when_it_is_numbered_again() -> (
    None
):
    """The compiled function left attribute and version as they were, so that a worker refused each
    batch of a transaction.
    """
    rows = kernel.RecordBuffer()
    rows.add(b"k", b"v", 5, None)
    for stamp in (kernel.stamp_batch, reference_codec.stamp_batch):
        batch = kernel.encoded_batch(rows, 1, 9)
        for producer_id in (7, TRANSACTIONAL_PRODUCER_IDS + 7, TRANSACTIONAL_PRODUCER_IDS - 1):
            stamp(batch, producer_id, 3, 4, 9)
            header = verify_batch(memoryview(batch), 9)
            assert header.is_transactional == (producer_id >= TRANSACTIONAL_PRODUCER_IDS)
            assert (header.producer_id, header.producer_epoch, header.base_sequence) == (
                producer_id,
                3,
                4,
            )
