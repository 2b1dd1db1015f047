"""Transaction indexes of a partition: written as transactions are aborted, repaired at a start.

`tailrace.format.segments.transaction_index` has the format and its readers' rules.

Owner: the flusher.

Invariants:
- While `is_behind`, the last stable offset does not move: an entry, or a segment's index, is not
  written yet.
- An entry goes to each segment with an index that the transaction can have batches in. One too many
  is harmless, since an epoch has a single transaction.
- What a checkpoint covers has its entries synced, and the names of its indexes.

Crash: `recover` compares the indexes of the walked segments with their headers. An entry whose
marker a damaged range has lost stays: nothing else knows of it. Those of earlier segments were
synced, and the scrubber checks them.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tailrace.format.directory.partition_metadata import PartitionMetadata
from tailrace.format.record_batch.batch_header import CONTROL_ABORT
from tailrace.format.segments.segment import Walk, file_name, schema_message_length, segment_bases
from tailrace.format.segments.transaction_index import (
    HEADER,
    TRANSACTION_INDEX_SUFFIX,
    AbortedTransaction,
    TransactionIndexDamagedError,
    decode_transaction_index,
    encode_entry,
    encode_header,
)
from workers.log.producers.transaction_rules import EndedTransaction
from workers.segment.files import Files
from workers.segment.segment_index_files import open_if_plain, open_index
from workers.segment.segment_reader import SegmentReader, walk_past_damage

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class WalkedTransactions:
    """Transactions that recovery has met on its walk, which began at `start`."""

    start: int = 0
    has_checkpoint: bool = False
    """False if nothing says what was synced before `start`."""
    bases: set[int] = field(default_factory=set)
    """Walked segments with transactional batches."""
    aborted: list[AbortedTransaction] = field(default_factory=list)

    def note(self, base: int, ended: EndedTransaction | None) -> None:
        """Record a transactional batch in segment `base`."""
        self.bases.add(base)
        if ended is not None and ended.is_aborted:
            self.aborted.append(_entry_of(ended))


def _entry_of(ended: EndedTransaction) -> AbortedTransaction:
    """The entry of an aborted transaction. Without a known beginning it begins with the log: its
    epoch has no other batches.
    """
    return AbortedTransaction(
        ended.producer_id, ended.epoch, max(0, ended.first_offset), ended.marker_offset
    )


class TransactionIndexes:
    """The transaction indexes of one partition."""

    def __init__(self, files: Files, directory: str) -> None:
        self._files = files
        self._directory = directory
        self._sizes: dict[int, int] = {}
        """Bytes of each index, by segment base."""
        self._begun: dict[int, None] = {}
        """Segments with transactional batches whose index has to be created."""
        self._rebuilt: dict[int, None] = {}
        """Segments whose index has to be made again from their headers."""
        self._aborted: list[AbortedTransaction] = []
        self._unsynced: set[int] = set()
        self._has_new_names = False
        """True if the directory may have names of indexes that are not synced."""
        self.version = 0
        """Grows with each entry, over restarts too. 0: no segment has an entry."""

    @property
    def is_behind(self) -> bool:
        return bool(self._aborted or self._begun or self._rebuilt)

    def has(self, base: int) -> bool:
        """True if the segment has transactional batches."""
        return base in self._sizes or base in self._begun or base in self._rebuilt

    def note(self, base: int, ended: EndedTransaction | None) -> None:
        """Record a transactional batch that was placed in segment `base`."""
        if base not in self._sizes:
            self._begun[base] = None
        if ended is not None and ended.is_aborted:
            self._aborted.append(_entry_of(ended))

    def note_rewritten(self, earlier: int, base: int) -> None:
        """Record that batches of segment `earlier` have moved to a new segment, `base`."""
        if self.has(earlier):
            self._rebuilt[base] = None

    def forget(self, base: int) -> None:
        """Forget the index of a segment that was removed."""
        self._sizes.pop(base, None)
        self._begun.pop(base, None)
        self._rebuilt.pop(base, None)
        self._unsynced.discard(base)

    # ---- writing ---------------------------------------------------------------------------------

    def write(self, bases: Sequence[int], partition_file: PartitionMetadata) -> None:
        """Write what is missing. `bases`: of all segments, ascending. Raises OSError; then nothing
        is forgotten.
        """
        for base in list(self._begun):
            self._replace(base, [])
            del self._begun[base]
        if self._aborted:
            entries: dict[int, list[AbortedTransaction]] = {}
            for aborted in self._aborted:
                for base in _touched(bases, aborted):
                    if base in self._sizes:
                        entries.setdefault(base, []).append(aborted)
            for base, of_segment in entries.items():
                self._append(base, of_segment)
            self.version = max(self.version, self._aborted[-1].marker_offset) + 1
            self._aborted = []
        for base in list(self._rebuilt):
            self.rebuild(base, bases, partition_file)
            del self._rebuilt[base]

    def sync(self) -> None:
        """Make all entries durable. Raises OSError; then the index is made again, since a failed
        sync leaves pages that look clean.
        """
        for base in list(self._unsynced):
            try:
                fd = self._files.open_for_write(self._path(base))
                try:
                    self._files.sync_data(fd)
                finally:
                    self._files.close(fd)
            except OSError:
                self._rebuilt[base] = None
                raise
            self._unsynced.discard(base)
        if self._has_new_names:
            self._files.sync_directory(self._directory)
            self._has_new_names = False

    def _path(self, base: int) -> str:
        return f"{self._directory}/{file_name(base, TRANSACTION_INDEX_SUFFIX)}"

    def _append(self, base: int, entries: Sequence[AbortedTransaction]) -> None:
        data = b"".join(map(encode_entry, entries))
        fd = open_index(self._files, self._path(base))
        try:
            self._files.write_at(fd, [data], self._sizes[base])
        finally:
            self._files.close(fd)
        # Only now: after a failed write the same entries go to the same place.
        self._sizes[base] += len(data)
        self._unsynced.add(base)

    def _replace(self, base: int, entries: Sequence[AbortedTransaction]) -> None:
        """Write a whole index, durably: older entries must not reappear."""
        data = encode_header(base) + b"".join(map(encode_entry, entries))
        self._has_new_names = True
        fd = open_index(self._files, self._path(base))
        try:
            self._files.truncate(fd, 0)
            self._files.write_at(fd, [data], 0)
            self._files.sync_data(fd)
        finally:
            self._files.close(fd)
        self._sizes[base] = len(data)
        self._unsynced.discard(base)

    # ---- repairing -------------------------------------------------------------------------------

    def recover(
        self, bases: Sequence[int], partition_file: PartitionMetadata, walked: WalkedTransactions
    ) -> None:
        """Take over the indexes that are there, and repair those of walked segments and of segments
        that a walked marker concerns; all of them if there was no checkpoint. Raises OSError.
        """
        present = {
            base
            for base in segment_bases(self._files.list(self._directory), TRANSACTION_INDEX_SUFFIX)
            if base in bases
        }
        self._has_new_names = bool(present)  # of a predecessor that was killed
        for base in sorted(present):
            fd = open_if_plain(self._files, self._path(base))
            if fd is None:
                self._rebuilt[base] = None
                continue
            try:
                self._sizes[base] = self._files.size(fd)
            finally:
                self._files.close(fd)
        first_walked = max(0, bisect_right(bases, walked.start) - 1)
        concerned = {base for aborted in walked.aborted for base in _touched(bases, aborted)}
        of_walk = present & {*bases[first_walked if walked.has_checkpoint else 0 :]}
        for base in sorted(walked.bases | of_walk | (concerned & present)):
            found = self._read(base)
            if base < walked.start and (found is None or not walked.has_checkpoint):
                self._rebuilt[base] = None  # the walk has not met all of it
                continue
            entries = [
                each
                for each in found or []
                if each.marker_offset < walked.start
                or partition_file.damage_at(each.marker_offset) is not None
            ]
            entries += [each for each in walked.aborted if base in _touched(bases, each)]
            entries.sort(key=lambda each: each.marker_offset)
            if found != entries:
                logger.info("transaction_index_repaired path=%s", self._path(base))
                self._replace(base, entries)
            else:
                self._unsynced.add(base)  # by a predecessor that was killed
        self.write(bases, partition_file)
        if any(size > HEADER.size for size in self._sizes.values()):
            end = bases[-1] if bases else 0
            newest = walked.aborted[-1].marker_offset if walked.aborted else 0
            self.version = max(1, walked.start, end, newest + 1)

    def continue_above(self, version: int) -> None:
        """Have a version above one that readers may know, from a predecessor that has died."""
        if self.version:
            self.version = max(self.version, version + 1)

    def is_right(self, base: int) -> bool:
        """True if a segment's index is intact, or the segment has none. Raises OSError."""
        return base not in self._sizes or self._read(base) is not None

    def _read(self, base: int) -> list[AbortedTransaction] | None:
        """The entries of an index. None: it is missing or damaged."""
        fd = open_if_plain(self._files, self._path(base))
        if fd is None:
            return None
        try:
            return decode_transaction_index(self._files.read_at(fd, self._files.size(fd), 0), base)
        except TransactionIndexDamagedError:
            return None
        finally:
            self._files.close(fd)

    def rebuild(self, base: int, bases: Sequence[int], partition_file: PartitionMetadata) -> None:
        """Make an index again from the headers of its segment and of those after it, until each
        transaction in the segment has its marker. Raises OSError.
        """
        unended: set[tuple[int, int]] = set()
        entries: list[AbortedTransaction] = []
        has_transactions = False
        following = [*bases[bisect_left(bases, base) :], None]
        for at, end in pairwise(following):
            assert at is not None
            if at != base and not unended:
                break
            fd = self._files.open_for_read(f"{self._directory}/{file_name(at)}")
            try:
                reader = SegmentReader(self._files, fd)
                walk = Walk(schema_message_length(reader.read_at), at)
                for _, header in walk_past_damage(
                    reader, walk, partition_file.seed, at, partition_file.damage
                ):
                    if end is not None and header.base_offset >= end:
                        break  # given up after a failed sync: the next segment has this batch
                    if not header.is_transactional:
                        continue
                    key = header.producer_id, header.producer_epoch
                    has_transactions = has_transactions or at == base
                    if not header.is_marker:
                        if at == base:
                            unended.add(key)
                    elif at == base or key in unended:
                        unended.discard(key)
                        if header.control_type == CONTROL_ABORT:
                            entries.append(AbortedTransaction(*key, base, header.base_offset))
            finally:
                self._files.close(fd)
        if has_transactions:
            self._replace(base, entries)
            logger.info(
                "transaction_index_rebuilt path=%s entries=%d", self._path(base), len(entries)
            )
            if entries:
                self.version = max(self.version + 1, entries[-1].marker_offset + 1)


def _touched(bases: Sequence[int], aborted: AbortedTransaction) -> Sequence[int]:
    """The segments that lie between a transaction's first batch and its marker."""
    first = max(0, bisect_right(bases, aborted.first_offset) - 1)
    return bases[first : bisect_right(bases, aborted.marker_offset)]
