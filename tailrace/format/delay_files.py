"""What the scheduler keeps on the disk of delayed records: `pending.json`, and bucket files `<level>-<first tick>-<number>.pending` beside a delay log.

`pending.json` (checked JSON) names the bucket files and which bytes of them count; everything in the delay log below its `cursor` is delivered, cancelled, or
in those. A bucket file is chunks, one behind the other, little endian:

    magic u32 | kind u32 | rows u32 | crc32c u32 | body u64 | first offset i64 | last offset i64 | min tick i64 | max tick i64      (56 B)
    ticks i64[rows] | offsets i64[rows], ascending | body: an Arrow RecordBatch message of the delay log's schema                     kind 1
    offsets i64[rows]                                                                                                                kind 2: cancelled

Owner: the scheduler writes them (`workers.delays`); the flusher reads the cursor, the offline tools everything.
Invariants: a chunk never changes; its checksum covers all of it, itself as 0; bytes behind a file's `end`, and files that are not named, are not there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tailrace.formats import checked_json
from tailrace.formats.checksum import Readable, crc32c

PENDING_FILE = "pending.json"
PENDING_VERSION = 3
READ_VERSIONS = (2, 3)
"""2: without `BucketEntry.first_crc`."""
BUCKET_SUFFIX = ".pending"
DAMAGED_SUFFIX = ".damaged"
"""Behind the name of a bucket file that was set aside."""
CHUNK_MAGIC = 0x32444254  # "TBD2"
KIND_ROWS = 1
KIND_CANCELLED = 2
_HEAD = struct.Struct("<IIIIQqqqq")
HEAD_BYTES = _HEAD.size
_CRC_AT = 12

ReadAt = Callable[[int, int], bytes]
"""(length, position) -> bytes; fewer at the end of the file."""


class PendingDamagedError(Exception):
    """`pending.json` or a bucket file is not what was written."""


@dataclass(slots=True)
class BucketEntry:
    """What `pending.json` says of one bucket file."""

    level: int
    start: int
    """The first tick it is for."""
    number: int
    begin: int
    """Everything before this position was moved elsewhere."""
    end: int
    rows: int
    """How many there are between, cancelled ones included."""
    cancelled: int
    delivered_tick: int = -1
    delivered_offset: int = -1
    """Rows up to this (tick, offset) were delivered before the clock was set back; nothing is appended any more. -1: it was not."""
    first_crc: int = 0
    """The checksum of the file's first chunk: another bucket's file under this name is whole, too, and is not this one. 0: not known (version 2)."""

    @property
    def file_name(self) -> str:
        """The file's name, without its directory."""
        return f"{self.level}-{self.start:016d}-{self.number:08d}{BUCKET_SUFFIX}"


@dataclass(slots=True)
class Manifest:
    """What `pending.json` holds."""

    topic_id: str
    """The delay log's, hexadecimal."""
    cursor: int = 0
    """An offset of the delay log."""
    closed: int = 0
    """The ordinal below which all were closed at the cursor."""
    next_number: int = 0
    files: list[BucketEntry] = field(default_factory=list)
    recurring: list[dict[str, Any]] = field(default_factory=list)

    def encode(self) -> bytes:
        """The bytes of `pending.json`: checked JSON."""
        # orjson writes the entries itself: `asdict` copies each of them before, a third of what the scheduler runs with thousands of files.
        return checked_json.encode({"version": PENDING_VERSION, **{name: getattr(self, name) for name in self.__slots__}})

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Raises PendingDamagedError."""
        fields = checked_json.decode(data)
        if not isinstance(fields, dict) or fields.pop("version", None) not in READ_VERSIONS:
            raise PendingDamagedError("it is damaged, or another version's")
        try:
            fields["files"] = [BucketEntry(**entry) for entry in fields["files"]]
            return cls(**fields)
        except (KeyError, TypeError):
            raise PendingDamagedError("it is another kind of file") from None


class Chunk(NamedTuple):
    """Where rows lie in a bucket file."""

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
        """With the checksum of itself and what lies behind its head."""
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
        """The position behind the chunk, in its file."""
        return self.position + HEAD_BYTES + self.keys + self.body


def walk_chunks(read_at: ReadAt, begin: int, end: int, first_crc: int = 0) -> Iterator[Chunk]:
    """The chunks between two positions; what lies behind their heads is not looked at. `first_crc`: see BucketEntry. Raises PendingDamagedError."""
    if first_crc and read_at(HEAD_BYTES, 0)[_CRC_AT : _CRC_AT + 4] != first_crc.to_bytes(4, "little"):
        raise PendingDamagedError("it is another file")
    position = begin
    while position < end:
        raw = read_at(HEAD_BYTES, position)
        if len(raw) < HEAD_BYTES:
            raise PendingDamagedError(f"it ends at {position}")
        magic, *fields = _HEAD.unpack(raw)
        chunk = Chunk(position, *fields)
        if magic != CHUNK_MAGIC or chunk.kind not in (KIND_ROWS, KIND_CANCELLED) or chunk.end > end:
            raise PendingDamagedError(f"it has no chunk at {position}")
        yield chunk
        position = chunk.end


def proven(read_at: ReadAt, chunk: Chunk) -> memoryview:
    """What lies behind a chunk's head, as its checksum says. Raises PendingDamagedError."""
    data = memoryview(read_at(chunk.keys + chunk.body, chunk.position + HEAD_BYTES))
    if len(data) < chunk.keys + chunk.body or chunk.sealed([data]).crc != chunk.crc:
        raise PendingDamagedError(f"it is damaged at {chunk.position}")
    return data
