"""The scheduler's `pending.json` on the disk: replaced whole (see `tailrace.formats.pending_files` for what it holds).

Owner: the scheduler; the flusher reads the cursor, and removes the delay log's segments below it.
Crash: the old one or the new one is there. One that is damaged stops the partition's deliveries, with an error, rather than lose what it named.
"""

from __future__ import annotations

from tailrace.formats.pending_files import PENDING_FILE, Manifest, PendingDamagedError
from workers.files import Files, read_whole, write_durably


def load_manifest(files: Files, directory: str, topic_id: bytes) -> Manifest:
    """An empty one where there is none, or another topic's. Raises OSError, PendingDamagedError."""
    path = f"{directory}/{PENDING_FILE}"
    if not files.exists(path):
        return Manifest(topic_id.hex())
    try:
        manifest = Manifest.decode(read_whole(files, path))
    except PendingDamagedError as error:
        raise PendingDamagedError(f"{path}: {error}") from None
    return manifest if manifest.topic_id == topic_id.hex() else Manifest(topic_id.hex())


def save_manifest(files: Files, directory: str, manifest: Manifest) -> None:
    """Raises OSError."""
    write_durably(files, directory, PENDING_FILE, manifest.encode())


def read_cursor(files: Files, directory: str, topic_id: bytes) -> int:
    """Below which offset of the delay log nothing is needed any more. Raises OSError."""
    try:
        return load_manifest(files, directory, topic_id).cursor
    except PendingDamagedError:
        return 0
