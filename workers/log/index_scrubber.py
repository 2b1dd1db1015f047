"""Looks at the indexes of segments that an earlier run left, one at a time, and makes again those that are missing, short or wrong.

The log is the truth and an index can be made from it, so a start does not wait for this: housekeeping does it when there is nothing else to do.

Owner: the flusher, as of everything in a partition's directory.
Invariants: each segment is looked at once after a start (`PartitionLog.unscrubbed`); no batch is moved, and no offset.
Crash: an index that is half made is looked at again after the next start.
"""

from __future__ import annotations

from tailrace.formats import segment_index as index_format
from tailrace.formats.segment import INDEX_SUFFIX, file_name
from workers.files import read_whole
from workers.index_files import index_is_right, rebuild_index
from workers.partition_log import PartitionLog


def scrub_one_index(log: PartitionLog) -> None:
    """Look at one index, and make it again if it must be. Not while a group is placed. Raises OSError."""
    files, directory = log.files, log.directory
    base, live = log.unscrubbed.pop(), log.live
    if live is not None and live.base == base:
        if not index_is_right(files, directory, base, live.batch_count):
            live.batch_count, _ = rebuild_index(files, directory, log.file, base, live.end)
        return
    segment = log.sealed.get(base)
    if segment is None or index_is_right(files, directory, base, segment.batch_count):
        return
    count, _ = rebuild_index(files, directory, log.file, base)
    entries = index_format.decode(read_whole(files, f"{directory}/{file_name(base, INDEX_SUFFIX)}"), base) or []
    if entries:
        log.max_timestamp_us = max(log.max_timestamp_us, entries[-1].max_timestamp_us)
        log.sealed[base] = segment._replace(batch_count=count, max_timestamp_us=entries[-1].max_timestamp_us)
