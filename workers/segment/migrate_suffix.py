"""Renames the segments of a directory that a build before format 4 wrote: `.arrow` becomes `.arrows`.

Segments are Arrow streams, for which Arrow registers `.arrows`; tools that go by the suffix take `.arrow` for the file format and fail.

Owner: the flusher, before it reads anything else of a partition's directory.
Invariants: after `rename_segments` the directory has no `.arrow` segment; no bytes of a segment change; of two different files for one base offset
    neither is touched, and what is unlinked is a link, or has its bytes under the other name.
Crash: each rename is atomic, so a directory may hold both suffixes; the next start renames the rest. `partition.json` says format 4 with its next change.
"""

from __future__ import annotations

import errno
import logging

from shm.crash_points import crash_point
from tailrace.formats.segment import OLD_SEGMENT_SUFFIX, file_name, segment_bases
from workers.files import Files

logger = logging.getLogger(__name__)

COMPARED_BYTES = 4 << 20


def rename_segments(files: Files, directory: str) -> int:
    """Give every segment of `directory` its suffix, durably; returns how many had the old one. Raises OSError."""
    bases = segment_bases(files.list(directory), OLD_SEGMENT_SUFFIX)
    for base in bases:
        old, new = f"{directory}/{file_name(base, OLD_SEGMENT_SUFFIX)}", f"{directory}/{file_name(base)}"
        if not files.exists(new) or _is_link_to(files, new, old):
            files.rename(old, new)
        elif not _is_link(files, new) and _are_equal(files, old, new):
            files.unlink(old)
        else:
            raise OSError(
                errno.EEXIST, f"{file_name(base)} is there too and is a link or has other bytes (a backup, or records that an older build took since): "
                "move one of the two out of the directory", old,
            )  # fmt: skip
        crash_point("recovery.in_suffix_change")
    if bases:
        files.sync_directory(directory)
        logger.info("segments_renamed directory=%s count=%d suffix=%s", directory, len(bases), file_name(0)[20:])
    return len(bases)


def _is_link_to(files: Files, link: str, path: str) -> bool:
    """Whether `link`, through which tools that go by the suffix were to read `path`, leads there: to unlink `path` would lose its bytes."""
    return _is_link(files, link) and not _is_link(files, path) and _are_equal(files, link, path)


def _is_link(files: Files, path: str) -> bool:
    """Raises OSError."""
    try:
        files.close(files.open_for_write(path))  # follows none
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return True
    return False


def _are_equal(files: Files, path: str, other: str) -> bool:
    """Whether two files hold the same bytes. Raises OSError."""
    opened = [files.open_for_read(path)]
    try:
        opened.append(files.open_for_read(other))
        size = files.size(opened[0])
        if size != files.size(opened[1]):
            return False
        return all(
            files.read_at(opened[0], COMPARED_BYTES, position) == files.read_at(opened[1], COMPARED_BYTES, position)
            for position in range(0, size, COMPARED_BYTES)
        )
    finally:
        for fd in opened:
            files.close(fd)
