"""The limit maxBytesPerTrigger: the end of a micro-batch of about this many bytes.

Bytes are those of the log's batches on the disk. If a partition's files are on this host, its batch
headers are read, which costs some microseconds for each batch; else the partition's average
decides.

Invariants: a soft limit, as Delta's. Every partition with new records gives at least one batch of
the log, so that a query never stands still.
"""

from __future__ import annotations

from collections.abc import Mapping

from spark_bridge.stream.topic_view import View
from tailrace.core.errors import TailraceError
from tailrace.core.log import logger
from tailrace.core.topic_partition import TopicPartition
from tailrace.scanning.sources.data_dirs import opens_here
from tailrace.scanning.sources.local_source import LocalSource, read_partition_file


def limited_by_bytes(
    begins: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
    bytes_max: int,
    view: View,
    data_dirs: list[str],
) -> dict[TopicPartition, int]:
    """Ends of a batch of about `bytes_max` bytes: each partition's share is in proportion to what
    it has left.
    """
    sizes = {
        key: max(0, end - begins[key]) * view.extents[key].bytes_per_offset
        for key, end in ends.items()
    }
    total = sum(sizes.values())
    if total <= bytes_max:
        return dict(ends)
    result = dict(ends)
    for key, size in sizes.items():
        if ends[key] > begins[key]:
            result[key] = _end(
                key, begins[key], ends[key], bytes_max * size / total, view, data_dirs
            )
    return result


def _end(
    key: TopicPartition, begin: int, end: int, share_bytes: float, view: View, data_dirs: list[str]
) -> int:
    try:
        found = _counted(key, begin, end, share_bytes, view, data_dirs)
    except TailraceError as error:  # the batch that reads it reports damage or loss
        logger.info(
            "stream_bytes_not_counted partition=%s-%d reason=%r",
            key.topic,
            key.partition,
            error.detail,
        )
        found = None
    if found is not None:
        return found
    return min(end, begin + max(1, int(share_bytes / max(1.0, view.extents[key].bytes_per_offset))))


def _counted(
    key: TopicPartition, begin: int, end: int, share_bytes: float, view: View, data_dirs: list[str]
) -> int | None:
    """End offset counted by the partition's files; None if they are not on this host."""
    info = view.infos[key.topic]
    for data_dir in data_dirs:
        directory = f"{data_dir}/{key.topic}-{key.partition}"
        known = read_partition_file(directory) if opens_here(directory, info.topic_id) else None
        if known is None:
            continue
        taken, position = 0, begin
        for frame in LocalSource(directory, known, headers_only=True, schema=info.schema).frames(
            begin, end
        ):
            if position > begin and taken + frame.header.batch_length > share_bytes:
                return min(position, end)
            taken, position = taken + frame.header.batch_length, frame.header.next_offset
        return end  # also where no record is left, as after an abort
    return None
