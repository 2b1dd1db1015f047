"""Quarantine directory: a report and a copy of the bytes of each damaged range of a log.

It is for operators. `partition.json` is authoritative.

Owner: the flusher.

Invariants: at most COPY_BYTES_MAX bytes of a range are copied.

Crash: a report is complete or missing.
"""

from __future__ import annotations

import logging

import orjson

from tailrace.format.directory.partition_metadata import DamagedRange, PartitionMetadata
from tailrace.format.segments.segment import file_name
from workers.segment.files import Files, write_durably
from workers.segment.segment_reader import SegmentReader

logger = logging.getLogger(__name__)

COPY_BYTES_MAX = 64 << 20
TOPIC_CHARACTERS_MAX = 150
"""Longest topic name used whole in a file name.

A longer one is cut and followed by the topic id.
"""


def report_damage(
    files: Files,
    directory: str,
    partition_file: PartitionMetadata,
    damage: DamagedRange,
    reason: str,
    quarantine: str,
    reader: SegmentReader | None = None,
) -> None:
    """Log a damaged range of the log in `directory`, and write its report to `quarantine` ("": no
    report).

    The bytes are copied too if `reader` is given.
    """
    topic = partition_file.topic
    if len(topic) > TOPIC_CHARACTERS_MAX:
        topic = f"{topic[: TOPIC_CHARACTERS_MAX - 10]}~{partition_file.topic_id.hex()[:8]}"
    name = f"{topic}-{partition_file.partition}-{damage.segment_base:020d}-{damage.position}"
    segment = file_name(damage.segment_base) if damage.segment_base >= 0 else ""
    logger.error(
        "corruption topic=%s partition=%d offsets=%d-%d segment=%s/%s position=%d reason=%r "
        "kept_in=%s/%s",
        partition_file.topic, partition_file.partition, damage.start, damage.end - 1, directory,
        segment, damage.position, reason, quarantine, name,
    )  # fmt: skip
    if not quarantine:
        return
    report = {
        "topic": partition_file.topic, "partition": partition_file.partition,
        "segment": f"{directory}/{file_name(max(0, damage.segment_base))}",
        "position": damage.position, "end_position": damage.end_position,
        "first_offset": damage.start, "last_offset": damage.end - 1, "reason": reason,
    }  # fmt: skip
    try:
        if not files.exists(quarantine):
            files.make_directory(quarantine)
        if reader is not None:
            length = min((damage.end_position or reader.size) - damage.position, COPY_BYTES_MAX)
            write_durably(
                files, quarantine, f"{name}.bytes", reader.read_at(max(0, length), damage.position)
            )
        write_durably(
            files, quarantine, f"{name}.json", orjson.dumps(report, option=orjson.OPT_INDENT_2)
        )
    except OSError as error:
        logger.warning("quarantine_failed name=%s error=%r", name, str(error))
