"""Index scrubber: checks the indexes of segments that an earlier run left, transaction indexes too,
and rebuilds wrong ones.

The log is authoritative and an index can be rebuilt, so a start does not wait for this.
`workers.flush.cleaning.chores` calls it when idle.

Owner: the flusher.

Invariants:
- Each segment is checked once after a start (`SealedSegments.unscrubbed`).
- No batch and no offset changes.

Crash: a partly built index is checked again after the next start.
"""

from __future__ import annotations

from tailrace.format.segments import segment_index
from tailrace.format.segments.segment import INDEX_SUFFIX, file_name
from workers.log.partition_log import PartitionLog
from workers.segment.files import read_whole
from workers.segment.segment_index_files import index_is_right, rebuild_index


def scrub_one_index(log: PartitionLog) -> None:
    """Check one index, and rebuild it if needed.

    Not allowed while a group is placed. Raises OSError.
    """
    files, directory = log.files, log.directory
    base, live = log.sealed.unscrubbed.pop(), log.live
    _scrub_transaction_index(log, base)
    if live is not None and live.base == base:
        if not index_is_right(files, directory, base, live.batch_count):
            live.batch_count, _ = rebuild_index(files, directory, log.file, base, live.end)
        return
    segment = log.sealed.get(base)
    if segment is None or index_is_right(files, directory, base, segment.batch_count):
        return
    count, _ = rebuild_index(files, directory, log.file, base)
    entries = (
        segment_index.decode(
            read_whole(files, f"{directory}/{file_name(base, INDEX_SUFFIX)}"), base
        )
        or []
    )
    if entries:
        log.max_timestamp_us = max(log.max_timestamp_us, entries[-1].max_timestamp_us)
        log.sealed[base] = segment._replace(
            batch_count=count, max_timestamp_us=entries[-1].max_timestamp_us
        )


def _scrub_transaction_index(log: PartitionLog, base: int) -> None:
    """Check the transaction index of a segment, and make it again where it is missing or damaged.
    A segment of which is not known if it has transactions is read for it.
    """
    indexes, segment = log.transaction_indexes, log.sealed.get(base)
    expected = segment.has_transactions if segment is not None else 0
    if (expected and not indexes.has(base)) or not indexes.is_right(base):
        log.rebuild_transaction_index(base)
