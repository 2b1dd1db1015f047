"""Partition files: the segments, indexes and metadata of the partitions that a front reads.

Owner: one front's `LogReader`; reads only.

Invariants:
- A partition's segments are listed again when its state shows another number of them, another
  active one, or that some were replaced. Then all its files are opened again.
- Files of removed segments and of dropped partitions are closed, so that the disk has their room.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from netfront.fetch.log.file_reader import SHORTAGES, FileReader
from netfront.fetch.log.open_files import OpenFiles
from netfront.fetch.log.read_result import ColdRead
from shm.messages.lane_messages import Assignment
from shm.tables.partition_table import PartitionState
from tailrace.format.directory.partition_metadata import PARTITION_FILE, PartitionMetadata
from tailrace.format.segments.segment import INDEX_SUFFIX, SEGMENT_SUFFIX, file_name, segment_bases
from tailrace.format.segments.segment_index import IndexDamagedError, IndexReader

if TYPE_CHECKING:
    from netfront.fetch.log.transaction_indexes import TransactionIndexes

TRANSACTION_INDEX_SUFFIX = ".txnindex"
"""Copy from `tailrace.format.segments.transaction_index`, which is not imported here: see
`_indexes`.
"""
CONTINUATION = b"\xff\xff\xff\xff"
"""The first bytes of an Arrow message."""
SUFFIXES = (SEGMENT_SUFFIX, INDEX_SUFFIX, TRANSACTION_INDEX_SUFFIX)


class PartitionFiles:
    """Open files and segment lists of the partitions that are read."""

    def __init__(self, files: FileReader, data_dirs: list[str], open_files_max: int) -> None:
        self._files = files
        self._data_dirs = data_dirs
        self._segments: dict[bytes, dict[int, tuple[tuple[int, int, int], list[int]]]] = {}
        self._open_files = OpenFiles(files, open_files_max)
        self._transactions: TransactionIndexes | None = None

    def _directory(self, route: Assignment) -> str:
        return f"{self._data_dirs[route.data_dir]}/{route.directory_name}"

    def bases(self, route: Assignment, state: PartitionState) -> list[int]:
        """Return the base offsets of the partition's segments, listed again after a change."""
        of_topic = self._segments.setdefault(route.topic_id, {})
        known = of_topic.get(route.partition)
        key = state.active_segment_base, state.segment_count, state.files_version
        if known is None or known[0][2] != key[2]:  # None: they may be of before a swap
            self._drop_replaced(route)
        if known is not None and known[0] == key and known[1]:
            return known[1]
        bases = segment_bases(
            self._open_files.with_descriptors(self._files.list, self._directory(route))
        )
        of_topic[route.partition] = key, bases
        if known is not None:
            gone = [
                self.path(route, base, suffix)
                for base in set(known[1]) - set(bases)
                for suffix in SUFFIXES
            ]
            self._open_files.close(gone)  # their room on the disk is free only now
            if self._transactions is not None:
                self._transactions.forget(gone)
        return bases

    def _drop_replaced(self, route: Assignment) -> None:
        """Close the partition's files: segments were replaced, with their indexes."""
        self.close(route)
        if self._transactions is not None:
            self._transactions.forget_below(self._directory(route) + "/")

    def close_unused(self) -> bool:
        """See `OpenFiles.close_unused`."""
        return self._open_files.close_unused()

    def forget(self, route: Assignment) -> None:
        """Close the files of a dropped partition."""
        self.close(route)
        if self._transactions is not None:
            self._transactions.forget_below(self._directory(route) + "/")
        self._segments.pop(route.topic_id, None)

    def close(self, route: Assignment) -> None:
        self._open_files.close_below(self._directory(route) + "/")

    def path(self, route: Assignment, base: int, suffix: str = SEGMENT_SUFFIX) -> str:
        return f"{self._directory(route)}/{file_name(base, suffix)}"

    def forget_segments(self, route: Assignment) -> None:
        """List the segments of the topic's partitions at the next read."""
        self._segments.pop(route.topic_id, None)

    def segments_of(
        self, route: Assignment, state: PartitionState, end: int
    ) -> list[tuple[int, int]]:
        """Return (base offset, end offset up to `end`) of each segment, oldest first."""
        bases = self.bases(route, state)
        return [(base, min(following, end)) for base, following in pairwise([*bases, end])]

    def is_aborted(
        self,
        route: Assignment,
        state: PartitionState,
        base: int,
        producer_id: int,
        producer_epoch: int,
        offset: int,
    ) -> bool:
        """True for a batch of an aborted transaction in the segment of this base offset.

        Raises LogReadError (NOT_READY) if the segment's transaction index cannot be read, ColdRead
        if it is read in pieces: call again.
        """
        return self.aborted_in(route, state, base)(producer_id, producer_epoch, offset)

    def aborted_in(
        self, route: Assignment, state: PartitionState, base: int
    ) -> Callable[[int, int, int], bool]:
        """Return `is_aborted` of one segment and state, for a walk over many batches: the index is
        looked up once, when it is needed.
        """
        has: Callable[[int, int, int], bool] | None = None

        def is_aborted(producer_id: int, producer_epoch: int, offset: int) -> bool:
            nonlocal has
            if not state.aborted_version:
                return False
            if has is None:
                path = self.path(route, base, TRANSACTION_INDEX_SUFFIX)
                indexes = self._indexes()
                has = indexes.of(path, base, state.aborted_version, state.leader_epoch).has
            return has(producer_id, producer_epoch, offset)

        return is_aborted

    def read_at(self, route: Assignment, base: int, length: int, position: int) -> bytes:
        """Return up to `length` bytes of a segment file.

        Blocks on the disk. Raises OSError, LogReadError (NOT_READY).
        """
        return self._files.read_at(self._open_files.open(self.path(route, base)), length, position)

    def _indexes(self) -> TransactionIndexes:
        """Return the transaction indexes.

        They are loaded at the first aborted transaction, so that a front starts sooner.
        """
        if self._transactions is None:
            from netfront.fetch.log.transaction_indexes import TransactionIndexes

            self._transactions = TransactionIndexes(self._files, self._open_files)
        return self._transactions

    def index(self, route: Assignment, base: int) -> IndexReader:
        """Return a segment's index.

        Raises IndexDamagedError, also if it is missing or not a file, and OSError.
        """
        try:
            fd = self._open_files.open(self.path(route, base, INDEX_SUFFIX))
            return IndexReader(
                lambda length, position: self._files.read_at(fd, length, position),
                self._files.size(fd),
                base,
            )
        except OSError as error:
            if error.errno in SHORTAGES:
                raise
            raise IndexDamagedError(str(error)) from error

    def schema_end(self, route: Assignment, base: int, *, from_file: bool = False) -> int:
        """Return the position of a segment's first batch, from the index if possible: the schema
        message may be damaged. `from_file`: from the schema message if possible, since the index
        may be that of another file.
        """
        if from_file:
            head = self._files.read_at(self._open_files.open(self.path(route, base)), 8, 0)
            if head[:4] == CONTINUATION:
                return 8 + int.from_bytes(head[4:8], "little")
        try:
            index = self.index(route, base)
            if index.count:
                return index.entry(0).file_position
        except IndexDamagedError:
            pass
        head = self._files.read_at(self._open_files.open(self.path(route, base)), 8, 0)
        return 8 + int.from_bytes(head[4:8], "little")

    def metadata(self, route: Assignment) -> PartitionMetadata | None:
        """Return what the partition's metadata file holds; None if it cannot be read."""
        try:
            fd = self._open_files.with_descriptors(
                self._files.open_for_read, f"{self._directory(route)}/{PARTITION_FILE}"
            )
        except OSError:
            return None
        try:
            return PartitionMetadata.decode(self._files.read_at(fd, self._files.size(fd), 0))
        except OSError:
            return None
        finally:
            self._files.close(fd)

    def open(self, route: Assignment, base: int) -> int:
        """Return a descriptor of a segment file, which stays this object's."""
        return self._open_files.open(self.path(route, base))

    def read_into(self, fd: int, target: memoryview, position: int, blocking: bool) -> int:
        """Read into `target` and return the number of bytes.

        Raises ColdRead, unless `blocking`, if it would wait for the disk.
        """
        try:
            return self._files.read_into(fd, target, position, blocking=blocking)
        except BlockingIOError:
            raise ColdRead(fd, position, len(target)) from None
