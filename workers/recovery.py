"""What a partition's files say after any kind of stop, and what is done about it: one pure table, then the hands that carry it out.

Owner: the flusher, before workers and fronts open.
Invariants: an intact batch is never removed; what is removed is counted and reported; nothing is skipped silently.

The table (`decide`), for the last segment of a partition, walked from its start:

    ending   intact batch behind it that knew this offset as durable?   then
    SEALED   -                                                         the next batch begins a new segment
    CLEAN    -                                                         append behind the last batch
    TORN     no                                                        cut the file behind the last intact batch, report the bytes
    TORN     yes                                                       corruption: writes are refused, reads go on up to it, report the
        range
"""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass, field
from enum import Enum

import orjson

from tailrace import segment_index as index_format
from tailrace.batch_header import BatchHeader
from tailrace.segment import (
    INDEX_SUFFIX,
    PRODUCERS_SUFFIX,
    Ending,
    ReadAt,
    Walk,
    file_name,
    find_intact_behind,
    schema_message_length,
    segment_bases,
    walk_batches,
)
from tailrace.segment_index import IndexEntry
from workers.files import Files
from workers.producer_state import ProducerTable

logger = logging.getLogger(__name__)


class Action(Enum):
    BEGIN_NEW_SEGMENT = 1
    APPEND = 2
    CUT = 3
    REFUSE_WRITES = 4


def decide(ending: Ending, durable_behind: bool) -> Action:
    """The table above."""
    if ending is Ending.SEALED:
        return Action.BEGIN_NEW_SEGMENT
    if ending is Ending.CLEAN:
        return Action.APPEND
    return Action.REFUSE_WRITES if durable_behind else Action.CUT


@dataclass(slots=True)
class RecoveredLog:
    """What recovery found and left."""

    segments: list[int]
    next_offset: int = 0
    valid_end: int = 0
    """Bytes of the last segment, when it goes on being written; 0 when a new one begins."""
    action: Action = Action.BEGIN_NEW_SEGMENT
    max_timestamp_us: int = 0
    first_append_us: int = 0
    size_bytes: int = 0
    cut_bytes: int = 0
    reason: str = ""
    index: list[IndexEntry] = field(default_factory=list)
    producers: ProducerTable = field(default_factory=ProducerTable)


def encode_producers(table: ProducerTable) -> bytes:
    """A `.producers` file: checksum in hexadecimal, newline, JSON."""
    body = orjson.dumps(table.to_snapshot())
    return b"%08x\n%s" % (zlib.crc32(body), body)


def decode_producers(data: bytes) -> ProducerTable | None:
    """None when these bytes are not a whole snapshot."""
    head, _, body = data.partition(b"\n")
    if len(head) != 8 or head != b"%08x" % zlib.crc32(body):
        return None
    return ProducerTable.from_snapshot(orjson.loads(body))


def _read_whole(files: Files, path: str) -> bytes:
    fd = files.open_for_read(path)
    try:
        return files.read_at(fd, files.size(fd), 0)
    finally:
        files.close(fd)


def load_producers(files: Files, directory: str, segment_base: int) -> ProducerTable:
    """The snapshot that the segment began with; empty, with a warning, when it is damaged."""
    path = f"{directory}/{file_name(segment_base, PRODUCERS_SUFFIX)}"
    if not files.exists(path):
        return ProducerTable()
    table = decode_producers(_read_whole(files, path))
    if table is None:
        logger.warning("producer_snapshot_damaged path=%s", path)
        return ProducerTable()
    return table


def load_live_producers(files: Files, directory: str, seed: int, end_offset: int) -> ProducerTable:
    """What the live segment says of producers, up to `end_offset`: its snapshot and the headers behind it. For a worker that starts
    beside a running flusher.
    """
    segments = segment_bases(files.list(directory)) if files.exists(directory) else []
    if not segments:
        return ProducerTable()
    base = segments[-1]
    table = load_producers(files, directory, base)
    fd = files.open_for_read(f"{directory}/{file_name(base)}")
    try:

        def read_at(length: int, position: int) -> bytes:
            return files.read_at(fd, length, position)

        walk = Walk(schema_message_length(read_at), base)
        for _, header in walk_batches(read_at, files.size(fd), walk, seed):
            if header.next_offset > end_offset:
                break
            _record(table, header)
    finally:
        files.close(fd)
    return table


