"""Segment swap: a run of sealed segments replaced by one cleaned segment, as one durable step.

    files beside the segments                 a start finds           it
    ----------------------------------------  ----------------------  ----------------------------
    <base>.cleaned, <base>.cleanedindex       no swap.json            removes them: nothing changed
    the same, and swap.json                   the intent              carries the swap out
    <base>.arrows is the cleaned one, others  the intent              removes the others
    of the run are there or not
    checkpoints know the cleaned segment      the intent              removes the intent

The swap is decided when swap.json has its name. It stays until both checkpoints know the cleaned
segment, because a checkpoint that names removed segments would report them as lost.

Owner: the flusher. The cleaner writes the `.cleaned` files, synced, and nothing else.

Invariants:
- A partition has at most one intent.
- No segment is changed before the intent is durable: it may have its name already when the sync of
  the directory fails, or a kill comes before it.
- Carrying out a swap again changes nothing.

Readers of a directory without an appliance see the same by
`tailrace.format.unfinished_swap`.

Crash: see the table.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from shm.crash_points import crash_point
from tailrace.format.directory import checked_json
from tailrace.format.directory.data_dir import SWAP_FILE as SWAP_FILE
from tailrace.format.segments.segment import (
    INDEX_SUFFIX,
    PRODUCERS_SUFFIX,
    SEGMENT_SUFFIX,
    file_name,
)
from tailrace.format.segments.transaction_index import TRANSACTION_INDEX_SUFFIX
from tailrace.format.unfinished_swap import CLEANED_SUFFIX as CLEANED_SUFFIX
from workers.segment.checkpoint import Checkpoint, SealedSegment
from workers.segment.files import Files, read_whole, write_durably

logger = logging.getLogger(__name__)

CLEANED_INDEX_SUFFIX = ".cleanedindex"
FORMAT_VERSION = 2
"""2 may have `has_transactions`. A build that knows 1 alone would remove the index that stays, and
refuses it.
"""


class SwapDamagedError(OSError):
    """The intent of a swap cannot be read."""


class CleanedRun(NamedTuple):
    """One cleaned segment, and the run of segments that it stands for."""

    base: int
    end: int
    """Start of the segment after the run."""
    replaced: list[list[int]]
    """[base, size] of each segment of the run."""
    size: int
    batch_count: int
    max_timestamp_us: int
    last_append_us: int
    has_transactions: int = 0
    """1: its batches of transactions are those of the one segment that it replaces, whose index of
    transactions stays.
    """

    @property
    def sealed(self) -> SealedSegment:
        """The facts of the cleaned segment."""
        return SealedSegment(
            self.base, self.size, self.batch_count, self.max_timestamp_us, self.last_append_us,
            self.has_transactions,
        )  # fmt: skip


def write_intent(files: Files, directory: str, run: CleanedRun) -> None:
    """Decide the swap, durably. Raises OSError; the swap is decided then, too, if `has_intent`."""
    content = {"format": FORMAT_VERSION, **run._asdict()}
    if not run.has_transactions:  # as format 1, which other builds can finish
        content["format"] = 1
        del content["has_transactions"]
    write_durably(files, directory, SWAP_FILE, checked_json.encode(content))


def has_intent(files: Files, directory: str) -> bool:
    """True if a swap is decided and not finished. Raises OSError."""
    return files.exists(f"{directory}/{SWAP_FILE}")


def read_intent(files: Files, directory: str) -> CleanedRun | None:
    """Return the swap that is decided and not finished, or None. Raises OSError."""
    if not has_intent(files, directory):
        return None
    path = f"{directory}/{SWAP_FILE}"
    content: Any = checked_json.decode(read_whole(files, path))
    try:
        if not 1 <= content["format"] <= FORMAT_VERSION:
            raise SwapDamagedError(f"{path} has format {content['format']}")
        del content["format"]
        return CleanedRun(**content)
    except (TypeError, KeyError):
        raise SwapDamagedError(
            f"{path} is damaged; if the directory has a file *{CLEANED_SUFFIX}, remove both: the "
            "segments are those from before"
        ) from None


def carry_out(files: Files, directory: str, run: CleanedRun) -> None:
    """Put the cleaned segment in its place and remove the others of its run. Raises OSError; then
    call it again.

    The old index goes first: a reader that opens the cleaned segment finds its index or none.
    """
    files.sync_directory(directory)  # the intent
    old_index = f"{directory}/{file_name(run.base, INDEX_SUFFIX)}"
    is_index_old = files.exists(f"{directory}/{file_name(run.base, CLEANED_INDEX_SUFFIX)}")
    if is_index_old and files.exists(old_index):
        files.unlink(old_index)
    for cleaned, suffix in (
        (CLEANED_SUFFIX, SEGMENT_SUFFIX),
        (CLEANED_INDEX_SUFFIX, INDEX_SUFFIX),
    ):
        source = f"{directory}/{file_name(run.base, cleaned)}"
        if files.exists(source):
            files.rename(source, f"{directory}/{file_name(run.base, suffix)}")
            crash_point("flusher.in_swap")
    gone = [] if run.has_transactions else [(run.base, TRANSACTION_INDEX_SUFFIX)]
    for base, _ in run.replaced[1:]:
        gone += [
            (base, suffix)
            for suffix in (SEGMENT_SUFFIX, INDEX_SUFFIX, TRANSACTION_INDEX_SUFFIX, PRODUCERS_SUFFIX)
        ]
    for base, suffix in gone:
        path = f"{directory}/{file_name(base, suffix)}"
        if files.exists(path):
            files.unlink(path)
    files.sync_directory(directory)


def remove_intent(files: Files, directory: str) -> None:
    """Forget a finished swap, durably. Both checkpoints must know the cleaned segment. Raises
    OSError.
    """
    path = f"{directory}/{SWAP_FILE}"
    if files.exists(path):
        files.unlink(path)
        files.sync_directory(directory)


def remove_cleaned(files: Files, directory: str) -> None:
    """Remove cleaned segments that are not part of a decided swap. Raises OSError."""
    for name in files.list(directory):
        if name.endswith((CLEANED_SUFFIX, CLEANED_INDEX_SUFFIX)):
            files.unlink(f"{directory}/{name}")


def finish_swap(files: Files, directory: str) -> CleanedRun | None:
    """Finish or undo what a predecessor left. Returns the swap that is now carried out, whose
    intent is still there. Raises OSError.
    """
    run = read_intent(files, directory)
    if run is not None:
        carry_out(files, directory, run)
        logger.info(
            "swap_finished directory=%s base=%d segments=%d", directory, run.base, len(run.replaced)
        )
    remove_cleaned(files, directory)
    return run


def patched(checkpoint: Checkpoint, run: CleanedRun) -> Checkpoint | None:
    """The checkpoint with the cleaned segment instead of its run. None if it knows a segment of the
    run as the active one: its positions are those of a file that is gone.
    """
    gone = {base for base, _ in run.replaced}
    if checkpoint.segment_base in gone:
        return None
    if not any(segment.base in gone for segment in checkpoint.sealed):
        return checkpoint
    kept = [segment for segment in checkpoint.sealed if segment.base not in gone]
    from dataclasses import replace  # a start without a swap does not need it

    return replace(checkpoint, sealed=sorted([*kept, run.sealed]))
