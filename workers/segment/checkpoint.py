"""Checkpoint of a partition: the part of its files known to be right. Recovery reads only the rest.

Owner: the flusher. `checkpoint.0` and `checkpoint.1` are written in turn and in place. The intact
one with the higher number is valid.

Invariants:
- What a checkpoint covers was durable before it was written.
- A checkpoint need not be durable. An older one, or none, only means more to read.

Crash: a half-written one does not match its checksum, and the other one is there.
"""

from __future__ import annotations

import errno
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from shm.crash_points import crash_point
from tailrace.format.directory import checked_json
from workers.segment.files import Files, is_shortage, read_whole

CHECKPOINT_FILES = ("checkpoint.0", "checkpoint.1")
UNKNOWN_TIME_US = 1 << 62
"""Timestamp of a segment whose times are not known yet.

It is so late that retention keeps the segment.
"""


class SealedSegment(NamedTuple):
    """Facts of a sealed segment, which never changes."""

    base: int
    size: int
    batch_count: int
    """-1 if not known yet."""
    max_timestamp_us: int
    last_append_us: int
    """0 if not known."""
    has_transactions: int = 0
    """1 if it has transactional batches, -1 if not known."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    number: int
    topic_id: str
    segment_base: int
    """Base offset of the active segment, -1 if there is none."""
    valid_end: int
    batch_count: int
    """Number of entries in its index."""
    next_offset: int
    max_timestamp_us: int
    first_append_us: int
    last_append_us: int
    sealed: list[SealedSegment] = field(default_factory=list)
    producers: list[Any] = field(default_factory=list)


def write_checkpoint(files: Files, directory: str, checkpoint: Checkpoint, *, sync: bool) -> None:
    """Write a checkpoint to its file. Raises OSError."""
    fields = asdict(checkpoint)
    fields["sealed"] = [list(segment) for segment in checkpoint.sealed]
    data = checked_json.encode(fields)
    path = f"{directory}/{CHECKPOINT_FILES[checkpoint.number % 2]}"
    try:
        fd = files.open_for_write(path)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        files.unlink(path)  # a symbolic link was not made by a flusher
        fd = files.open_for_write(path)
    try:
        half = len(data) // 2
        files.write_at(fd, [data[:half]], 0)
        crash_point("flusher.in_checkpoint")
        files.write_at(fd, [data[half:]], half)
        if files.size(fd) > len(data):
            files.truncate(fd, len(data))
        if sync:
            files.sync_data(fd)
    finally:
        files.close(fd)


def load_checkpoint(files: Files, directory: str, topic_id: str) -> tuple[Checkpoint | None, int]:
    """Return the newest intact checkpoint of this topic, and the number of damaged ones."""
    found: list[Checkpoint] = []
    damaged = 0
    for name in CHECKPOINT_FILES:
        path = f"{directory}/{name}"
        if not files.exists(path):
            continue
        try:
            fields = checked_json.decode(read_whole(files, path))
        except OSError as error:
            if is_shortage(error):
                raise
            fields = None  # a directory or a bad sector counts as damaged
        try:
            if fields is None:
                damaged += 1
            elif fields["topic_id"] == topic_id:
                fields["sealed"] = [SealedSegment(*item) for item in fields["sealed"]]
                found.append(Checkpoint(**fields))
        except (KeyError, TypeError):  # intact, but another kind of file
            damaged += 1
    return max(found, key=lambda c: c.number, default=None), damaged
