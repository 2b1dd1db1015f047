"""What a flusher does once, before it is ready: it looks at what an earlier run left in memory, and ends recovery when that is drained.

Owner: the flusher.
Invariants: no watermark is published as final before everything that rings and journal held is in segments and synced; the journal is reset only when every log
    that it has batches of is open.
Crash: nothing was published, so a successor does all of it again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shm.crash_points import crash_point
from shm.layout import Verdict
from shm.partition_table import PartitionTable
from workers.files import Files, is_shortage
from workers.group_commit import GroupCommit
from workers.journal import Journal
from workers.log_set import LogSet
from workers.stage import Stage, translator

logger = logging.getLogger(__name__)


def note_rings(logs: LogSet, stages: Sequence[Stage], table: PartitionTable, old_tables: Sequence[PartitionTable]) -> None:
    """What rings hold, and what tables of an earlier run showed: recovery tells a torn tail from corruption by it."""
    found: dict[tuple[bytes, int], set[int]] = {}
    for stage in stages:
        translate = stage.translate or translator(table)
        for number in range(stage.cursor, stage.ring.head.load()):
            descriptor = stage.ring.descriptor(number)
            if descriptor.has_bytes and not descriptor.is_control:
                found.setdefault(translate(descriptor.slot), set()).add(descriptor.base_offset)
    logs.in_rings = {key: frozenset(offsets) for key, offsets in found.items()}
    for shown in [table, *old_tables]:
        for state in shown.all():
            key = (state.topic_id, state.partition)
            logs.watermarks[key] = max(logs.watermarks.get(key, 0), state.high_watermark)


def end_recovery(files: Files, data_dir: str, drained: Sequence[Stage], logs: LogSet, commit: GroupCommit, journal: Journal) -> bool:
    """The rings of an earlier run are drained: sync everything, begin the new epochs, forget the journal. False: the host is short of something; call again."""
    for stage in drained:
        if stage.replay_below:
            logger.info(
                "ring_drained descriptors=%d of_deleted_topics=%d of_failed_logs=%d", stage.replay_below, stage.given_up[Verdict.DELETED],
                stage.given_up[Verdict.FAILED],
            )  # fmt: skip
    crash_point("recovery.after_journal")
    commit.sync_all(logs.all())
    try:
        if logs.is_draining:
            logs.begin_epochs()
        files.sync_directory(data_dir)  # a predecessor may have been killed before it was
    except OSError as error:
        if is_shortage(error):
            return False
        for log in logs.all():
            logs.take_offline(log, error)
    if logs.forget_what_was_found():
        try:
            journal.reset()
        except OSError as error:
            logger.error("journal_not_reset error=%r", str(error))
    else:
        commit.leave_journal()
    crash_point("recovery.before_ready")
    return True
