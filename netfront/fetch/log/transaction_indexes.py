"""Transaction indexes of the segments that a front reads, in memory (`AbortedBatches`).

Owner: one front's `LogReader`; reads only.

Invariants:
- What is known of a segment covers every transaction that was aborted when the partition's state
  with this `aborted_version` was published: the flusher writes the entry before.
- A damaged or missing index is an error, never an empty one.
- Nothing is kept over a new leader epoch, in which the log's end and its indexes may be others.
- At most ENTRIES_MAX entries are kept, or those of one segment.
- One call decodes at most ENTRIES_AT_ONCE entries.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from netfront.fetch.log.file_reader import SHORTAGES, FileReader
from netfront.fetch.log.open_files import OpenFiles
from netfront.fetch.log.read_result import ColdRead, LogReadError
from tailrace.core.error_codes import ErrorCode
from tailrace.format.segments.transaction_index import (
    ENTRY,
    HEADER,
    AbortedBatches,
    TransactionIndexDamagedError,
    check_header,
    decode_entries,
)

logger = logging.getLogger(__name__)

ENTRIES_MAX = 1 << 18
"""About 40 MB."""
ENTRIES_AT_ONCE = 4_096
_PIECE_BYTES = ENTRIES_AT_ONCE * ENTRY.size
_TRIES = 3


class _Known:
    __slots__ = ("aborted", "aborted_version", "file_size", "leader_epoch", "size")

    def __init__(self, leader_epoch: int) -> None:
        self.aborted = AbortedBatches([])
        self.leader_epoch = leader_epoch
        self.aborted_version = -1
        """That of the partition's state at the last look at the file."""
        self.size = 0
        """Bytes of the file that are in `aborted`."""
        self.file_size = 0


class TransactionIndexes:
    """The aborted batches of segments, by the path of their index."""

    def __init__(self, files: FileReader, open_files: OpenFiles) -> None:
        self._files = files
        self._open_files = open_files
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._damaged: dict[str, str] = {}
        """Reasons that were logged, by path."""

    def of(self, path: str, base: int, aborted_version: int, leader_epoch: int) -> AbortedBatches:
        """Return the aborted batches of the segment with this base offset. `aborted_version` and
        `leader_epoch` are the partition state's.

        Raises LogReadError (NOT_READY) if its index is missing or damaged: the flusher repairs it
        at its next start. Raises ColdRead if a part of the index is left to read: call again.
        """
        known = self._known.get(path)
        if known is not None and known.leader_epoch != leader_epoch:
            known = None
        if known is not None and known.aborted_version == aborted_version:
            self._known.move_to_end(path)
            return known.aborted
        try:
            known = self._updated(path, base, known or _Known(leader_epoch))
        except (OSError, TransactionIndexDamagedError) as error:
            if isinstance(error, OSError) and error.errno in SHORTAGES:
                raise
            self.forget([path])
            if self._damaged.get(path) != str(error):
                self._damaged[path] = str(error)
                logger.error("transaction_index_damaged path=%s reason=%r", path, str(error))
            raise LogReadError(
                ErrorCode.NOT_READY, f"the transaction index {path} cannot be read: {error}"
            ) from None
        self._damaged.pop(path, None)
        self._known[path] = known
        self._known.move_to_end(path)
        self._shrink()
        if known.size < known.file_size:
            known.aborted_version = -1
            raise ColdRead(self._open_files.open(path), known.size, _PIECE_BYTES)
        known.aborted_version = aborted_version
        return known.aborted

    def forget(self, paths: list[str]) -> None:
        """Forget indexes whose files are closed or removed."""
        for path in paths:
            self._known.pop(path, None)

    def forget_below(self, prefix: str) -> None:
        """Forget the indexes of a partition's directory, and what was logged of them."""
        self.forget([path for path in self._known if path.startswith(prefix)])
        for path in [path for path in self._damaged if path.startswith(prefix)]:
            del self._damaged[path]

    def _updated(self, path: str, base: int, known: _Known) -> _Known:
        """Read a piece of what was appended to the index since the last look, or of all of it."""
        fd = self._open_files.open(path)
        if self._files.is_removed(fd):  # the flusher has replaced it
            self._open_files.close([path])
            fd, known = self._open_files.open(path), _Known(known.leader_epoch)
        size = self._files.size(fd)
        for _ in range(_TRIES):
            if (size - HEADER.size) % ENTRY.size == 0:
                break
            size = self._files.size(fd)  # an entry is being written
        else:
            raise TransactionIndexDamagedError(f"{size} bytes are no whole number of entries")
        if size < known.size:
            known = _Known(known.leader_epoch)
        if not known.size:
            check_header(self._files.read_at(fd, HEADER.size, 0), base)
            known.size = HEADER.size
        known.file_size = size
        if known.size < size:
            piece = self._files.read_at(fd, min(size - known.size, _PIECE_BYTES), known.size)
            if not piece:
                raise TransactionIndexDamagedError(f"the file ends at byte {known.size}")
            known.aborted.add(decode_entries(piece))
            known.size += len(piece)
        return known

    def _shrink(self) -> None:
        count = sum(len(known.aborted) for known in self._known.values())
        while count > ENTRIES_MAX and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            count -= len(oldest.aborted)
