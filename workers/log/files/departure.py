"""Departure of a partition to another data directory: its copy there is completed.

    <target>/moving/<topic id>-<partition>    the copy that `tailrace partition move` makes while
                                              the log is written, with `copied.json`
    <target>/bin/<topic id>-<partition>       the complete copy, by one rename; then its move's
                                              name in ARRIVAL_FILE, the last step

The partition arrives as a deleted topic comes back from the bin (docs/adr/0059). Beside a delay log
are the scheduler's files, which it writes meanwhile: what the copy gets is as a kill of the
scheduler would leave it (docs/adr/0067).

Owner: the flusher of the directory that the partition leaves. Its log is closed for appends, and
all of it is synced.

Invariants:
- The files of the log do not change here.
- A part of the copy is used if `copied.json` names the file that it was copied from, by inode, size
  and time; of an active segment its beginning, if it was copied in this boot and the last batch
  that was copied is there still. After a power loss or a cut the segment may have other batches.
- Of a delay log's `pending.json` one version is copied, with the bucket files that it names, up to
  the ends that it names. Rows that were refused after it was read are refused again.
- The copy has one writer: it is locked until it has its name.
- The complete copy and its name are durable before ARRIVAL_FILE is there: the controller decides
  by that file, and power may be lost then.
- A copy for which there is no space is removed: the directory has partitions of its own.

Crash: the partition is where it was. Copies that no decision followed are replaced by the next try.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from shm.crash_points import crash_point
from shm.messages.lane_messages import Assignment
from shm.runtime.elapsed_time import this_boot
from tailrace.format.directory import checked_json
from tailrace.format.directory.data_dir import (
    ARRIVAL_FILE,
    BIN_DIRECTORY,
    COPIED_FILE,
    MOVING_DIRECTORY,
    arrival_content,
    bin_name,
)
from tailrace.format.directory.delay_files import (
    BUCKET_SUFFIX,
    PENDING_FILE,
    Manifest,
    PendingDamagedError,
)
from tailrace.format.directory.files import NO_SPACE
from tailrace.format.segments.segment import SEGMENT_SUFFIX
from workers.log.files.active_segment import UNFINISHED_SUFFIX
from workers.segment.files import Files, read_whole, remove_tree
from workers.segment.segment_swap import CLEANED_INDEX_SUFFIX, CLEANED_SUFFIX

CHUNK_BYTES = 1 << 20
HEAD_BYTES = 4096
PENDING_TRIES = 10
_LEFT_OUT = (UNFINISHED_SUFFIX, CLEANED_SUFFIX, CLEANED_INDEX_SUFFIX, ".tmp", COPIED_FILE)


def complete_copy(files: Files, directory: str, assignment: Assignment) -> int:
    """Complete the copy of a partition in `assignment.departing`. Returns the bytes copied. Raises
    OSError, also when a mover works on the copy.
    """
    target, name = assignment.departing, _name(assignment)
    place = f"{target}/{assignment.directory_name}"
    moving, kept = f"{target}/{MOVING_DIRECTORY}", f"{target}/{BIN_DIRECTORY}"
    if _is_complete(files, f"{kept}/{name}", assignment.move):
        return 0  # by a predecessor: the other flusher may take it out of the bin now
    if files.exists(place):
        raise OSError(errno.EEXIST, "a directory of its name is there", place)
    for path in (moving, kept, f"{moving}/{name}"):
        if not files.exists(path):
            files.make_directory(path)
    with _locked(f"{moving}/{name}"):
        try:
            copied = _copy_missing(files, directory, f"{moving}/{name}", assignment)
            files.sync_directory(f"{moving}/{name}")
            crash_point("move.copied")
            remove_tree(files, f"{kept}/{name}")
            files.rename(f"{moving}/{name}", f"{kept}/{name}")
            for path in (kept, moving, target):
                files.sync_directory(path)
            _write(files, f"{kept}/{name}/{ARRIVAL_FILE}", arrival_content(assignment.move))
        except OSError as error:
            _give_up(files, f"{kept}/{name}")
            if error.errno in NO_SPACE:
                _give_up(files, f"{moving}/{name}")
            raise
    crash_point("move.complete")
    return copied


def _is_complete(files: Files, copy: str, move: str) -> bool:
    """True if the copy is that of this move. Raises OSError if that cannot be read: it may be
    decided, and is not replaced then.
    """
    try:
        return read_whole(files, f"{copy}/{ARRIVAL_FILE}") == arrival_content(move)
    except FileNotFoundError:
        return False


def _give_up(files: Files, copy: str) -> None:
    """Remove a copy. What cannot be removed is replaced by the next move."""
    with suppress(OSError):
        files.unlink(f"{copy}/{ARRIVAL_FILE}")
    with suppress(OSError):
        remove_tree(files, copy)


@contextmanager
def _locked(place: str) -> Iterator[None]:
    """Keep movers out of the copy. Raises OSError when one works on it."""
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(
                errno.EBUSY, "another `tailrace partition move` copies this partition", place
            ) from None
        yield
    finally:
        os.close(fd)


def discard_copy(files: Files, target: str, assignment: Assignment) -> None:
    """Remove the complete copy of a partition that stays where it is. Raises OSError."""
    remove_tree(files, f"{target}/{BIN_DIRECTORY}/{_name(assignment)}")


def _name(assignment: Assignment) -> str:
    return bin_name(assignment.topic_id, assignment.partition)


def _copy_missing(files: Files, directory: str, copy: str, assignment: Assignment) -> int:
    known = _copied(files, copy)
    pending: dict[str, int] = {}
    count = 0
    if assignment.delay_of and files.exists(f"{directory}/{PENDING_FILE}"):
        pending, count = _copy_pending(files, directory, copy, known, assignment.topic_id)
    names = [
        name
        for name in files.list(directory)
        if not name.endswith((*_LEFT_OUT, BUCKET_SUFFIX, PENDING_FILE))
    ]
    for name in set(files.list(copy)) - set(names) - set(pending):
        files.unlink(f"{copy}/{name}")
    count += sum(
        _copy_rest(files, f"{directory}/{name}", f"{copy}/{name}", known.get(name))
        for name in names
    )
    return count


def _copy_pending(
    files: Files, directory: str, copy: str, known: dict[str, Any], topic_id: bytes
) -> tuple[dict[str, int], int]:
    """Copy `pending.json` and the bucket files that it names. Returns their names with their sizes,
    and the bytes copied. The scheduler removes a file behind the `pending.json` that has dropped
    it, so that is read again when one is missing.
    """
    path = f"{directory}/{PENDING_FILE}"
    for _ in range(PENDING_TRIES):
        content = read_whole(files, path)
        try:
            manifest = Manifest.decode(content)
        except PendingDamagedError as error:
            raise OSError(errno.EIO, str(error), path) from None
        if manifest.topic_id != topic_id.hex():
            return {}, 0  # the scheduler begins without it, too
        ends = {each.file_name: each.end for each in manifest.files}
        try:
            count = sum(
                _copy_rest(files, f"{directory}/{name}", f"{copy}/{name}", known.get(name), end)
                for name, end in ends.items()
            )
        except FileNotFoundError:
            continue
        _write(files, f"{copy}/{PENDING_FILE}", content)
        crash_point("move.delays_copied")
        return {PENDING_FILE: len(content), **ends}, count + len(content)
    raise OSError(
        errno.EBUSY, "a file of delayed records is missing, or they are being moved now", path
    )


def _copied(files: Files, copy: str) -> dict[str, Any]:
    path = f"{copy}/{COPIED_FILE}"
    found = checked_json.decode(read_whole(files, path)) if files.exists(path) else None
    return found if isinstance(found, dict) else {}


def _copy_rest(files: Files, source: str, target: str, known: Any, end: int | None = None) -> int:
    """Copy what the copy of a file lacks, and sync it. `known`: (inode, size, time) of what was
    copied, which is synced; time 0, then boot and a position: it was the beginning of a file that
    grows, the active segment or a bucket file. `end`: of what is copied of a bucket file.
    """
    fd = files.open_for_read(source)
    try:
        found = os.fstat(fd)
        if end is None:
            end = found.st_size
        start = last = 0
        if isinstance(known, list) and len(known) in (3, 5) and known[0] == found.st_ino:
            if known[1:] == [end, found.st_mtime_ns]:
                return 0
            if (
                source.endswith((SEGMENT_SUFFIX, BUCKET_SUFFIX))
                and known[2:4] == [0, this_boot()]
                and known[1] <= end
            ):
                start, last = int(known[1]), int(known[4])
        copy = files.open_for_write(target)
        try:
            pieces = (min(start, HEAD_BYTES), 0), (start - last, last)
            if files.size(copy) < start or any(
                files.read_at(fd, *piece) != files.read_at(copy, *piece) for piece in pieces
            ):
                start = 0  # the segment was cut, or a cleaned one has the inode number
            files.truncate(copy, start)
            position = start
            while position < end:
                data = files.read_at(fd, min(CHUNK_BYTES, end - position), position)
                if not data:
                    raise OSError(errno.EIO, "the file became shorter", source)
                files.write_at(copy, [data], position)
                position += len(data)
            files.sync_data(copy)
        finally:
            files.close(copy)
        return position - start
    finally:
        files.close(fd)


def _write(files: Files, path: str, data: bytes) -> None:
    fd = files.open_for_write(path)
    try:
        files.truncate(fd, 0)
        files.write_at(fd, [data], 0)
        files.sync_data(fd)
    finally:
        files.close(fd)
