"""Job orders: a flusher's job for its cleaner, made of the settings of a log and the segments that
were chosen.

Owner: pure.
"""

from __future__ import annotations

import base64
from typing import NamedTuple

from workers.log.partition_log import PartitionLog
from workers.log.retention.compaction_rules import Candidate
from workers.log.retention.wall_clock_jumps import WallJumps
from workers.segment.cleaning_job import CleaningJob, JobSegment

COMPACT = "compact"
"""The cleanup.policy of topics of which nothing expires."""


class CleaningSettings(NamedTuple):
    """Settings of the appliance."""

    check_ms: int = 15_000
    dedupe_bytes: int = 128 << 20
    bytes_per_second: int = 0


def job_of(
    number: int,
    log: PartitionLog,
    cut: list[list[Candidate]],
    jumps: WallJumps,
    appliance: CleaningSettings,
    *,
    keep_free_bytes: int,
    is_merge: bool,
    made_us: int,
    made_ns: int,
) -> CleaningJob:
    """The job with this number. `cut`: the segments, in runs that become one segment each.
    `made_us`, `made_ns`: both clocks at one time.
    """
    assignment, settings = log.assignment, log.assignment.settings
    return CleaningJob(
        number=number, directory=log.directory, topic=assignment.topic,
        topic_id=assignment.topic_id.hex(), partition=assignment.partition,
        schemas={
            str(number): base64.b64encode(message).decode("ascii")
            for number, message in log.file.schemas.items()
        },
        schema_id=assignment.schema_id, typed=assignment.typed,
        key_column=settings["key.column"] if assignment.typed else "key",
        compression=settings["compression.type"],
        max_message_bytes=int(settings["max.message.bytes"]),
        delete_retention_ms=int(settings["delete.retention.ms"]),
        runs=[
            [
                JobSegment(
                    each.base, each.end, each.size, each.is_cleaned,
                    log.transaction_indexes.has(each.base), each.schema_id,
                )
                for each in run
            ]
            for run in cut
        ],
        jumps=jumps.all(),
        dedupe_bytes=appliance.dedupe_bytes,
        bytes_per_second=appliance.bytes_per_second,
        keep_free_bytes=keep_free_bytes,
        is_merge=is_merge,
        made_us=made_us,
        made_ns=made_ns,
        # Segments that expire keep the portions in which retention removes them.
        united_bytes=int(settings["segment.bytes"]) if settings["cleanup.policy"] == COMPACT else 0,
    )  # fmt: skip
