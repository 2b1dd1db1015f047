"""One partition's log as its flusher sees it: which segment is live, where the next batch goes, when to roll.

Owner: the flusher. Nobody else writes these files.
Invariants: next_offset and the live segment's end move only by `place`; bytes placed are written by `write_pending` before anything that
comes
    after them is; a sealed segment is synced, ends with the end-of-stream mark and never changes.
Crash: between any two steps recovery finds either a torn tail of the live segment or a segment without its schema, and mends both.
"""

from __future__ import annotations

import logging

import orjson

from shm.assignments import Assignment
from shm.ring import Outcome
from tailrace import segment_index as index_format
from tailrace.batch_header import END_OF_STREAM, checksum_seed
from tailrace.checksum import Readable
from tailrace.segment import INDEX_SUFFIX, PRODUCERS_SUFFIX, SEGMENT_SUFFIX, file_name
from tailrace.segment_index import IndexEntry
from workers.files import Files
from workers.producer_state import ProducerTable
from workers.recovery import Action, RecoveredLog, encode_producers, recover_log

logger = logging.getLogger(__name__)

IDENTITY_FILE = "partition.json"
FORMAT_VERSION = 1


class LogGapError(RuntimeError):
    """A batch does not begin where the log ends: writing it would leave a hole or overwrite."""


class LiveSegment:
    """The segment that is being written."""

    __slots__ = ("base", "end", "fd", "first_append_us", "index_end", "index_fd", "max_timestamp_us", "new_entries")

    def __init__(self, base: int, fd: int, index_fd: int, end: int) -> None:
        self.base = base
        self.fd = fd
        self.index_fd = index_fd
        self.end = end
        """File position behind the last batch placed."""
        self.index_end = index_format.INDEX_HEADER.size
        self.max_timestamp_us = 0
        self.first_append_us = 0
        """When its first batch was appended, 0 while it is empty."""
        self.new_entries: list[IndexEntry] = []


