"""LocalSource: reads a partition's batches from local segment files, verified and without copies.

A segment is mapped, and its pages are requested before they are touched (MADV_POPULATE_READ). So an
unreadable page raises OSError instead of SIGBUS. If the kernel lacks this (Linux before 5.14) or
mapping is not possible (RLIMIT_AS), batches are read into memory. If only headers are needed,
bodies are not read, and headers are verified by their own checksum.

Owner: one reader. Files are only read, up to the settled end that the caller passes.

Invariants:
- Each batch begins at the end of the previous one, in bytes and in offsets.
- Returned data never changes: bytes below the settled end are final, and a mapping outlives the
  file's name.
- Batches of aborted transactions are left out, unless `is_uncommitted`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa

from tailrace.core.errors import (
    CorruptBatchError,
    OffsetOutOfRangeError,
    StorageError,
    UnknownTopicIdError,
)
from tailrace.core.topic_partition import TopicPartition
from tailrace.format.directory.partition_metadata import PARTITION_FILE, PartitionMetadata
from tailrace.format.record_batch.arrow_metadata import read_schema
from tailrace.format.record_batch.batch_header import (
    HEADER_BYTES,
    PREFIX_BYTES,
    BatchChecksumError,
    BatchFormatError,
    BatchHeader,
    compute_header_crc,
    header_position,
    metadata_size_of,
    read_header,
    verify_batch,
)
from tailrace.format.record_batch.sparse_layout import is_cleaned_schema
from tailrace.format.schema import from_message
from tailrace.format.segments.segment import (
    INDEX_SUFFIX,
    OLD_SEGMENT_SUFFIX,
    SEGMENT_SUFFIX,
    file_name,
    find_behind,
    first_batch_position,
    schema_message_length,
    segment_bases,
)
from tailrace.format.segments.segment_index import IndexDamagedError, IndexReader
from tailrace.format.segments.transaction_index import AbortedBatches, AbortedTransaction
from tailrace.format.unfinished_swap import replaced_segments
from tailrace.scanning.batch import StoredBatch, damage_error
from tailrace.scanning.sources.transactions import read_aborted

WINDOW_BYTES = 8 << 20
"""Bytes of a mapping that are requested at a time."""
HEAD_BYTES = 4 << 10
HEADS_AT_ONCE_BYTES = 256 << 10
"""Read size for headers where batches are small."""
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""O_NONBLOCK: do not wait on a path that is not a plain file."""
_MADV_POPULATE_READ = 22
NAMES_ATTEMPTS = 100
"""Attempts when a segment is renamed between listing and opening.
A dangling link fails each time.
"""
EHWPOISON = 133
_UNREADABLE = (errno.EFAULT, EHWPOISON)
"""Errors of MADV_POPULATE_READ for a page that disk or memory cannot read."""
SETTLED_NS = 1_000_000_000
"""Age of a directory's time from which it tells of every change. The clock of file systems has
ticks of milliseconds, and two changes in one tick show one time (as in Git's racy-git.txt).
"""
_NOT_LISTED: tuple[int, dict[int, str], list[int]] = (-1, {}, [])
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def read_partition_file(directory: str) -> PartitionMetadata | None:
    """Read `partition.json`, None if it cannot be read or is damaged."""
    try:
        with open(f"{directory}/{PARTITION_FILE}", "rb") as file:
            return PartitionMetadata.decode(file.read())
    except OSError:
        return None


