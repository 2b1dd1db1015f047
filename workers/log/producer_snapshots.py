"""What files tell of a partition's producers and delays: the snapshot that a segment begins with, the checkpoint, and the headers behind them.

Owner: the flusher writes `.producers` files; a worker reads them beside a running flusher.
Invariants: snapshot and headers up to an offset give the table that the worker had when it appended there.
"""

from __future__ import annotations

import logging

from shm.catalog_messages import Assignment
from tailrace.formats import checked_json
from tailrace.formats.batch_header import BatchHeader
from tailrace.formats.partition_file import PARTITION_FILE, PartitionFile
from tailrace.formats.segment import PRODUCERS_SUFFIX, Walk, file_name, schema_message_length, segment_bases
from workers import delay_gate
from workers.checkpoint import load_checkpoint
from workers.files import Files, read_whole
from workers.producer_state import ProducerTable
from workers.segment_reader import SegmentReader, walk_past_damage

logger = logging.getLogger(__name__)


def encode_producers(table: ProducerTable) -> bytes:
    """A `.producers` file."""
    return checked_json.encode(table.to_snapshot())


def decode_producers(data: bytes) -> ProducerTable | None:
    """None when these bytes are not a whole snapshot."""
    snapshot = checked_json.decode(data)
    try:
        return ProducerTable.from_snapshot(snapshot) if isinstance(snapshot, list) else None
    except (TypeError, ValueError, IndexError):  # whole, but another kind of file
        return None


def load_snapshot(files: Files, directory: str, segment_base: int) -> ProducerTable:
    """The snapshot that the segment began with; empty, with a warning, when it is damaged."""
    path = f"{directory}/{file_name(segment_base, PRODUCERS_SUFFIX)}"
    if not files.exists(path):
        return ProducerTable()
    table = decode_producers(read_whole(files, path))
    if table is None:
        logger.warning(
            "producer_snapshot_damaged path=%s advice=%r", path, "producers whose batches it held take a new epoch by themselves"
        )
        return ProducerTable()
    return table


def record_producer(table: ProducerTable, header: BatchHeader) -> None:
    """Remember what a batch in the log says of its producer, or of delays."""
    if header.attributes & delay_gate.SPECIAL_ATTRIBUTES:
        delay_gate.note_header(table, header)
    if header.producer_id >= 0:
        table.record(
            header.producer_id, header.producer_epoch, header.base_sequence, header.last_offset_delta, header.base_offset,
            header.next_offset, header.append_time_us,
        )  # fmt: skip


def load_producers(files: Files, data_dir: str, assignment: Assignment, end_offset: int) -> ProducerTable:
    """What a partition's files say of its producers, up to `end_offset`: the checkpoint's, and the headers behind it; nothing where the files are not this
    topic's. For a worker that starts beside a running flusher. Raises OSError.
    """
    directory = f"{data_dir}/{assignment.directory_name}"
    path = f"{directory}/{PARTITION_FILE}"
    partition_file = PartitionFile.decode(read_whole(files, path)) if files.exists(path) else None
    if partition_file is None or partition_file.topic_id != assignment.topic_id:
        return ProducerTable()
    checkpoint, _ = load_checkpoint(files, directory, partition_file.topic_id.hex())
    segments = segment_bases(files.list(directory))
    if checkpoint is None:
        table = load_snapshot(files, directory, segments[-1]) if segments else ProducerTable()
        start = segments[-1] if segments else 0
        position = 0
    else:
        table = ProducerTable.from_snapshot(checkpoint.producers)
        start = checkpoint.next_offset if checkpoint.segment_base < 0 else checkpoint.segment_base
        position = checkpoint.valid_end
    for base in [b for b in segments if b >= start]:
        fd = files.open_for_read(f"{directory}/{file_name(base)}")
        try:
            reader = SegmentReader(files, fd)
            at_checkpoint = checkpoint is not None and base == checkpoint.segment_base
            walk = (
                Walk(position, checkpoint.next_offset)
                if at_checkpoint and checkpoint is not None
                else Walk(schema_message_length(reader.read_at), base)
            )
            for _, header in walk_past_damage(reader, walk, partition_file.seed, base, partition_file.damage):
                if header.next_offset > end_offset:
                    return table
                record_producer(table, header)
        finally:
            files.close(fd)
    return table
