"""Errors of the file system in a data directory, as one sentence with a remedy."""

from __future__ import annotations

import errno
import os

from tailrace.format.directory.data_dir import CATALOG_FILE

_ADVICE = {
    errno.ENOSPC: "Free some space on its disk",
    errno.EDQUOT: "Free some space, or have the quota raised",
    errno.EROFS: "Look at the system log, then mount it for writing",
    errno.EACCES: "Make it readable and writable for this user, or choose another directory with "
    "--data-dir",
    errno.EPERM: "Make it readable and writable for this user, or choose another directory with "
    "--data-dir",
    errno.ELOOP: "It is a symbolic link, which is never followed here: remove it",
    errno.EISDIR: "It is a directory where a file belongs: move it away",
    errno.ENOTDIR: "It is a file where a directory belongs: move it away",
    errno.EMFILE: "Allow more open files: ulimit -n 65536, or LimitNOFILE=65536 in the unit",
    errno.ENFILE: "Allow the host more open files: sysctl fs.file-max",
    errno.EIO: "Look at the system log, then repair or replace the disk",
}


class DataDirectoryError(RuntimeError):
    """The data directory cannot be used; the sentence says why and what to do."""


def refuse_without_catalog(data_dir: str) -> None:
    """Raise DataDirectoryError unless an appliance keeps its users, rules and tokens here."""
    if not os.path.exists(f"{data_dir}/{CATALOG_FILE}"):
        raise DataDirectoryError(
            f"{data_dir} has no {CATALOG_FILE}: name the first data directory of an appliance that "
            "has run once"
        )


def unusable(path: str, error: OSError) -> DataDirectoryError:
    """The sentence for an error that came from a file in the data directory `path`."""
    where = error.filename if isinstance(error.filename, str) else path
    if error.filename2 is not None and isinstance(error.filename2, str):
        where = error.filename2
    advice = _ADVICE.get(
        error.errno or 0,
        "Make it writable for this user, or choose another directory with --data-dir",
    )
    context = (
        f"write in the data directory {path}"
        if where == path
        else f"read or write {where} of the data directory {path}"
    )
    return DataDirectoryError(f"cannot {context}: {os.strerror(error.errno or 0)}. {advice}.")
