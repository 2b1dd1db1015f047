"""Outcomes of jobs: their lines in the log; a segment that cannot be read is noted.

Owner: `workers.flush.compaction`.
"""

from __future__ import annotations

import logging

from workers.flush.cleaning.watched_log import WatchedLog
from workers.segment.cleaning_job import CleaningReport

logger = logging.getLogger(__name__)


def note_unreadable(known: WatchedLog, report: CleaningReport) -> None:
    """Stop compaction at a segment that cannot be read; merging goes on without it."""
    assignment = known.log.assignment
    base = max(report.stopped_base, min(known.log.sealed, default=0))
    if known.is_compacted:
        known.stopped_base = base
        logger.error(
            "cleaning_stopped topic=%s partition=%d base=%d reason=%r",
            assignment.topic, assignment.partition, base, report.reason,
        )  # fmt: skip
    else:
        known.heads.note_unmergeable(base)
        logger.error(
            "segment_not_merged topic=%s partition=%d base=%d reason=%r",
            assignment.topic, assignment.partition, base, report.reason,
        )  # fmt: skip


def note_damage(known: WatchedLog) -> None:
    """Log once that compaction ends at damage that a start has found: no job meets it."""
    if known.noted_base == known.damaged_base:
        return
    known.noted_base = known.damaged_base
    if known.damaged_base >= 0:
        assignment = known.log.assignment
        logger.error(
            "cleaning_stopped topic=%s partition=%d base=%d reason=%r",
            assignment.topic, assignment.partition, known.damaged_base,
            "the segment has damage that a start has found",
        )  # fmt: skip


def log_done(known: WatchedLog, report: CleaningReport) -> None:
    """Log what a job has done."""
    assignment = known.log.assignment
    if known.is_compacted:
        logger.info(
            "cleaned topic=%s partition=%d bytes_in=%d bytes_out=%d records_in=%d "
            "records_out=%d segments=%d",
            assignment.topic, assignment.partition, report.bytes_in, report.bytes_out,
            report.records_in, report.records_out, len(report.runs),
        )  # fmt: skip
    else:
        logger.info(
            "merged topic=%s partition=%d bytes_in=%d bytes_out=%d records=%d segments=%d",
            assignment.topic, assignment.partition, report.bytes_in, report.bytes_out,
            report.records_in, len(report.runs),
        )  # fmt: skip