class LocalSource:
    """The segments of one partition. `known` is its `partition.json` when it was opened."""

    def __init__(
        self,
        directory: str,
        known: PartitionMetadata,
        *,
        headers_only: bool,
        with_offsets: bool = False,
        schema: pa.Schema,
        aborted: Iterable[AbortedTransaction] | None = None,
        is_uncommitted: bool = False,
    ) -> None:
        """With `with_offsets`, sparse batches are read whole, also where headers are enough for the
        others: the offsets of their rows are in them. `schema` is the topic's, for segments whose
        own schema is lost. `aborted` are the aborted transactions if they are known; None: the
        segments' transaction indexes name them.
        """
        self._aborted = None if aborted is None else AbortedBatches(list(aborted))
        self._is_uncommitted = is_uncommitted
        self.directory = directory
        self.known = known
        self.key = TopicPartition(known.topic, known.partition)
        self._listing = _NOT_LISTED
        self._headers_only = headers_only
        self._with_offsets = with_offsets
        self._schemas = {message: from_message(message) for message in known.schemas.values()}
        self._by_id = {
            schema_id: self._schemas[message] for schema_id, message in known.schemas.items()
        }
        self.schema = schema

    def close(self) -> None:
        """Do nothing: no file is open between two segments."""

    def with_headers_only(self) -> LocalSource:
        """The same source, for headers only."""
        other = LocalSource(self.directory, self.known, headers_only=True, schema=self.schema)
        other._aborted, other._is_uncommitted = self._aborted, self._is_uncommitted
        return other

    def bases(self) -> dict[int, str]:
        """Base offset -> path of the segment, ascending, without those that a cleaned one has
        replaced. Raises OSError.
        """
        names = os.listdir(self.directory)
        replaced = replaced_segments(self.directory, names)
        return {
            base: f"{self.directory}/{file_name(base, suffix)}"
            for suffix in (OLD_SEGMENT_SUFFIX, SEGMENT_SUFFIX)
            for base in segment_bases(names, suffix)
            if base not in replaced
        }

    def _listed(self) -> tuple[dict[int, str], list[int]]:
        """The segments and their bases in order. The directory is listed again when names in it
        have changed: it may have thousands. Raises OSError.
        """
        changed_ns = os.stat(self.directory).st_mtime_ns
        if self._listing[0] == changed_ns:
            return self._listing[1:]
        is_settled = time.time_ns() - changed_ns >= SETTLED_NS
        bases = self.bases()
        listing = changed_ns, bases, sorted(bases)
        if is_settled:
            self._listing = listing
        return listing[1:]

    def frames(self, start: int, end: int) -> Iterator[StoredBatch]:
        """Yield the batches of offsets `start` to `end - 1`, as `Source` specifies.

        Raises UnknownTopicError if the topic was deleted, OffsetOutOfRangeError if retention
        removed the offsets, StorageError.
        """
        offset, attempts = start, 0
        while offset < end:
            self._raise_if_gone(offset)
            try:
                bases, ordered = self._listed()
                at = bisect_right(ordered, offset) - 1
                if at < 0:
                    raise damage_error(
                        self.key,
                        offset,
                        min(ordered[0], end) if ordered else end,
                        "no segment has them",
                    )
                base, following = ordered[at], (ordered[at + 1] if at + 1 < len(ordered) else end)
                with _OpenSegment(bases[base]) as segment:
                    limit = min(following, end)
                    reached = yield from self._segment_frames(segment, base, offset, limit)
                    # A batch may go beyond: the next segments have been united with this one.
                    offset, attempts = max(limit, reached), 0
            except FileNotFoundError as error:
                attempts += 1  # segments were renamed, or the topic is deleted
                self._listing = _NOT_LISTED
                if attempts >= NAMES_ATTEMPTS:
                    raise StorageError(
                        f"{self.key.topic}-{self.key.partition} has no readable segment file at "
                        f"offset {offset}: {error}"
                    ) from error
            except OSError as error:
                raise StorageError(
                    f"{self.key.topic}-{self.key.partition} cannot be read at offset {offset}: "
                    f"{error}"
                ) from error

    def _segment_frames(
        self, segment: _OpenSegment, base: int, start: int, limit: int
    ) -> Generator[StoredBatch, None, int]:
        """Yield the batches that have offsets from `start` to `limit - 1`. Returns the offset
        behind the last one.
        """
        schema, position = self._beginning(segment, base)
        take: Callable[[int, int], tuple[BatchHeader, pa.Buffer | None] | None]
        take = segment.head_at if self._headers_only else segment.batch_at
        aborted = self._aborted
        offset = base
        found = self._indexed(segment, base, start)
        if found is not None and _is_at(segment, found, self.known.seed):
            offset, position = found
        while offset < limit:
            try:
                if aborted:  # no body is read of what is left out
                    taken = segment.head_at(position, self.known.seed)
                    if taken is None or not _is_aborted(taken[0], aborted):
                        taken = take(position, self.known.seed)
                else:
                    taken = take(position, self.known.seed)
                if self._with_offsets and taken is not None and taken[0].is_sparse:
                    taken = segment.batch_at(position, self.known.seed)
                if taken is None:
                    raise BatchFormatError("the segment ends before these offsets")
                header, data = taken
                if header.base_offset != offset:
                    raise BatchFormatError(
                        f"the batch has offset {header.base_offset}; expected {offset}"
                    )
            except BatchFormatError as error:
                raise self._damaged(
                    segment, position, offset, max(offset, start), limit, error.reason
                ) from None
            if header.next_offset > start:
                if aborted is None and header.is_transactional and not self._is_uncommitted:
                    aborted = read_aborted(self.directory, base)
                if not aborted or not _is_aborted(header, aborted):
                    yield StoredBatch(header, data, self._by_id.get(header.schema_id, schema))
            offset, position = header.next_offset, position + header.batch_length
        return offset

    def _beginning(self, segment: _OpenSegment, base: int) -> tuple[pa.Schema, int]:
        """The topic's schema with which the segment was written, and the position of its first
        batch. Sparse batches have one more column.

        A damaged schema message is replaced by the one in `partition.json`.
        """
        length = schema_message_length(segment.read_at)
        message = segment.read_at(length, 0) if length else b""
        found = self._schemas.get(message)
        if found is not None:
            return found, length
        for topic_message, schema in self._schemas.items():
            if length and is_cleaned_schema(message, read_schema(topic_message)):
                return schema, length
        message = next(iter(self.known.schemas.values()), b"")
        position = first_batch_position(segment.read_at, segment.size, self.known.seed, base)
        return self._schemas.get(message, self.schema), position or len(message)

    def _indexed(self, segment: _OpenSegment, base: int, start: int) -> tuple[int, int] | None:
        """(offset, position) of the batch with `start` by the index,
        None if there is no usable entry.
        """
        if start == base:
            return None
        try:
            fd = os.open(f"{self.directory}/{file_name(base, INDEX_SUFFIX)}", OPEN_FLAGS)
            try:
                found = IndexReader(
                    lambda length, at: os.pread(fd, length, at), os.fstat(fd).st_size, base
                ).find_offset(start)
            finally:
                os.close(fd)
        except (OSError, IndexDamagedError):
            return None
        return (
            None
            if found is None or found.file_position >= segment.size
            else (found.base_offset, found.file_position)
        )

    # ---- what is missing -------------------------------------------------------------------------

    def _damaged(
        self, segment: _OpenSegment, position: int, offset: int, first: int, limit: int, reason: str
    ) -> CorruptBatchError:
        """The error for the batch of `offset` at `position`, with the range that is lost from
        `first` on.
        """
        self._raise_if_gone(offset)
        known = self.known.damage_at(offset)
        if known is not None:
            return damage_error(self.key, first, known.end, "known damage")
        behind = find_behind(segment.read_at, segment.size, position, self.known.seed, offset)
        following = limit if behind is None else min(behind.offset, limit)
        return damage_error(self.key, first, max(following, first + 1), reason)

    def _raise_if_gone(self, offset: int) -> None:
        """Check by the current `partition.json` that the log still has `offset`.

        Raises UnknownTopicError, OffsetOutOfRangeError.
        """
        now = read_partition_file(self.directory)
        where = f"{self.key.topic}-{self.key.partition}"
        if now is None and os.path.exists(f"{self.directory}/{PARTITION_FILE}"):
            return  # an unreadable file proves nothing
        if now is None or now.topic_id != self.known.topic_id:
            raise UnknownTopicIdError(
                f"topic {self.key.topic!r} was deleted while it was scanned, at offset {offset} "
                f"of {where}"
            )
        if now.log_start_offset > offset:
            raise OffsetOutOfRangeError(
                f"{where} begins at offset {now.log_start_offset} now; retention or delete_records "
                f"removed offset {offset} during the scan"
            )
        self.known = now


