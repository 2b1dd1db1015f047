"""Transactions in local segment files: which batches a scan leaves out, and where it ends.

While an appliance runs, its answer bounds a scan (the last stable offset), and the segments'
transaction indexes name the aborted transactions below. In a stopped appliance's directory the
indexes may lack what was decided last. There the headers are read: a transaction without a marker
is open, and a scan ends before the oldest one.

Owner: one reader. Files are only read.

Invariants:
- A batch of a transaction is returned only if it is known not to be aborted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tailrace.core.errors import CorruptBatchError, StorageError
from tailrace.format.record_batch.batch_header import CONTROL_ABORT, BatchHeader
from tailrace.format.segments.segment import file_name
from tailrace.format.segments.transaction_index import (
    ENTRY,
    HEADER,
    TRANSACTION_INDEX_SUFFIX,
    AbortedBatches,
    AbortedTransaction,
    TransactionIndexDamagedError,
    decode_transaction_index,
)


class Decided(NamedTuple):
    """The transactions of a stopped appliance's partition."""

    last_stable_offset: int
    aborted: tuple[AbortedTransaction, ...]


def read_aborted(directory: str, base: int) -> AbortedBatches:
    """The aborted batches of a segment, from its transaction index.

    Raises StorageError if it is missing or damaged.
    """
    path = f"{directory}/{file_name(base, TRANSACTION_INDEX_SUFFIX)}"
    try:
        with open(path, "rb") as file:
            return AbortedBatches(decode_transaction_index(_whole(file.read()), base))
    except (OSError, TransactionIndexDamagedError) as error:
        raise StorageError(
            f"{path} cannot be read, so that nothing says which transactions of this segment were "
            f"aborted ({error}); the appliance writes it again at its next start"
        ) from error


def _whole(data: bytes) -> bytes:
    """The index without an entry that is being written: what it is about lies behind the scan."""
    return data[: len(data) - max(0, len(data) - HEADER.size) % ENTRY.size]


def has_transactions(directory: str) -> bool:
    """True if a segment of the partition has a transaction index. Raises OSError."""
    return any(name.endswith(TRANSACTION_INDEX_SUFFIX) for name in os.listdir(directory))


def decided(headers: Callable[[int, int], Iterator[BatchHeader]], start: int, end: int) -> Decided:
    """Read the transactions between two offsets from the batches' headers.

    `headers` yields those of a range. Damaged batches count as not there: a transaction whose
    marker is lost stays open.
    """
    first_offsets: dict[tuple[int, int], int] = {}
    aborted: list[AbortedTransaction] = []
    for header in _readable(headers, start, end):
        if not header.is_transactional:
            continue
        key = header.producer_id, header.producer_epoch
        if not header.is_marker:
            first_offsets.setdefault(key, header.base_offset)
        elif (first := first_offsets.pop(key, None)) is not None and (
            header.control_type == CONTROL_ABORT
        ):
            aborted.append(AbortedTransaction(*key, first, header.base_offset))
    return Decided(min([end, *first_offsets.values()]), tuple(aborted))


def _readable(
    headers: Callable[[int, int], Iterable[BatchHeader]], start: int, end: int
) -> Iterator[BatchHeader]:
    offset = start
    while offset < end:
        try:
            for header in headers(offset, end):
                offset = header.next_offset
                yield header
            return
        except CorruptBatchError as error:
            offset = max(error.next_offset or end, offset + 1)
