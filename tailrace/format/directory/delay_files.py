"""Files of pending delayed records: `pending.json` and bucket files, beside a delay log.

The scheduler keeps them. `pending.json` (checked JSON) lists the bucket files and their valid
bytes. Every record of the delay log below its `cursor` is delivered, cancelled, in a bucket file,
or in a batch that it names. Such a batch is part of a transaction, or a change that one has
reserved. A bucket file, `<level>-<first tick>-<number>.pending`, is a sequence of chunks, little
endian:

    magic u32 | kind u32 | rows u32 | crc32c u32 | body u64 |
    first offset i64 | last offset i64 | min tick i64 | max tick i64                     (56 bytes)
    kind 1, rows:       ticks i64[rows] | offsets i64[rows], ascending |
                        body: an Arrow RecordBatch message of the delay log's schema,
                        of the version that `pending.json` names for the file
    kind 2, cancelled:  offsets i64[rows], of rows in chunks before it

An offset may come again behind its cancellation: an aborted transaction returns the row.

Owner: the scheduler writes them (`workers.delays`). The flusher reads the cursor, the offline tools
everything.

Invariants:
- A chunk never changes.
- A chunk's checksum covers all of it, with 0 in the checksum's place.
- Bytes after a file's `end`, and files that are not listed, are ignored.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tailrace.format.crc32c import Readable, crc32c
from tailrace.format.directory import checked_json

PENDING_FILE = "pending.json"
PENDING_VERSION = 3
TRANSACTIONAL_PENDING_VERSION = 4
"""The version of a manifest with batches of transactions, and of no other: a build that would
delete the segments with them refuses it.
"""
RESERVING_PENDING_VERSION = 5
"""The version of a manifest with reserved rows, and of each later one of its partition once a row
was returned: a build that cancels an offset in all of a file refuses it.
"""
ALTERED_PENDING_VERSION = 6
"""The version of a manifest whose delay log has several versions of its schema: a build that would
read all rows by one of them refuses it.
"""
READ_VERSIONS = (2, 3, 4, 5, 6)
"""The last one is the newest that is written. Version 2 had no `BucketEntry.first_crc`."""
BUCKET_SUFFIX = ".pending"
DAMAGED_SUFFIX = ".damaged"
"""Suffix that is added to a quarantined bucket file's name."""
CHUNK_MAGIC = 0x32444254  # "TBD2"
KIND_ROWS = 1
KIND_CANCELLED = 2
_HEAD = struct.Struct("<IIIIQqqqq")
HEAD_BYTES = _HEAD.size
_CRC_AT = 12

ReadAt = Callable[[int, int], bytes]
"""(length, position) -> bytes; fewer at the end of the file."""


class PendingDamagedError(Exception):
    """`pending.json` or a bucket file is damaged."""


@dataclass(slots=True)
class BucketEntry:
    """The entry of one bucket file in `pending.json`."""

    level: int
    start: int
    """Its first tick."""
    number: int
    begin: int
    """Records before this position have been moved to other files."""
    end: int
    rows: int
    """Rows from `begin` to `end`, cancelled ones included."""
    cancelled: int
    delivered_tick: int = -1
    delivered_offset: int = -1
    """(tick, offset) of the last row delivered before the clock was set back. Nothing more is
    appended to this file. -1: the clock was not set back.
    """
    first_crc: int = 0
    """The checksum of the file's first chunk, which detects another bucket's file under this name.
    0: unknown (version 2).
    """

    @property
    def file_name(self) -> str:
        """The file's name, without its directory."""
        return f"{self.level}-{self.start:016d}-{self.number:08d}{BUCKET_SUFFIX}"