def _is_aborted(header: BatchHeader, aborted: AbortedBatches) -> bool:
    """True for a batch of an aborted transaction. A marker is none."""
    return (
        header.is_transactional
        and not header.is_control
        and aborted.has(header.producer_id, header.producer_epoch, header.base_offset)
    )


def _is_at(segment: _OpenSegment, found: tuple[int, int], seed: int) -> bool:
    """True if the batch at the position has this offset.

    An index is verified on its own, not against its segment, and may describe an earlier state of
    it.
    """
    try:
        taken = segment.head_at(found[1], seed)
    except BatchFormatError:
        return False
    return taken is not None and taken[0].base_offset == found[0]


class _Window(NamedTuple):
    start: int
    data: memoryview


class _OpenSegment:
    """One open segment file. Returned buffers outlive it."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, OPEN_FLAGS)
        self.size = os.fstat(self._fd).st_size
        self._mapping: pa.Buffer | None = None
        self._view = memoryview(b"")
        self._is_mapped: bool | None = None
        self._populated = 0
        self._heads = _Window(0, memoryview(b""))
        self._head_bytes = HEAD_BYTES

    def __enter__(self) -> _OpenSegment:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._fd)

    def read_at(self, length: int, position: int) -> bytes:
        """Read at most `length` bytes. Raises OSError."""
        return os.pread(self._fd, length, position)

    def head_at(self, position: int, seed: int) -> tuple[BatchHeader, None] | None:
        """The header of the batch at `position`, verified by its checksum, None at the end.

        Raises BatchFormatError, OSError.
        """
        window = self._heads
        at = position - window.start
        if not 0 <= at <= len(window.data) - PREFIX_BYTES - HEADER_BYTES:
            window, at = self._read_heads(position, self._head_bytes), 0
        if len(window.data) - at < PREFIX_BYTES:
            return None
        size = metadata_size_of(window.data, at)
        if size == 0:
            return None
        if at + PREFIX_BYTES + size > len(window.data):
            window, at = self._read_heads(position, max(self._head_bytes, PREFIX_BYTES + size)), 0
        header = read_header(window.data, at)
        place = header_position(window.data, at)
        if (
            compute_header_crc(window.data, place, header.extension_length, seed)
            != header.header_crc32c
        ):
            raise BatchChecksumError(
                "header checksum does not match (damaged, or a batch of another topic or partition)"
            )
        if position + header.batch_length > self.size:
            raise BatchFormatError("the file ends inside a batch")
        self._head_bytes = (
            HEADS_AT_ONCE_BYTES if header.batch_length < HEADS_AT_ONCE_BYTES // 8 else HEAD_BYTES
        )
        return header, None

    def _read_heads(self, position: int, length: int) -> _Window:
        self._heads = _Window(position, memoryview(os.pread(self._fd, length, position)))
        return self._heads

    def batch_at(self, position: int, seed: int) -> tuple[BatchHeader, pa.Buffer] | None:
        """The whole batch at `position`, verified by both checksums, None at the end.

        Raises BatchFormatError, OSError.
        """
        if self._is_mapped is None:
            self._populated = position - position % mmap.PAGESIZE
            self._is_mapped = self._map()
        data = self._mapped_batch(position) if self._is_mapped else self._read_batch(position)
        return None if data is None else (verify_batch(memoryview(data), seed), data)

    def _mapped_batch(self, position: int) -> pa.Buffer | None:
        if position + PREFIX_BYTES > self.size:
            return None
        self._populate(position + HEAD_BYTES)
        size = metadata_size_of(self._view, position)
        if size == 0:
            return None
        if position + PREFIX_BYTES + size > self.size:
            raise BatchFormatError("the file ends inside a batch")
        self._populate(position + PREFIX_BYTES + size)
        length = read_header(self._view, position).batch_length
        if position + length > self.size:
            raise BatchFormatError("the file ends inside a batch")
        self._populate(position + length)
        assert self._mapping is not None
        return self._mapping.slice(position, length)

    def _read_batch(self, position: int) -> pa.Buffer | None:
        head = memoryview(os.pread(self._fd, HEAD_BYTES, position))
        if len(head) < PREFIX_BYTES:
            return None
        size = metadata_size_of(head)
        if size == 0:
            return None
        if PREFIX_BYTES + size > len(head):
            head = memoryview(os.pread(self._fd, PREFIX_BYTES + size, position))
        length = read_header(head).batch_length
        if position + length > self.size:
            raise BatchFormatError("the file ends inside a batch")
        data = pa.allocate_buffer(length)
        view, done = memoryview(data), 0
        while done < length:
            count = os.preadv(self._fd, [view[done:]], position + done)
            if not count:
                raise BatchFormatError("the file ends inside a batch")
            done += count
        return data

    def _map(self) -> bool:
        """Map the file. False if that, or requesting a page, is not possible."""
        try:
            with pa.memory_map(f"/proc/self/fd/{self._fd}", "r") as file:
                self._mapping = file.read_buffer()
            self._view = memoryview(self._mapping)
            self.size = len(self._view)
            self._populate(self._populated + 1)
        except OSError as error:
            if error.errno == errno.EIO:
                raise
            self._mapping, self._view = None, memoryview(b"")
            return False
        return True

    def _populate(self, up_to: int) -> None:
        """Load the mapping's pages below `up_to`. Raises OSError if the disk cannot read one."""
        while self._populated < min(up_to, self.size):
            assert self._mapping is not None
            start = self._populated
            length = min(WINDOW_BYTES, self.size - start)
            if _libc.madvise(self._mapping.address + start, length, _MADV_POPULATE_READ):
                number = ctypes.get_errno()
                raise OSError(errno.EIO if number in _UNREADABLE else number, os.strerror(number))
            self._populated = start + length
