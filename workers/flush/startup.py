"""Flusher startup: reads what an earlier run left in memory, and ends recovery when it is drained.

Owner: the flusher.

Invariants:
- No watermark is published as final before everything in rings and journal is in segments and
  synced.
- The journal is reset only when every log with batches in it is open.

Crash: nothing was published, so a successor repeats all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shm.crash_points import crash_point
from shm.memory.layout import Verdict
from shm.tables.partition_table import PartitionTable
from workers.flush.commit.group_commit import GroupCommit
from workers.flush.commit.ring_follower import RingFollower, translator
from workers.log.files.journal import Journal
from workers.log.log_set import LogSet
from workers.segment.files import Files, is_shortage

logger = logging.getLogger(__name__)


def note_rings(
    logs: LogSet,
    followers: Sequence[RingFollower],
    table: PartitionTable,
    old_tables: Sequence[PartitionTable],
) -> None:
    """Record the batches in rings, and the watermarks in tables of an earlier run. Recovery uses
    them to tell a torn tail from corruption.
    """
    found: dict[tuple[bytes, int], set[int]] = {}
    for follower in followers:
        translate = follower.translate or translator(table)
        for number in range(follower.cursor, follower.ring.producer_position.load()):
            descriptor = follower.ring.descriptor(number)
            if descriptor.has_bytes and not descriptor.is_control:
                found.setdefault(translate(descriptor.slot), set()).add(descriptor.base_offset)
    logs.in_rings = {key: frozenset(offsets) for key, offsets in found.items()}
    for shown in [table, *old_tables]:
        for state in shown.all():
            key = (state.topic_id, state.partition)
            logs.watermarks[key] = max(logs.watermarks.get(key, 0), state.high_watermark)


def end_recovery(
    files: Files,
    data_dir: str,
    drained: Sequence[RingFollower],
    logs: LogSet,
    commit: GroupCommit,
    journal: Journal,
) -> bool:
    """End recovery after the rings of an earlier run are drained: sync everything, begin new
    epochs, reset the journal.

    Return False if the host is short of a resource. The caller then calls again.
    """
    for follower in drained:
        if follower.replay_below:
            logger.info(
                "ring_drained descriptors=%d of_deleted_topics=%d of_failed_logs=%d",
                follower.replay_below, follower.given_up[Verdict.DELETED],
                follower.given_up[Verdict.FAILED],
            )  # fmt: skip
    crash_point("recovery.after_journal")
    commit.sync_all(logs.all())
    try:
        if logs.is_draining:
            logs.begin_epochs()
        files.sync_directory(data_dir)  # a predecessor may have been killed before it did
    except OSError as error:
        if is_shortage(error):
            return False
        for log in logs.all():
            logs.take_offline(log, error)
    if logs.forget_recovered():
        try:
            journal.reset()
        except OSError as error:
            logger.error("journal_not_reset error=%r", str(error))
    else:
        commit.leave_journal()
    crash_point("recovery.before_ready")
    return True
