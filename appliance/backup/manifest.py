"""Manifest of a backup: everything that a restore needs, by the objects that hold it.

Owner: `appliance.backup.backup` writes one for each backup, last of all: a backup exists when its
manifest does. A manifest never changes.

Invariants:
- Objects never change. Several manifests may name the same ones.
- The parts of a segment follow each other without a gap and make up its first `size` bytes.
- `end` is a batch boundary: the partition's log end in a restore.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from appliance.backup.errors import BackupError
from tailrace.format.directory import checked_json

FORMAT = 2
READ_FORMATS = (1, FORMAT)
"""Objects of format 1 have no CRC."""
NO_CRC = -1


class Part(NamedTuple):
    """Bytes `start` to `start + length - 1` of an object."""

    number: int
    """Index of the object in `Manifest.objects`."""
    start: int
    length: int
    digest: str = ""
    """Digest of a small file, to recognise an unchanged one."""


class StoredObject(NamedTuple):
    """An object of the target."""

    name: str
    size: int
    """Bytes of its content; an encrypted one is larger in the target."""
    crc: int = NO_CRC
    """CRC-32C of its content: a restore checks it, for the SHA-256 of the name is slower than a
    disk.
    """


class SegmentEntry(NamedTuple):
    """A segment, or the beginning of one up to the backup's point."""

    base: int
    size: int
    """Bytes that are part of the backup."""
    end: int
    """Offset behind the last batch in them."""
    is_whole: bool
    """True if another segment follows it: it never changes."""
    inode: int
    mtime_ns: int
    parts: list[Part]
    producers: Part | None
    """Snapshot of the producers at its beginning."""
    offset_index: Part | None
    """Its index, if it is whole. The others are made from the segment."""
    transactions: Part | None
    """Its transaction index. Entries of markers behind `end` do not count."""


class BucketFile(NamedTuple):
    """A file of delayed records that are not due yet."""

    name: str
    size: int
    first_crc: int
    parts: list[Part]


class PartitionEntry(NamedTuple):
    """A partition, with the log end of the backup's point."""

    topic: str
    topic_id: str
    partition: int
    start: int
    """The log start offset; of a delay log, the first offset that the scheduler needs."""
    end: int
    epochs: list[list[int]]
    """Leader epochs below `end`."""
    metadata: Part | None
    """`partition.json`; None if the partition had no files yet."""
    segments: list[SegmentEntry]
    checkpoint: Part | None = None
    """The checkpoint of a log without segments."""
    pending: Part | None = None
    """`pending.json` of a delay log."""
    buckets: Sequence[BucketFile] = ()

    @property
    def key(self) -> tuple[str, int]:
        return self.topic_id, self.partition

    @property
    def size(self) -> int:
        """Bytes of the log."""
        return sum(segment.size for segment in self.segments)


@dataclass(slots=True)
class Manifest:
    """One backup."""

    backup_id: str
    number: int
    """Grows with each backup of the target."""
    version: str
    """The version of Tailrace that made it."""
    instance: str
    """Identity of the appliance."""
    began_us: int
    """Every record that was acknowledged before is in the backup."""
    point_us: int
    """No record that was appended later is in the backup."""
    sent_bytes: int = 0
    """Bytes that this backup added to the target."""
    objects: list[StoredObject] = field(default_factory=list)
    databases: dict[str, Part] = field(default_factory=dict)
    partitions: list[PartitionEntry] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    """Topic ids of the catalog whose topics were deleted while the backup was made."""
    warnings: list[str] = field(default_factory=list)
    """Damage of the source that this backup has, too. They are shown and not stored."""

    def find(self, key: tuple[str, int]) -> PartitionEntry | None:
        """The entry of a (topic id, partition)."""
        return next((entry for entry in self.partitions if entry.key == key), None)

    def encode(self) -> bytes:
        """Encode as checked JSON."""
        content = {
            name: _plain(getattr(self, name)) for name in self.__slots__ if name != "warnings"
        }
        return checked_json.encode({"format": FORMAT, **content})

    @classmethod
    def decode(cls, data: bytes, name: str) -> Manifest:
        """Decode a manifest. Raises BackupError if it is damaged, or of a later version."""
        fields: Any = checked_json.decode(data)
        if not isinstance(fields, dict):
            raise BackupError(f"the manifest {name} is damaged; choose another backup.")
        found = fields.pop("format", None)
        if found not in READ_FORMATS:
            raise BackupError(
                f"the backup {name} has format {found} and was made by Tailrace "
                f"{fields.get('version', '?')}; this version reads 1 to {FORMAT}. Install that "
                "version, or a later one."
            )
        try:
            fields["objects"] = [StoredObject(*each) for each in fields["objects"]]
            fields["databases"] = {key: Part(*each) for key, each in fields["databases"].items()}
            fields["partitions"] = [_partition_of(each) for each in fields["partitions"]]
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise BackupError(
                f"the manifest {name} is damaged ({error}); choose another backup."
            ) from None


def _plain(value: Any) -> Any:
    """The value with lists in the place of tuples, for JSON."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _partition_of(row: list[Any]) -> PartitionEntry:
    entry = PartitionEntry(*row)
    return entry._replace(
        metadata=_part(entry.metadata),
        segments=[
            (segment := SegmentEntry(*each))._replace(
                parts=[Part(*part) for part in segment.parts],
                producers=_part(segment.producers),
                offset_index=_part(segment.offset_index),
                transactions=_part(segment.transactions),
            )
            for each in entry.segments
        ],
        checkpoint=_part(entry.checkpoint),
        pending=_part(entry.pending),
        buckets=[
            (bucket := BucketFile(*each))._replace(parts=[Part(*part) for part in bucket.parts])
            for each in entry.buckets
        ],
    )


def _part(row: Any) -> Part | None:
    return None if row is None else Part(*row)
