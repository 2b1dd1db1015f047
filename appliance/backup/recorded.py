"""Records the result of each backup beside the data, where `status` and metrics find it.

Owner: the backup that has the target's lock. One that is refused because of another's lock records
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from appliance.backup.errors import BackupError, TargetLockedError
from appliance.backup.manifest import Manifest
from appliance.data.backup_results import BackupResult, read_result, write_result


@dataclass(slots=True)
class Attempt:
    """One backup that is being made."""

    made: Manifest | None = None
    """Set by its maker when the backup exists."""


@contextmanager
def recorded(data_dir: str, target: str) -> Iterator[Attempt]:
    """Store the result of the block, which is also raised. A data directory that cannot be written
    (a full disk) changes nothing about the backup.
    """
    began_ns = time.monotonic_ns()
    attempt = Attempt()
    error = ""
    try:
        yield attempt
        error = " ".join(attempt.made.warnings) if attempt.made is not None else ""
    except TargetLockedError:
        attempt.made = None
        began_ns = 0
        raise
    except (BackupError, OSError) as raised:
        error = str(raised)
        raise
    finally:
        if began_ns and (error or attempt.made is not None):
            duration_ms = (time.monotonic_ns() - began_ns) // 1_000_000
            _store(data_dir, target, attempt.made, error, duration_ms)


def _store(data_dir: str, target: str, made: Manifest | None, error: str, duration_ms: int) -> None:
    before = read_result(data_dir, target)
    point_us, backup_id = (before.point_us, before.backup_id) if before is not None else (0, "")
    if made is not None:
        point_us, backup_id = made.point_us, made.backup_id
    result = BackupResult(
        target, time.time_ns() // 1000, point_us, backup_id, error,
        made.sent_bytes if made is not None else 0, duration_ms,
    )  # fmt: skip
    try:
        write_result(data_dir, result)
    except OSError:
        pass
