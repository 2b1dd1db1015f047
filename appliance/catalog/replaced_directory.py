"""A directory that takes the place of a data directory whose disk is lost for good.

It gets the lost directory's identity, by which the catalog knows the directory of each partition.
At the next start the partitions begin empty there, or with the files of a backup that were put into
it before (docs/adr/0046).

Owner: `tailrace disk replace`, which has the locks of the first directory and of the new one. The
appliance is stopped.

Invariants:
- The catalog is only read.
- A directory whose identity the catalog knows for partitions of its own keeps it.
- The new directory has no partition, so no record of it is taken for one of the lost directory.
- Its shared memory is its own: what the lost one left in memory is drained by nobody.

Crash: one copy of the identity has the lost one's or both have; a repetition completes it.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from typing import NamedTuple

from appliance.catalog.database import error_kind
from appliance.catalog.log_dir_scan import partition_directories
from appliance.data.data_dir_lock import take
from appliance.data.directory_errors import DataDirectoryError
from tailrace.format.directory import checked_json
from tailrace.format.directory.data_dir import (
    CATALOG_FILE,
    GROUPS_FILE,
    IDENTITY_COPY_FILE,
    IDENTITY_FILE,
)


class LostDirectory(NamedTuple):
    """A data directory as the catalog knows it."""

    instance: bytes
    path: str
    partitions: list[tuple[str, int]]
    """(topic, partition), sorted."""


def replace_directory(
    first: str, path: str, lost_path: str, *, is_confirmed: bool
) -> LostDirectory:
    """Have the new directory `path` take the place of the lost one, which had `lost_path`. `first`:
    the directory with the catalog. Without `is_confirmed` all is checked, and nothing is replaced.
    Raises DataDirectoryError.
    """
    first, path = os.path.abspath(first), os.path.abspath(path)
    if not os.path.isfile(f"{first}/{CATALOG_FILE}"):
        raise DataDirectoryError(
            f"{first} has no {CATALOG_FILE}: name the first data directory with --data-dir."
        )
    if not os.path.isdir(path):
        raise DataDirectoryError(
            f"{path} is no directory: mount the new disk, and make the directory there."
        )
    owner = take(first)
    try:
        directories = _known_directories(first)
        lost = _lost(directories, lost_path)
        _check_unused(path)
        new = take(path)
        try:
            others = [each for each in directories if each is not lost]
            if any(each.instance == new.instance for each in others):
                raise DataDirectoryError(
                    f"{path} is a data directory with partitions of this appliance, and cannot "
                    "take the place of another."
                )
            if is_confirmed:
                content = new.identity._replace(instance=lost.instance).encode()
                for name in (IDENTITY_COPY_FILE, IDENTITY_FILE):
                    checked_json.replace(f"{path}/{name}", content)
        finally:
            new.close()
    finally:
        owner.close()
    return lost


def _check_unused(path: str) -> None:
    """Raises DataDirectoryError if the directory has partitions, or is another appliance's."""
    signs = [name for name in (CATALOG_FILE, GROUPS_FILE) if os.path.lexists(f"{path}/{name}")]
    signs += [name for name, _ in partition_directories([path])][:1]
    if signs:
        raise DataDirectoryError(
            f"{path} has {signs[0]}: only an empty directory takes the place of a lost one. Files "
            "of a backup are put into it afterwards."
        )


def _known_directories(first: str) -> list[LostDirectory]:
    """The directories that have partitions. Raises DataDirectoryError."""
    try:
        with closing(sqlite3.connect(f"{first}/{CATALOG_FILE}")) as database:
            rows = database.execute(
                "SELECT directory_id, path, name, partition FROM data_dirs JOIN partitions ON "
                "data_dir = number JOIN topics USING (topic_id) ORDER BY name, partition"
            ).fetchall()
    except sqlite3.Error as error:
        raise DataDirectoryError(
            f"{first}/{CATALOG_FILE} cannot be read ({error_kind(error)}): start the appliance, "
            "which rebuilds it from the partitions that are there."
        ) from None
    found: dict[str, LostDirectory] = {}
    for directory_id, path, topic, partition in rows:
        known = found.setdefault(directory_id, LostDirectory(bytes.fromhex(directory_id), path, []))
        known.partitions.append((topic, partition))
    return list(found.values())


def _lost(directories: list[LostDirectory], path: str) -> LostDirectory:
    """The directory that had this path. Raises DataDirectoryError."""
    for each in directories:
        if os.path.realpath(each.path) == os.path.realpath(path):
            return each
    known = ", ".join(each.path for each in directories) or "none"
    raise DataDirectoryError(
        f"the catalog knows no directory {path} with partitions; those with partitions: {known}. "
        "Name the lost one with --lost."
    )
