"""Producer snapshots: rebuilds a partition's producer state from snapshot, checkpoint and batch
headers.

Owner: the flusher writes `.producers` files. A worker reads them beside a running flusher.

Invariants:
- Snapshot and headers up to an offset give the table that the worker had when it appended there.
- The snapshot of a segment is durable before the segment has its name. Without a snapshot there
  were no producers. A checkpoint may be damaged, and the earlier segments removed.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable

from shm.messages.lane_messages import Assignment
from tailrace.format.directory import checked_json
from tailrace.format.directory.partition_metadata import PARTITION_FILE, PartitionMetadata
from tailrace.format.record_batch.batch_header import BatchHeader
from tailrace.format.segments.segment import (
    PRODUCERS_SUFFIX,
    Walk,
    file_name,
    schema_message_length,
    segment_bases,
)
from workers.log.producers import delay_rules
from workers.log.producers.open_transactions import OpenTransaction, OpenTransactions
from workers.log.producers.producer_state import ProducerTable
from workers.log.producers.transaction_rules import EndedTransaction, note_header
from workers.segment.checkpoint import Checkpoint, load_checkpoint
from workers.segment.files import Files, read_whole, write_durably
from workers.segment.segment_reader import SegmentReader, walk_past_damage

logger = logging.getLogger(__name__)
TRIES_MAX = 5


def encode_producers(table: ProducerTable, transactions: OpenTransactions | None = None) -> bytes:
    """Return the content of a `.producers` file. `transactions`: see `to_snapshot`."""
    return checked_json.encode(table.to_snapshot(transactions))


def decode_producers(data: bytes) -> ProducerTable | None:
    """Return the table of a `.producers` file, or None if it is not intact."""
    snapshot = checked_json.decode(data)
    try:
        return ProducerTable.from_snapshot(snapshot) if isinstance(snapshot, list) else None
    except (TypeError, ValueError, IndexError):  # intact, but another kind of file
        return None


def write_snapshot(
    files: Files,
    directory: str,
    segment_base: int,
    table: ProducerTable,
    ended: Iterable[EndedTransaction] = (),
) -> None:
    """Write the snapshot at the beginning of a segment, durably. Raises OSError.

    `table` may know batches of the segment already, which then are recorded anew without effect.
    Its transactions are put back to the segment's beginning: `ended` has those that ended since,
    whose batches would otherwise seem to begin in this segment.
    """
    name = file_name(segment_base, PRODUCERS_SUFFIX)
    was_open = table.transactions.as_of(
        segment_base,
        (
            (each.producer_id, OpenTransaction(each.epoch, each.first_offset))
            for each in ended
            if each.marker_offset >= segment_base
        ),
    )
    # one that is there may be of a segment that was never completed, and know refused batches
    if len(table) or len(was_open) or files.exists(f"{directory}/{name}"):
        write_durably(files, directory, name, encode_producers(table, was_open))


def load_snapshot(files: Files, directory: str, segment_base: int) -> ProducerTable:
    """Load the snapshot at the beginning of a segment.

    A damaged one gives an empty table and a warning.
    """
    path = f"{directory}/{file_name(segment_base, PRODUCERS_SUFFIX)}"
    if not files.exists(path):
        return ProducerTable()
    table = decode_producers(read_whole(files, path))
    if table is None:
        logger.warning(
            "producer_snapshot_damaged path=%s advice=%r",
            path,
            "none needed: producers whose batches it held take a new epoch",
        )
        return ProducerTable()
    return table


def record_producer(table: ProducerTable, header: BatchHeader) -> EndedTransaction | None:
    """Record the producer, transaction or delay positions of a batch in the log. Returns the
    transaction that it ends.
    """
    if header.attributes & delay_rules.SPECIAL_ATTRIBUTES:
        delay_rules.note_header(table, header)
    ended = note_header(table, header) if header.is_transactional else None
    # markers, and changes of delayed records by a transaction, have no sequence
    if header.producer_id >= 0 and header.base_sequence >= 0:
        table.record(
            header.producer_id, header.producer_epoch, header.base_sequence,
            header.last_offset_delta, header.base_offset,
            header.next_offset, header.append_time_us,
        )  # fmt: skip
    return ended


def load_producers(
    files: Files,
    data_dir: str,
    assignment: Assignment,
    end_offset: int,
    moved: Callable[[int], int],
) -> ProducerTable:
    """Load a partition's producers up to `end_offset`: the checkpoint's, then the headers after it.
    Raises OSError.

    `moved`: see `ProducerTable`. Return an empty table if the files are not this topic's. For a
    worker that starts beside a running flusher: what has changed meanwhile is read again.
    """
    for _ in range(TRIES_MAX):
        table = _load_once(files, data_dir, assignment, end_offset, moved)
        if table is not None:
            return table
    raise OSError(
        errno.EAGAIN,
        f"{data_dir}/{assignment.directory_name}: segments are replaced faster than read",
    )


def _load_once(
    files: Files,
    data_dir: str,
    assignment: Assignment,
    end_offset: int,
    moved: Callable[[int], int],
) -> ProducerTable | None:
    """One try of `load_producers`. None if segments that it read may have been replaced: a swap
    takes segments below the newest checkpoint's alone, so none happened while that is the same.
    Raises OSError.
    """
    directory = f"{data_dir}/{assignment.directory_name}"
    path = f"{directory}/{PARTITION_FILE}"
    partition_file = (
        PartitionMetadata.decode(read_whole(files, path)) if files.exists(path) else None
    )
    if partition_file is None or partition_file.topic_id != assignment.topic_id:
        return ProducerTable(moved)
    checkpoint, _ = load_checkpoint(files, directory, partition_file.topic_id.hex())
    found, segments = checkpoint, segment_bases(files.list(directory))
    if checkpoint is not None and checkpoint.segment_base not in (-1, *segments):
        checkpoint = None  # its segment was removed, and a later checkpoint could not be written
    if checkpoint is None:
        table = load_snapshot(files, directory, segments[-1]) if segments else ProducerTable()
        start = segments[-1] if segments else 0
        position = 0
    else:
        table = ProducerTable.from_snapshot(checkpoint.producers)
        start = checkpoint.next_offset if checkpoint.segment_base < 0 else checkpoint.segment_base
        position = checkpoint.valid_end
    table.moved = moved
    _walk(
        files,
        directory,
        partition_file,
        checkpoint,
        [b for b in segments if b >= start],
        position,
        end_offset,
        table,
    )
    after, _ = load_checkpoint(files, directory, partition_file.topic_id.hex())
    return table if _place_of(after) == _place_of(found) else None


def _place_of(checkpoint: Checkpoint | None) -> tuple[int, int]:
    """The segment that a checkpoint knows as the active one, or the offset at which one begins."""
    if checkpoint is None:
        return -1, -1
    return checkpoint.segment_base, checkpoint.next_offset if checkpoint.segment_base < 0 else -1


def _walk(
    files: Files,
    directory: str,
    partition_file: PartitionMetadata,
    checkpoint: Checkpoint | None,
    bases: list[int],
    position: int,
    end_offset: int,
    table: ProducerTable,
) -> None:
    """Record the producers of the batches from the checkpoint on."""
    for base in bases:
        fd = files.open_for_read(f"{directory}/{file_name(base)}")
        try:
            reader = SegmentReader(files, fd)
            at_checkpoint = checkpoint is not None and base == checkpoint.segment_base
            walk = (
                Walk(position, checkpoint.next_offset)
                if at_checkpoint and checkpoint is not None
                else Walk(schema_message_length(reader.read_at), base)
            )
            for _, header in walk_past_damage(
                reader, walk, partition_file.seed, base, partition_file.damage
            ):
                if header.next_offset > end_offset:
                    return
                record_producer(table, header)
        finally:
            files.close(fd)
