"""The transaction index: golden bytes, every flipped bit found."""

from __future__ import annotations

import pytest

from tailrace.format.segments.transaction_index import (
    AbortedBatches,
    AbortedTransaction,
    TransactionIndexDamagedError,
    decode_transaction_index,
    encode_entry,
    encode_header,
)
from tests.kit.matrices import case

ENTRIES = [
    AbortedTransaction((1 << 62) + 5, 3, 10, 20),
    AbortedTransaction(1 << 62, 32_767, 12, 30),
]
DATA = encode_header(7) + b"".join(map(encode_entry, ENTRIES))
GOLDEN = (
    "5452545801000000070000000000000005000000000000400a000000000000001400000000000000"
    "03000000b54841f500000000000000400c000000000000001e00000000000000ff7f0000bc71d0db"
)


def test_the_bytes_are_the_golden_ones() -> None:
    assert DATA.hex() == GOLDEN


def test_entries_are_read_back() -> None:
    assert decode_transaction_index(DATA, 7) == ENTRIES


def test_a_flipped_bit_is_found() -> None:
    for at in range(len(DATA)):
        damaged = bytearray(DATA)
        damaged[at] ^= 4
        with case(at), pytest.raises(TransactionIndexDamagedError):
            decode_transaction_index(damaged, 7)


@pytest.mark.parametrize("length", [0, 15, 17, len(DATA) - 1])
def test_a_cut_index_is_found(length: int) -> None:
    with pytest.raises(TransactionIndexDamagedError):
        decode_transaction_index(DATA[:length], 7)


def test_another_segments_index_is_refused() -> None:
    with pytest.raises(TransactionIndexDamagedError, match="segment 8"):
        decode_transaction_index(DATA, 8)


def test_only_batches_of_the_epoch_before_its_marker_are_aborted() -> None:
    aborted = AbortedBatches(ENTRIES)
    assert aborted.has((1 << 62) + 5, 3, 10)
    assert aborted.has((1 << 62) + 5, 3, 19)
    assert not aborted.has((1 << 62) + 5, 3, 20)
    assert not aborted.has((1 << 62) + 5, 3, 9)
    assert not aborted.has((1 << 62) + 5, 4, 12)
    assert not aborted.has((1 << 62) + 6, 3, 12)
