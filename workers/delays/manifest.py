"""What the scheduler has on the disk for one partition, named in one small file that is replaced whole: `pending.json`, in the delay log's directory.

Owner: the scheduler; the flusher reads the cursor, and removes the delay log's segments below it.
Invariants: everything in the delay log below `cursor` is delivered, cancelled, or in the files and recurrences named here; bytes behind a file's `end` are not
    there, files that are not named are not there.
Crash: the old one or the new one is there. One that is damaged stops the partition's deliveries, with an error, rather than lose what it named.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tailrace import checked_json
from workers.files import Files, read_whole, write_durably

MANIFEST_FILE = "pending.json"
MANIFEST_VERSION = 2


class ManifestDamagedError(Exception):
    """What was pending cannot be known."""


@dataclass(slots=True)
class FileEntry:
    """One bucket file (see `workers.delays.bucket_files`)."""

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


@dataclass(slots=True)
class Manifest:
    topic_id: str
    cursor: int = 0
    """An offset of the delay log."""
    closed: int = 0
    """The ordinal below which all were closed at the cursor."""
    next_number: int = 0
    files: list[FileEntry] = field(default_factory=list)
    recurring: list[dict[str, Any]] = field(default_factory=list)

    def encode(self) -> bytes:
        return checked_json.encode({"version": MANIFEST_VERSION, **asdict(self)})


def load_manifest(files: Files, directory: str, topic_id: bytes) -> Manifest:
    """An empty one where there is none, or another topic's. Raises OSError, ManifestDamagedError."""
    path = f"{directory}/{MANIFEST_FILE}"
    if not files.exists(path):
        return Manifest(topic_id.hex())
    fields = checked_json.decode(read_whole(files, path))
    if fields is None or fields.pop("version", None) != MANIFEST_VERSION:
        raise ManifestDamagedError(f"{path} is damaged, or another version's")
    if fields["topic_id"] != topic_id.hex():
        return Manifest(topic_id.hex())
    fields["files"] = [FileEntry(**entry) for entry in fields["files"]]
    return Manifest(**fields)


def save_manifest(files: Files, directory: str, manifest: Manifest) -> None:
    """Raises OSError."""
    write_durably(files, directory, MANIFEST_FILE, manifest.encode())


def read_cursor(files: Files, directory: str, topic_id: bytes) -> int:
    """Below which offset of the delay log nothing is needed any more. Raises OSError."""
    try:
        return load_manifest(files, directory, topic_id).cursor
    except ManifestDamagedError:
        return 0
