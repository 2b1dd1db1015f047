"""Migration of segment files from before format 4: renames `.arrow` to `.arrows`.

Segments are Arrow streams, whose registered suffix is `.arrows`. Tools that go by the suffix take
`.arrow` for the file format and fail.

Owner: the flusher, before it reads anything else in a partition's directory.

Invariants:
- After `rename_segments` the directory has no `.arrow` segment.
- No byte of a segment changes.
- If two different files have one base offset, neither is touched. An unlinked file is a link, or
  has its bytes under the other name.

Crash: each rename is atomic, so a directory may have both suffixes. The next start renames the
rest. `partition.json` gets format 4 with its next change.
"""

from __future__ import annotations

import errno
import logging

from shm.crash_points import crash_point
from tailrace.format.segments.segment import OLD_SEGMENT_SUFFIX, file_name, segment_bases
from workers.segment.files import Files

logger = logging.getLogger(__name__)

COMPARED_BYTES = 4 << 20


def rename_segments(files: Files, directory: str) -> int:
    """Rename every segment of `directory`, durably.

    Return how many had the old suffix. Raises OSError.
    """
    bases = segment_bases(files.list(directory), OLD_SEGMENT_SUFFIX)
    for base in bases:
        old, new = (
            f"{directory}/{file_name(base, OLD_SEGMENT_SUFFIX)}",
            f"{directory}/{file_name(base)}",
        )
        if not files.exists(new) or _is_link_to(files, new, old):
            files.rename(old, new)
        elif not _is_link(files, new) and _are_equal(files, old, new):
            files.unlink(old)
        else:
            raise OSError(
                errno.EEXIST, f"{file_name(base)} exists too, as a link or with other bytes "
                              "(a backup, or records that an older version has appended): "
                "move one of the two out of the directory", old,
            )  # fmt: skip
        crash_point("recovery.in_suffix_change")
    if bases:
        files.sync_directory(directory)
        logger.info(
            "segments_renamed directory=%s count=%d suffix=%s",
            directory,
            len(bases),
            file_name(0)[20:],
        )
    return len(bases)


def _is_link_to(files: Files, link: str, path: str) -> bool:
    """True if `link`, made for tools that go by the suffix, leads to `path`. Unlinking `path` would
    lose its bytes.
    """
    return _is_link(files, link) and not _is_link(files, path) and _are_equal(files, link, path)


def _is_link(files: Files, path: str) -> bool:
    """Raises OSError."""
    try:
        files.close(files.open_for_write(path))  # does not follow links
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return True
    return False


def _are_equal(files: Files, path: str, other: str) -> bool:
    """True if two files have the same bytes. Raises OSError."""
    opened = [files.open_for_read(path)]
    try:
        opened.append(files.open_for_read(other))
        size = files.size(opened[0])
        if size != files.size(opened[1]):
            return False
        return all(
            files.read_at(opened[0], COMPARED_BYTES, position)
            == files.read_at(opened[1], COMPARED_BYTES, position)
            for position in range(0, size, COMPARED_BYTES)
        )
    finally:
        for fd in opened:
            files.close(fd)
