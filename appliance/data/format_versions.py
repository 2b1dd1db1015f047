"""Versions of the formats in a data directory: which ones it may have, by the version of Tailrace
that opened it last.

`formats.json` (checked JSON) holds the version of Tailrace, and of each format the newest version
that it writes.

Owner: the supervisor, under the directory's lock.
Invariants:
- A directory that a newer version has opened is refused, with the names of the formats, before
  anything in it changes.
- The file names a new format before the first byte of that format is written.
Crash: the file is replaced as a whole. A missing or damaged one is made again; then each format's
own check decides.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from appliance.data.directory_errors import DataDirectoryError
from tailrace import __version__
from tailrace.format.directory import checked_json

logger = logging.getLogger("appliance.supervise.supervisor")

FORMATS_FILE = "formats.json"
FORMATS = {
    "partition.json": 5,
    "batch header": 3,
    "index": 2,
    "transaction index": 1,
    "delayed records": 6,
    "coordinator.db": 9,
    "groups.db": 10,
}
"""The newest version of each format that this version of Tailrace writes. The owner of a format has
the same number (`tests/appliance/data/test_format_versions.py` compares them).
"""


class FormatChange(NamedTuple):
    """A format that was written in an earlier version."""

    name: str
    old: int
    new: int


def changes(path: str) -> list[FormatChange]:
    """Formats of the directory that this version of Tailrace writes in a later version.

    Raises DataDirectoryError if it has formats that this version does not read.
    """
    found = _read(path)
    if found is None:
        return []
    version, formats = found
    newer = [
        f"{name} {number} (known here: {FORMATS.get(name, 'none')})"
        for name, number in sorted(formats.items())
        if number > FORMATS.get(name, 0)
    ]
    if newer:
        raise DataDirectoryError(
            f"the data directory {path} was opened by Tailrace {version}, whose formats version "
            f"{__version__} does not read: {', '.join(newer)}. Start version {version} or a later "
            "one. Nothing was changed."
        )
    return [
        FormatChange(name, formats[name], number)
        for name, number in FORMATS.items()
        if name in formats and formats[name] < number
    ]


def record(path: str) -> None:
    """Record the formats of this version, and log those that change.

    Raises DataDirectoryError as `changes` does, and OSError. A full disk is not an error if no
    format changes.
    """
    changed = changes(path)
    for change in changed:
        logger.info(
            "format_changes data_dir=%s name=%r from=%d to=%d earlier_versions=%r",
            path, change.name, change.old, change.new, "cannot read it afterwards",
        )  # fmt: skip
    if _read(path) == (__version__, FORMATS):
        return
    content = {"tailrace": __version__, "formats": FORMATS}
    try:
        checked_json.replace(f"{path}/{FORMATS_FILE}", checked_json.encode(content))
    except OSError as error:
        if changed:
            raise
        logger.warning("formats_not_recorded data_dir=%s error=%r", path, str(error))


def _read(path: str) -> tuple[str, dict[str, int]] | None:
    """(version of Tailrace, formats) of the file; None if it is missing or unreadable."""
    try:
        content: Any = checked_json.decode(checked_json.read(f"{path}/{FORMATS_FILE}"))
        return str(content["tailrace"]), {
            str(name): int(number) for name, number in content["formats"].items()
        }
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        return None
