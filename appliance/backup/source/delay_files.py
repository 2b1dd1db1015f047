"""Files of delayed records that are not due yet: `pending.json` and bucket files of a delay log.

Owner: reads the scheduler's files, beside the running scheduler.

Invariants: the bucket files are those of the `pending.json` that is taken with them. Chunks of a
bucket file never change.

Crash: the scheduler may replace `pending.json` and remove files at any time: they are then read
again.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from appliance.backup.errors import BackupError, NotReadyError
from appliance.backup.manifest import BucketFile, Part, PartitionEntry
from appliance.backup.source.log_files import small_file
from appliance.backup.writer import BackupWriter
from tailrace.format.directory.delay_files import (
    PENDING_FILE,
    BucketEntry,
    Manifest,
    PendingDamagedError,
)

TRIES_MAX = 20


class PendingRecords(NamedTuple):
    """The state of a delay log's pending records."""

    pending: Part
    buckets: list[BucketFile]
    kept_from: int
    """The delay log is needed from this offset on."""
    cursor: int


def pending_records(
    directory: str, previous: PartitionEntry | None, writer: BackupWriter
) -> PendingRecords | None:
    """Take the pending records of a delay log. None if the scheduler has written none yet. Raises
    BackupError, OSError.
    """
    known = {bucket.name: bucket for bucket in previous.buckets} if previous is not None else {}
    for _ in range(TRIES_MAX):
        data = small_file(directory, PENDING_FILE)
        if data is None:
            return None
        try:
            manifest = Manifest.decode(data)
        except PendingDamagedError as error:
            raise BackupError(f"{directory}/{PENDING_FILE}: {error}.") from None
        try:
            buckets = [
                _bucket(directory, entry, known.get(entry.file_name), writer)
                for entry in manifest.files
                if entry.end
            ]
        except FileNotFoundError:  # the scheduler has a newer pending.json
            continue
        pending = writer.add_small(data, previous.pending if previous is not None else None)
        return PendingRecords(pending, buckets, manifest.kept_from, manifest.cursor)
    raise NotReadyError(f"{directory}/{PENDING_FILE} is replaced faster than it can be read.")


def _bucket(
    directory: str, entry: BucketEntry, known: BucketFile | None, writer: BackupWriter
) -> BucketFile:
    path = f"{directory}/{entry.file_name}"
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size < entry.end:
            raise BackupError(f"{path} ends before {entry.end}: `tailrace log verify` says more.")
        is_known = (
            known is not None
            and entry.first_crc != 0
            and known.first_crc == entry.first_crc
            and known.size <= entry.end
        )
        if known is not None and is_known:
            parts = writer.grown(fd, known.parts, known.size, entry.end)
        else:
            parts = [writer.add_range(fd, 0, entry.end)]
    finally:
        os.close(fd)
    return BucketFile(entry.file_name, entry.end, entry.first_crc, parts)
