"""Split of an active segment on a full disk: what is kept is copied to a new segment, so that the
rest can be removed (docs/adr/0029-sealing-without-an-append.md).

Owner: the flusher.

Crash: a split is a rewrite (see `partition_log`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from shm.runtime.reserve_file import make_room_for
from workers.flush.commit.group_commit import GroupCommit
from workers.log.files.active_segment import ActiveSegment, first_to_keep
from workers.log.partition_log import PartitionLog

logger = logging.getLogger(__name__)

SPLIT_MIN_BYTES = 64 << 10
"""Least space that a split must free."""
SPLIT_KEEPS_MAX_BYTES = 64 << 20
"""Most bytes that a split copies. The disk holds them twice for a moment."""
SPLIT_MARGIN_BYTES = 64 << 10
"""Space for the small files of a split, beside what it copies."""


def split_off(
    log: PartitionLog,
    live: ActiveSegment,
    retention_bytes: int,
    commit: GroupCommit,
    checkpoint: Callable[[PartitionLog], None],
) -> bool:
    """Split the active segment on a full disk. Records from the log start offset on are kept,
    within retention.bytes.
    """
    try:
        if live.synced_end != live.end and not (commit.sync(log) and log.live is live):
            return False
        live.write_index_entries()
        first = first_to_keep(log.files, live, log.log_start_offset, retention_bytes)
        gone_bytes = 0 if first is None else first.file_position
        if (
            first is None
            or gone_bytes < SPLIT_MIN_BYTES
            or live.end - gone_bytes > SPLIT_KEEPS_MAX_BYTES
        ):
            return False
        copied_bytes = live.end - gone_bytes + SPLIT_MARGIN_BYTES
        make_room_for(log.files, os.path.dirname(log.directory), copied_bytes)
        if not log.split(first):
            return False
        checkpoint(log)
    except OSError as error:
        logger.warning(
            "segment_not_split directory=%s base=%d error=%r advice='what stays has no room: "
            "free space, or delete all of the records (delete-records, retention.bytes=0)'",
            log.directory, live.base, str(error),
        )  # fmt: skip
        return False
    logger.info(
        "segment_split topic=%s partition=%d base=%d next_base=%d bytes=%d",
        log.assignment.topic, log.assignment.partition, live.base, log.newest_base, gone_bytes,
    )  # fmt: skip
    return True