class PartitionLog:
    """The files of one partition."""

    def __init__(self, files: Files, directory: str, assignment: Assignment) -> None:
        self._files = files
        self.directory = directory
        self.assignment = assignment
        self.seed = checksum_seed(assignment.topic_id, assignment.partition)
        self.segments: list[int] = []
        self.live: LiveSegment | None = None
        self.next_offset = 0
        self.log_start_offset = 0
        self.high_watermark = 0
        self.max_timestamp_us = 0
        self.size_bytes = 0
        self.producers = ProducerTable()
        self.refusal = ""
        """Why writes are refused, where they are."""
        self.is_unsynced = False
        self._pending: list[Readable] = []
        self._pending_at = 0

    # ---- opening ---------------------------------------------------------------------------------------------------------------------

    def open(self, data_dir: str) -> RecoveredLog:
        """Make the directory or recover what is in it. Raises OSError."""
        files = self._files
        identity = orjson.dumps(
            {
                "format": FORMAT_VERSION,
                "topic": self.assignment.topic,
                "partition": self.assignment.partition,
                "topic_id": self.assignment.topic_id.hex(),
            }
        )
        identity_path = f"{self.directory}/{IDENTITY_FILE}"
        if files.exists(self.directory) and self._identity(identity_path) != self.assignment.topic_id.hex():
            aside = f"{self.directory}.{self._identity(identity_path)[:8] or 'unknown'}.old"
            logger.warning("directory_of_another_topic path=%s moved_to=%s", self.directory, aside)
            files.rename(self.directory, aside)
        if not files.exists(self.directory):
            files.make_directory(self.directory)
        if not files.exists(identity_path):
            self._write_durably(identity_path, identity)
            files.sync_directory(self.directory)
            files.sync_directory(data_dir)
        recovered = recover_log(files, self.directory, self.seed)
        self.segments = recovered.segments
        self.next_offset = self.high_watermark = recovered.next_offset
        self.log_start_offset = self.segments[0] if self.segments else recovered.next_offset
        self.max_timestamp_us = recovered.max_timestamp_us
        self.size_bytes = recovered.size_bytes
        self.producers = recovered.producers
        self.refusal = recovered.reason
        if recovered.action in (Action.APPEND, Action.CUT) and self.segments:
            self._reopen_live(recovered)
        return recovered

    def _identity(self, path: str) -> str:
        if not self._files.exists(path):
            # A directory made a moment before the kill: its identity was to be written next. One with segments is somebody's.
            holds_data = any(name.endswith(SEGMENT_SUFFIX) for name in self._files.list(self.directory))
            return "" if holds_data else self.assignment.topic_id.hex()
        fd = self._files.open_for_read(path)
        try:
            return str(orjson.loads(self._files.read_at(fd, 65536, 0))["topic_id"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return ""
        finally:
            self._files.close(fd)

    def _reopen_live(self, recovered: RecoveredLog) -> None:
        base = self.segments[-1]
        files = self._files
        fd = files.open_for_write(f"{self.directory}/{file_name(base)}")
        index_fd = files.open_for_write(f"{self.directory}/{file_name(base, INDEX_SUFFIX)}")
        self.live = LiveSegment(base, fd, index_fd, recovered.valid_end)
        self.live.index_end += len(recovered.index) * index_format.INDEX_ENTRY.size
        self.live.max_timestamp_us = recovered.max_timestamp_us
        self.live.first_append_us = recovered.first_append_us

    # ---- appending -------------------------------------------------------------------------------------------------------------------

    def place(
        self, base_offset: int, next_offset: int, length: int, max_timestamp_us: int, append_time_us: int, planned: Outcome | None
    ) -> tuple[int, int]:
        """Decide where the next batch goes: (segment base, file position). May roll. Raises LogGapError, OSError.

        `planned` is where a killed flusher had decided to put it; it goes there again.
        """
        if base_offset != self.next_offset:
            raise LogGapError(f"batch of offset {base_offset} where {self.next_offset} belongs in {self.directory}")
        live = self.live
        if live is None or (self._is_full(live, length, append_time_us) if planned is None else planned.segment_base != live.base):
            live = self.roll()
        if not live.first_append_us:
            live.first_append_us = append_time_us
        position = live.end
        live.max_timestamp_us = max(live.max_timestamp_us, max_timestamp_us)
        live.new_entries.append(IndexEntry(base_offset, position, live.max_timestamp_us))
        live.end += length
        self.max_timestamp_us = max(self.max_timestamp_us, live.max_timestamp_us)
        self.next_offset = next_offset
        self.size_bytes += length
        return live.base, position

    def _is_full(self, live: LiveSegment, length: int, now_us: int) -> bool:
        if not live.first_append_us:
            return False
        settings = self.assignment.settings
        return live.end + length > int(settings["segment.bytes"]) or self.is_old(now_us)

    def is_old(self, now_us: int) -> bool:
        """Whether the live segment holds something and is older than segment.ms."""
        live = self.live
        return (
            live is not None
            and bool(live.first_append_us)
            and now_us - live.first_append_us >= int(self.assignment.settings["segment.ms"]) * 1000
        )

    def add_pending(self, position: int, batch: Readable) -> None:
        """Bytes for the live segment, contiguous with those added before."""
        if not self._pending:
            self._pending_at = position
        self._pending.append(batch)

    def write_pending(self) -> None:
        """One gathered write of everything placed since the last one, then the index entries. Raises OSError; then nothing is forgotten."""
        live = self.live
        if live is None or not self._pending:
            return
        self._files.write_at(live.fd, self._pending, self._pending_at)
        self._pending = []
        self.is_unsynced = True
        entries = index_format.encode_entries(live.new_entries)
        self._files.write_at(live.index_fd, [entries], live.index_end)
        live.index_end += len(entries)
        live.new_entries = []

    def sync(self) -> None:
        """Make everything written durable. Raises OSError."""
        if self.live is not None and self.is_unsynced:
            self._files.sync_data(self.live.fd)
            self.is_unsynced = False

    # ---- rolling ---------------------------------------------------------------------------------------------------------------------

    def roll(self) -> LiveSegment:
        """Seal the live segment and begin the next at `next_offset`. Raises OSError."""
        self.seal()
        files = self._files
        base = self.next_offset
        if len(self.producers):
            self._write_durably(f"{self.directory}/{file_name(base, PRODUCERS_SUFFIX)}", encode_producers(self.producers))
        fd = files.open_for_write(f"{self.directory}/{file_name(base)}")
        index_fd = files.open_for_write(f"{self.directory}/{file_name(base, INDEX_SUFFIX)}")
        files.truncate(fd, 0)
        files.truncate(index_fd, 0)
        files.write_at(fd, [self.assignment.schema], 0)
        files.write_at(index_fd, [index_format.encode_header(base)], 0)
        files.sync_data(fd)
        files.sync_directory(self.directory)
        self.live = LiveSegment(base, fd, index_fd, len(self.assignment.schema))
        self.segments.append(base)
        self.size_bytes += len(self.assignment.schema)
        return self.live

    def seal(self) -> None:
        """Finish the live segment with the end-of-stream mark. Raises OSError."""
        live = self.live
        if live is None:
            return
        self.write_pending()
        self._files.write_at(live.fd, [END_OF_STREAM], live.end)
        self._files.sync_data(live.fd)
        self.is_unsynced = False
        self.size_bytes += len(END_OF_STREAM)
        self._close_live()

    def _close_live(self) -> None:
        if self.live is not None:
            self._files.close(self.live.fd)
            self._files.close(self.live.index_fd)
            self.live = None

    def close(self) -> None:
        """Write and sync what is left, close the files; the live segment stays live for the next start."""
        self.write_pending()
        self.sync()
        self._close_live()

    def delete(self) -> None:
        """Remove the directory with everything in it, in a way that a kill halfway cannot confuse: it is renamed first."""
        self._pending = []
        self._close_live()
        files = self._files
        gone = f"{self.directory}.{self.assignment.topic_id.hex()[:8]}.deleted"
        if files.exists(self.directory):
            files.rename(self.directory, gone)
        remove_tree(files, gone)

    def _write_durably(self, path: str, data: bytes) -> None:
        temporary = path + ".tmp"
        fd = self._files.open_for_write(temporary)
        try:
            self._files.truncate(fd, 0)
            self._files.write_at(fd, [data], 0)
            self._files.sync_data(fd)
        finally:
            self._files.close(fd)
        self._files.rename(temporary, path)


def remove_tree(files: Files, directory: str) -> None:
    """Remove a flat directory and its files, if it is there."""
    if files.exists(directory):
        for name in files.list(directory):
            files.unlink(f"{directory}/{name}")
        files.remove_directory(directory)
