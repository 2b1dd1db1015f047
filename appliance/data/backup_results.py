"""The last result of backups, for `status` and metrics: a file for each target in the first data
directory, `backups/<16 hexadecimal digits of the target>.json` (checked JSON).

Owner: each backup writes the file of its target. The controller reads.

Invariants:
- `point_us` is that of the newest backup that was made, also when a later one failed.

Crash: the old or the new file is there. A backup that was killed leaves the result before it.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, NamedTuple

from tailrace.format.directory import checked_json
from tailrace.format.directory.data_dir import BACKUP_RESULTS_DIRECTORY

RESULTS_MAX = 16
"""Targets that are shown; those that were used last."""
ERROR_CHARS_MAX = 500


class BackupResult(NamedTuple):
    """The last result at one target."""

    target: str
    ended_us: int
    """End of the last attempt."""
    point_us: int
    """Point of the newest backup; 0: there is none."""
    backup_id: str = ""
    error: str = ""
    """The last attempt's; empty: it succeeded."""
    sent_bytes: int = 0
    duration_ms: int = 0


def write_result(data_dir: str, result: BackupResult) -> None:
    """Store the result at a target. Raises OSError."""
    directory = f"{data_dir}/{BACKUP_RESULTS_DIRECTORY}"
    os.makedirs(directory, mode=0o700, exist_ok=True)
    given = result._replace(error=result.error[:ERROR_CHARS_MAX])._asdict()
    checked_json.replace(_path(data_dir, result.target), checked_json.encode(given))


def read_result(data_dir: str, target: str) -> BackupResult | None:
    """The result at a target; None if it is missing or unreadable."""
    return _read(_path(data_dir, target))


def read_results(data_dir: str) -> list[BackupResult]:
    """The results of all targets, the last one first, RESULTS_MAX at most. Files that cannot be
    read are left out.
    """
    directory = f"{data_dir}/{BACKUP_RESULTS_DIRECTORY}"
    try:
        names = [name for name in os.listdir(directory) if name.endswith(".json")]
    except OSError:
        return []
    found = [_read(f"{directory}/{name}") for name in names]
    results = [each for each in found if each is not None]
    return sorted(results, key=lambda each: each.ended_us, reverse=True)[:RESULTS_MAX]


def _path(data_dir: str, target: str) -> str:
    digest = hashlib.sha256(os.fsencode(target)).hexdigest()[:16]
    return f"{data_dir}/{BACKUP_RESULTS_DIRECTORY}/{digest}.json"


def _read(path: str) -> BackupResult | None:
    try:
        content: Any = checked_json.decode(checked_json.read(path))
        found = BackupResult(**content)
    except (OSError, TypeError):
        return None
    is_sound = all(
        isinstance(value, kind)
        for value, kind in zip(found, (str, int, int, str, str, int, int), strict=True)
    )
    return found if is_sound else None
