"""A log that a kill has left in the middle of a swap."""

from __future__ import annotations

from pathlib import Path

from tailrace.format.directory import checked_json
from tailrace.format.directory.data_dir import SWAP_FILE
from tailrace.format.record_batch.batch_header import END_OF_STREAM
from tailrace.format.segments.segment import INDEX_SUFFIX
from tests.kit.log_files.transaction_logs import TransactionLog


def log_of(directory: Path, segment_count: int) -> TransactionLog:
    """A log of segments with one batch of two records each."""
    log = TransactionLog(directory)
    for number in range(segment_count):
        if number:
            log.roll()
        log.append(2)
    return log


def half_swapped_log(directory: Path, batches: list[int]) -> TransactionLog:
    """A log of five segments of two records. The cleaned one of the third and fourth, with batches
    of so many records, has taken its place, and the kill came before the fourth was removed.
    """
    log, cleaned = log_of(directory / "killed", 5), log_of(directory / "cleaned", 2)
    cleaned.roll()
    for count in batches:
        cleaned.append(count)
    intent = {"format": 1, "base": 4, "end": 8, "replaced": [[4, 1], [6, 1]]}
    (log.directory / SWAP_FILE).write_bytes(checked_json.encode(intent))
    log.path(4).write_bytes(cleaned.path(4).read_bytes() + END_OF_STREAM)
    log.path(4, INDEX_SUFFIX).write_bytes(cleaned.path(4, INDEX_SUFFIX).read_bytes())
    return log
