"""Manifest file of the scheduler: `pending.json`, always replaced as a whole (see
`tailrace.format.directory.delay_files`).

Owner: the scheduler. The flusher reads the cursor and removes the delay log's segments below it.

Crash: the old or the new one is there. A damaged one stops the partition's deliveries with an
error, since the rows it names would be lost.
"""

from __future__ import annotations

from tailrace.format.directory.delay_files import PENDING_FILE, Manifest, PendingDamagedError
from workers.segment.files import Files, read_whole, write_durably


def load_manifest(files: Files, directory: str, topic_id: bytes) -> Manifest:
    """Load the manifest.

    Return an empty one if there is none or it is another topic's. Raises OSError,
    PendingDamagedError.
    """
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
    """Return the offset below which the delay log is no longer needed. Raises OSError."""
    try:
        return load_manifest(files, directory, topic_id).kept_from
    except PendingDamagedError:
        return 0