@dataclass(slots=True)
class Manifest:
    """The contents of `pending.json`."""

    topic_id: str
    """The topic id of the delay log, hexadecimal."""
    cursor: int = 0
    """An offset of the delay log."""
    closed: int = 0
    """The ordinal below which all were closed at the cursor."""
    next_number: int = 0
    files: list[BucketEntry] = field(default_factory=list)
    recurring: list[dict[str, Any]] = field(default_factory=list)
    open_batches: list[list[int]] = field(default_factory=list)
    """[producer id, epoch, base offsets of its batches ...] of each transaction that was open at
    the cursor.
    """
    committing: list[int] = field(default_factory=list)
    """Base offsets of committed batches below the cursor whose records are not in bucket files."""
    reserved: list[list[int]] = field(default_factory=list)
    """[producer id, epoch, base offset of a change, then index and next due time of each row that
    it has reserved ...] of each change by an open transaction.
    """
    has_returned: bool = False
    """True if an aborted transaction has returned a row since the partition was made."""
    schema_id: int = 0
    """The newest version of the delay log's schema when this was written. 0: it has one version."""
    file_schemas: dict[str, list[int]] = field(default_factory=dict)
    """Schema id -> numbers of the files with its rows. Other files have rows of the first version,
    and so has a recurring row without a `schema_id`.
    """

    @property
    def kept_from(self) -> int:
        """The offset below which the delay log is not needed any more."""
        offsets = [transaction[2] for transaction in self.open_batches if len(transaction) > 2]
        return min(
            [self.cursor, *offsets, *self.committing[:1], *(change[2] for change in self.reserved)]
        )

    def encode(self) -> bytes:
        """Encode `pending.json` as checked JSON."""
        # orjson encodes the entries itself. `asdict` would copy each first, a third of the
        # scheduler's time with thousands of files.
        fields = {name: getattr(self, name) for name in self.__slots__}
        if self.schema_id:
            return checked_json.encode({"version": ALTERED_PENDING_VERSION, **fields})
        del fields["schema_id"], fields["file_schemas"]
        if self.reserved or self.has_returned:
            return checked_json.encode({"version": RESERVING_PENDING_VERSION, **fields})
        del fields["reserved"], fields["has_returned"]
        if self.open_batches or self.committing:
            return checked_json.encode({"version": TRANSACTIONAL_PENDING_VERSION, **fields})
        del fields["open_batches"], fields["committing"]
        return checked_json.encode({"version": PENDING_VERSION, **fields})

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Decode `pending.json`. Raises PendingDamagedError."""
        fields = checked_json.decode(data)
        if not isinstance(fields, dict) or fields.pop("version", None) not in READ_VERSIONS:
            raise PendingDamagedError("the file is damaged, or of another version")
        try:
            fields["files"] = [BucketEntry(**entry) for entry in fields["files"]]
            return cls(**fields)
        except (KeyError, TypeError):
            raise PendingDamagedError("the file is of another kind") from None


class Chunk(NamedTuple):
    """The head of a chunk in a bucket file."""

    position: int
    kind: int
    rows: int
    crc: int
    body: int
    first_offset: int
    last_offset: int
    min_tick: int
    max_tick: int

    def head(self) -> bytes:
        """The chunk's first 56 bytes."""
        return _HEAD.pack(CHUNK_MAGIC, *self[1:])

    def sealed(self, pieces: list[Readable]) -> Chunk:
        """The chunk with the checksum of its head and the bytes after it."""
        crc = crc32c(self._replace(crc=0).head())
        for piece in pieces:
            crc = crc32c(piece, crc)
        return self._replace(crc=crc)

    @property
    def keys(self) -> int:
        """Bytes between head and body."""
        return self.rows * (16 if self.kind == KIND_ROWS else 8)

    @property
    def end(self) -> int:
        """The position after the chunk in its file."""
        return self.position + HEAD_BYTES + self.keys + self.body


def walk_chunks(read_at: ReadAt, begin: int, end: int, first_crc: int = 0) -> Iterator[Chunk]:
    """Yield the chunks from `begin` to `end`, heads only. `first_crc`: see BucketEntry.

    Raises PendingDamagedError.
    """
    if first_crc and read_at(HEAD_BYTES, 0)[_CRC_AT : _CRC_AT + 4] != first_crc.to_bytes(
        4, "little"
    ):
        raise PendingDamagedError("the file is another bucket's")
    position = begin
    while position < end:
        raw = read_at(HEAD_BYTES, position)
        if len(raw) < HEAD_BYTES:
            raise PendingDamagedError(f"the file ends at {position}, before {end}")
        magic, *fields = _HEAD.unpack(raw)
        chunk = Chunk(position, *fields)
        if magic != CHUNK_MAGIC or chunk.kind not in (KIND_ROWS, KIND_CANCELLED) or chunk.end > end:
            raise PendingDamagedError(f"the file has no chunk at {position}")
        yield chunk
        position = chunk.end


def proven(read_at: ReadAt, chunk: Chunk) -> memoryview:
    """Read the bytes after a chunk's head and verify its checksum. Raises PendingDamagedError."""
    data = memoryview(read_at(chunk.keys + chunk.body, chunk.position + HEAD_BYTES))
    if len(data) < chunk.keys + chunk.body or chunk.sealed([data]).crc != chunk.crc:
        raise PendingDamagedError(f"the file is damaged at {chunk.position}")
    return data
