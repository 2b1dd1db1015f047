"""File operations of workers and flushers beyond `tailrace.format.directory.files`: small files and
trees.

Crash: see `replace_file`. A partly removed tree is removed by the next try.
"""

from __future__ import annotations

import os

from shm.crash_points import crash_point
from shm.runtime.reserve_file import give_up_piece
from tailrace.format.directory.files import (
    NO_PLAIN_FILE,
    NO_SPACE,
    SHORTAGES,
    DiskFiles,
    Files,
    is_shortage,
    replace_file,
)

__all__ = [
    "NO_PLAIN_FILE",
    "NO_SPACE",
    "SHORTAGES",
    "DiskFiles",
    "Files",
    "is_shortage",
    "read_whole",
    "remove_tree",
    "write_durably",
]


def read_whole(files: Files, path: str) -> bytes:
    """Return all bytes of a small file. Raises OSError."""
    fd = files.open_for_read(path)
    try:
        return files.read_at(fd, files.size(fd), 0)
    finally:
        files.close(fd)


def write_durably(
    files: Files, directory: str, name: str, data: bytes, *, sync: bool = True
) -> None:
    """Replace a small file (see `replace_file`). On a full disk a piece of the data directory's
    reserve file gives it room. `directory`: the data directory, or one of its partitions. Raises
    OSError.
    """
    while True:
        try:
            replace_file(
                files, f"{directory}/{name}", data, sync=sync, before_rename=_before_rename
            )
        except OSError as error:
            if error.errno not in NO_SPACE or not _give_up_piece(files, directory):
                raise
        else:
            return


def _give_up_piece(files: Files, directory: str) -> bool:
    return any(give_up_piece(files, path) for path in (directory, os.path.dirname(directory)))


def _before_rename() -> None:
    crash_point("flusher.in_write_durably")


def remove_tree(files: Files, directory: str) -> None:
    """Remove a directory with its content, if it exists. Raises OSError."""
    if files.exists(directory):
        for name in files.list(directory):
            try:
                files.unlink(f"{directory}/{name}")
            except IsADirectoryError:  # not made by a flusher
                remove_tree(files, f"{directory}/{name}")
        files.remove_directory(directory)