def _record(table: ProducerTable, header: BatchHeader) -> None:
    if header.producer_id >= 0:
        table.record(
            header.producer_id, header.producer_epoch, header.base_sequence, header.last_offset_delta, header.base_offset,
            header.next_offset, header.append_time_us,
        )  # fmt: skip


def recover_log(files: Files, directory: str, seed: int) -> RecoveredLog:
    """Walk the last segment of `directory` and put right what the table says. Raises OSError."""
    segments = segment_bases(files.list(directory))
    result = RecoveredLog(segments)
    for base in segments[:-1]:
        result.size_bytes += _size_of(files, f"{directory}/{file_name(base)}")
    if not segments:
        return result
    base = segments[-1]
    path = f"{directory}/{file_name(base)}"
    result.producers = load_producers(files, directory, base)
    fd = files.open_for_write(path)
    try:
        size = files.size(fd)

        def read_at(length: int, position: int) -> bytes:
            return files.read_at(fd, length, position)

        start = schema_message_length(read_at)
        if not start or start > size:
            _discard_headless(files, directory, base, size, result)
            return result if len(segments) == 1 else _with_sealed_end(files, directory, seed, result)
        walk = _walk(read_at, size, start, base, seed, result)
        durable_behind = walk.ending is Ending.TORN and (
            find_intact_behind(read_at, size, walk.position, seed, walk.next_offset) is not None
        )
        result.action = decide(walk.ending, durable_behind)
        if result.action is Action.CUT:
            result.cut_bytes = size - walk.position
            logger.warning("torn_tail_cut path=%s bytes=%d reason=%r", path, result.cut_bytes, walk.reason)
            files.truncate(fd, walk.position)
        elif result.action is Action.REFUSE_WRITES:
            result.reason = f"corrupt from offset {walk.next_offset} in {path}: {walk.reason}"
            logger.error("corruption path=%s offset=%d position=%d reason=%r", path, walk.next_offset, walk.position, walk.reason)
        result.valid_end = walk.position
        files.sync_data(fd)
    finally:
        files.close(fd)
    result.size_bytes += result.valid_end
    _repair_index(files, directory, base, result)
    return result


def _walk(read_at: ReadAt, size: int, start: int, base: int, seed: int, result: RecoveredLog) -> Walk:
    walk = Walk(start, base)
    largest = 0
    for position, header in walk_batches(read_at, size, walk, seed):
        largest = max(largest, header.max_timestamp_us)
        if not result.index:
            result.first_append_us = header.append_time_us
        result.index.append(IndexEntry(header.base_offset, position, largest))
        _record(result.producers, header)
    result.next_offset = walk.next_offset
    result.max_timestamp_us = largest
    return walk


def _discard_headless(files: Files, directory: str, base: int, size: int, result: RecoveredLog) -> None:
    """A segment killed before its schema was written holds no batch: it goes."""
    logger.warning("segment_without_schema_removed path=%s/%s bytes=%d", directory, file_name(base), size)
    for suffix in (".arrow", INDEX_SUFFIX):
        path = f"{directory}/{file_name(base, suffix)}"
        if files.exists(path):
            files.unlink(path)
    result.segments.remove(base)
    result.cut_bytes += size
    result.next_offset = base
    result.action = Action.BEGIN_NEW_SEGMENT


def _with_sealed_end(files: Files, directory: str, seed: int, result: RecoveredLog) -> RecoveredLog:
    """The newest segment was discarded: the log ends where the one before ends."""
    again = recover_log(files, directory, seed)
    again.cut_bytes += result.cut_bytes
    return again


def _repair_index(files: Files, directory: str, base: int, result: RecoveredLog) -> None:
    path = f"{directory}/{file_name(base, INDEX_SUFFIX)}"
    wanted = index_format.encode_header(base) + index_format.encode_entries(result.index)
    if files.exists(path) and _read_whole(files, path) == wanted:
        return
    logger.info("index_rebuilt path=%s entries=%d", path, len(result.index))
    fd = files.open_for_write(path)
    try:
        files.truncate(fd, 0)
        files.write_at(fd, [wanted], 0)
    finally:
        files.close(fd)


def _size_of(files: Files, path: str) -> int:
    fd = files.open_for_read(path)
    try:
        return files.size(fd)
    finally:
        files.close(fd)
