"""Identity of a data directory: the same as at its last start, a copy, or a new directory.

Owner: the supervisor, which holds the directory's lock. Files: `instance.json` and its copy (see
`tailrace.format.directory.data_dir`).
Invariants:
- Two directories that exist at once never have the same `shared_memory`. Regions belong to the
  directory whose device and inode `instance.json` names.
- `instance` never changes: the catalog finds a copy's partitions by it.

    event since the last start     device, inode, path     shared memory
    none                           the same                its own
    renamed or moved on its file   another path            its own: rings left there are
    system, after a kill too                               drained
    file system mounted again,     another device          its own (none after another boot)
    machine booted
    copied, restored, moved to     another inode           a new identity: the original may
    another disk                                           be running and is not touched

Crash: both files are replaced atomically, the copy first. The complete one counts.
"""

from __future__ import annotations

import logging
import os

from appliance.data.directory_errors import DataDirectoryError
from tailrace.format.directory import checked_json
from tailrace.format.directory.data_dir import (
    CATALOG_FILE,
    IDENTITY_COPY_FILE,
    IDENTITY_FILE,
    JOURNAL_FILE,
    MANIFEST_COPY_FILE,
    MANIFEST_FILE,
    PARTITION_FILE,
    UNFINISHED_RESTORE_FILE,
    Identity,
    decode_identity,
)

logger = logging.getLogger("appliance.supervise.supervisor")

_SIGNS_OF_USE = (CATALOG_FILE, JOURNAL_FILE, MANIFEST_FILE, MANIFEST_COPY_FILE)


def identify(path: str, directory: os.stat_result) -> Identity:
    """The identity of a locked data directory, made or mended where it must be. Raises
    DataDirectoryError, OSError.
    """
    copies = _copies(path)
    known = copies[0] or copies[1] or _make(path)
    found = known._replace(device=directory.st_dev, inode=directory.st_ino, path=path)
    if not _is_the_same(known, found):
        logger.warning(
            "copied_directory path=%s of=%s inode=%d",
            path,
            known.path,
            known.inode,
        )
        found = found._replace(shared_memory=os.urandom(16))
    if [found, found] != copies:
        for name in (IDENTITY_COPY_FILE, IDENTITY_FILE):
            checked_json.replace(f"{path}/{name}", found.encode())
    return found


def known_identity(path: str) -> Identity:
    """The identity that a start would find or make; writes nothing.

    Raises: DataDirectoryError, OSError.
    """
    copies = _copies(path)
    return copies[0] or copies[1] or _make(path)


def _copies(path: str) -> list[Identity | None]:
    return [_read(f"{path}/{name}") for name in (IDENTITY_FILE, IDENTITY_COPY_FILE)]


def _is_the_same(known: Identity, found: Identity) -> bool:
    """True if this is the directory that `shared_memory` was made for."""
    if known.inode < 0:  # an earlier version's file, or one just made
        return True
    return known.inode == found.inode and (known.device == found.device or known.path == found.path)


def _read(file_name: str) -> Identity | None:
    """Read one copy; None if it is damaged, or missing, which `_make` handles."""
    try:
        identity = decode_identity(checked_json.read(file_name))
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.error("identity_not_read path=%s error=%r", file_name, str(error))
        return None
    if identity is None:
        logger.error("identity_damaged path=%s", file_name)
    return identity


def _make(path: str) -> Identity:
    """Make an identity for an unused directory.

    Raises: DataDirectoryError if the directory was used.
    """
    if os.path.lexists(f"{path}/{UNFINISHED_RESTORE_FILE}"):
        raise DataDirectoryError(
            f"{path} was left by a restore that did not end: remove what is in it and restore it "
            "again, or choose another directory with --data-dir."
        )
    signs = [
        name
        for name in (IDENTITY_FILE, IDENTITY_COPY_FILE, *_SIGNS_OF_USE)
        if os.path.lexists(f"{path}/{name}")
    ]
    signs += [
        name
        for name in sorted(os.listdir(path))
        if os.path.lexists(f"{path}/{name}/{PARTITION_FILE}")
    ][:1]
    if signs:
        raise DataDirectoryError(
            f"{path}/{IDENTITY_FILE} and {IDENTITY_COPY_FILE} are missing or damaged, and "
            f"{signs[0]} shows that this directory was used. They identify its partitions and "
            "its shared memory: restore one of them from a backup of this directory, or choose "
            "another with --data-dir."
        )
    instance = os.urandom(16)
    return Identity(instance, instance)


def directory_id(path: str) -> str:
    """The identity of a data directory that was taken once, as hexadecimal digits, as the catalog
    knows it. Raises DataDirectoryError.
    """
    for name in (IDENTITY_FILE, IDENTITY_COPY_FILE):
        known = _read(f"{path}/{name}")
        if known is not None:
            return known.instance.hex()
    raise DataDirectoryError(
        f"{path}/{IDENTITY_FILE} was removed while the appliance ran; restore it from a backup "
        "of this directory."
    )
