"""Log reader: reads whole batches from segment files, located by offset or time, up to the end of
an isolation level.

Owner: one front; reads only.

Invariants:
- A read begins with the batch that holds the requested offset and ends with a whole batch below the
  level's end.
- Batches of aborted transactions are left out of a read of committed records.
- A read that would wait for the disk is not made here (`ColdRead`) unless `blocking`.
"""

from __future__ import annotations

import logging
from bisect import bisect_right

from netfront.fetch.log.batch_walk import PEEK_BYTES, before_transactions, walk, walk_committed
from netfront.fetch.log.file_reader import FileReader
from netfront.fetch.log.isolation import Isolation, end_of
from netfront.fetch.log.open_files import OPEN_FILES_MAX
from netfront.fetch.log.partition_files import PartitionFiles
from netfront.fetch.log.read_result import ColdRead, LogReadError, Place, Span
from shm.memory.layout import SlotState
from shm.messages.lane_messages import Assignment
from shm.tables.partition_table import PartitionState, PartitionTable
from tailrace.core.error_codes import ErrorCode
from tailrace.format.directory.partition_metadata import PartitionMetadata
from tailrace.format.record_batch.batch_header import checksum_seed
from tailrace.format.segments.segment import INDEX_SUFFIX
from tailrace.format.segments.segment_index import IndexDamagedError

logger = logging.getLogger(__name__)

LEFT_OUT_MAX_BYTES = 4 << 20
"""Most bytes of aborted batches that one read passes over."""


class LogReader:
    """Reads of the partitions that a front serves."""

    def __init__(
        self,
        files: FileReader,
        data_dirs: list[str],
        tables: list[PartitionTable],
        open_files_max: int = OPEN_FILES_MAX,
    ) -> None:
        self.files = PartitionFiles(files, data_dirs, open_files_max)
        """For whoever searches through batches (`lookup.timestamp_lookup`)."""
        self._tables = tables
        self._epochs: dict[tuple[bytes, int], tuple[int, PartitionMetadata]] = {}
        """(leader epoch, partition metadata) by (topic id, partition).

        Read when a client has an older epoch.
        """

    def state(self, route: Assignment) -> PartitionState:
        """Return the partition's state.

        Raises LogReadError if its slot is not, or no longer, this topic's.
        """
        state = self._tables[route.data_dir].read(route.slot)
        if state.topic_id != route.topic_id or state.state in (SlotState.FREE, SlotState.DELETED):
            raise LogReadError(ErrorCode.NOT_READY, "the partition is being opened or deleted")
        if state.state is SlotState.UNREADABLE:
            raise LogReadError(ErrorCode.STORAGE_ERROR, "the partition's log could not be opened")
        return state

    # ---- finding ---------------------------------------------------------------------------------

    def locate(self, route: Assignment, state: PartitionState, offset: int, end: int) -> Place:
        """Return the start of the batch that holds `offset`, or a position shortly before it.
        `end`: see `behind`.
        """
        bases = self.files.bases(route, state)
        number = bisect_right(bases, offset)
        if not number:
            # Not OFFSET_OUT_OF_RANGE: the records are lost, and a reader that resets to the
            # beginning would return here for ever.
            raise LogReadError(
                ErrorCode.CORRUPT_BATCH,
                f"no segment holds offset {offset}",
                self.behind(route, state, offset, end),
            )
        base = bases[number - 1]
        try:
            found = self.files.index(route, base).find_offset(offset)
        except IndexDamagedError as error:
            logger.warning(
                "index_damaged path=%s reason=%r",
                self.files.path(route, base, INDEX_SUFFIX),
                str(error),
            )
            found = None
        return (
            Place(found.base_offset, base, found.file_position)
            if found
            else Place(base, base, self.files.schema_end(route, base))
        )

    def behind(self, route: Assignment, state: PartitionState, offset: int, end: int) -> int:
        """Return the offset of the first batch after `offset`, where a reader
        that cannot read it continues, at most `end`, the end of what it may read.
        """
        known = self.files.metadata(route)
        damage = known.damage_at(offset) if known is not None else None
        if damage is not None:
            return damage.end
        bases = self.files.bases(route, state)
        number = bisect_right(bases, offset)
        try:
            found = (
                self.files.index(route, bases[number - 1]).find_behind(offset) if number else None
            )
        except IndexDamagedError:
            found = None
        following = min(bases[number], end) if number < len(bases) else end
        return min(found.base_offset, following) if found is not None else following

    def check_epoch(
        self, route: Assignment, state: PartitionState, epoch: int, offset: int
    ) -> None:
        """Raise LogReadError if a reader of an older epoch has read records that the log has lost
        since (as in KIP-320).
        """
        if not 0 <= epoch < state.leader_epoch:
            return
        end = self.end_of_epoch(route, state, epoch)
        if end is not None and offset > end:
            raise LogReadError(
                ErrorCode.LOG_TRUNCATED,
                f"records of epoch {epoch} from offset {end} on were lost; the log now has epoch "
                f"{state.leader_epoch}",
                end,
            )

    def end_of_epoch(self, route: Assignment, state: PartitionState, epoch: int) -> int | None:
        """Return where an earlier leader epoch ended, None if that is not known."""
        key = (route.topic_id, route.partition)
        cached = self._epochs.get(key)
        if cached is None or cached[0] != state.leader_epoch:
            known = self.files.metadata(route)
            if known is None:
                return None
            cached = self._epochs[key] = state.leader_epoch, known
        return cached[1].end_of_epoch(epoch)

    # ---- search through batches (see `lookup.timestamp_lookup`) ----------------------------------

    def place_of_time(
        self, route: Assignment, base: int, timestamp_us: int, at_least: int
    ) -> Place | None:
        """Return where a search for the first record at or after a time and an offset starts, or
        None if the index has none.

        A segment with a damaged index is searched from its start.
        """
        try:
            index = self.files.index(route, base)
            found = index.find_time(timestamp_us)
            if found is not None and found.base_offset < at_least:
                found = index.find_offset(at_least)
        except IndexDamagedError:
            return Place(base, base, self.files.schema_end(route, base))
        return Place(found.base_offset, base, found.file_position) if found is not None else None

    # ---- reading ---------------------------------------------------------------------------------

    def read(
        self,
        route: Assignment,
        state: PartitionState,
        offset: int,
        hint: Place | None,
        target: memoryview,
        blocking: bool,
        isolation: Isolation,
    ) -> Span | int:
        """Fill `target` with whole batches from the one that holds `offset` on.

        Return a Span, or the number of bytes that the first batch needs if `target` is too small.
        The Span is empty if there is nothing, or if everything up to its `resume_offset` was left
        out. Raises ColdRead (unless `blocking`), LogReadError, OSError.
        """
        try:
            found = self._read_checked(route, state, offset, hint, target, blocking, isolation)
        except LogReadError as error:
            # The log may have been shortened since `state` was read: nothing is damaged then.
            if error.code is ErrorCode.CORRUPT_BATCH:
                log_start_offset = self.state(route).log_start_offset
                if offset < log_start_offset:
                    raise LogReadError(
                        ErrorCode.OFFSET_OUT_OF_RANGE,
                        f"offset {offset} was removed; the log starts at {log_start_offset} now",
                    ) from None
            raise
        if isinstance(found, int):
            return found
        if isolation is Isolation.WITHOUT_TRANSACTIONS:
            return before_transactions(target, found)
        passed_bytes = len(target)
        while (
            found.has_gaps
            and 2 * found.end < len(target)
            and found.following.offset < state.last_stable_offset
            and passed_bytes < LEFT_OUT_MAX_BYTES
        ):
            # Much was left out: a small response costs the reader as much as a full one.
            place, rest = found.following, target[found.end :]
            passed_bytes += len(rest)
            try:
                more = self._read_checked(
                    route, state, place.offset, place, rest, blocking, isolation
                )
            except (ColdRead, LogReadError, OSError):
                break  # a read that begins there reports it
            if isinstance(more, int) or more.following == place:
                break
            kept = more.end - more.start
            if more.start:
                rest[:kept] = rest[more.start : more.end]
            resume_offset = more.resume_offset
            found = Span(found.start, found.end + kept, more.following, True, resume_offset)
        return found

    def _read_checked(
        self,
        route: Assignment,
        state: PartitionState,
        offset: int,
        hint: Place | None,
        target: memoryview,
        blocking: bool,
        isolation: Isolation,
    ) -> Span | int:
        """Fill `target` as `_read` does, and retry once on corruption, with reopened files, listed
        again, and without the index.

        The flusher may have replaced a segment's file: by a cleaned one, or after a disk error. A
        replacement that is under way is NOT_READY.
        """
        try:
            return self._read(
                route,
                state,
                offset,
                hint if hint is not None and hint.offset == offset else None,
                target,
                blocking,
                isolation,
            )
        except FileNotFoundError:
            pass
        except LogReadError as error:
            if error.code is not ErrorCode.CORRUPT_BATCH:
                raise
        self.files.close(route)
        self.files.forget_segments(route)
        bases = self.files.bases(route, state)
        number = bisect_right(bases, offset)
        try:
            start = (
                Place(
                    bases[number - 1],
                    bases[number - 1],
                    self.files.schema_end(route, bases[number - 1], from_file=True),
                )
                if number
                else None
            )
            return self._read(route, state, offset, start, target, True, isolation)
        except FileNotFoundError as error:
            raise LogReadError(
                ErrorCode.NOT_READY, f"{error.filename} is being replaced by a cleaned segment"
            ) from None

    def _read(
        self,
        route: Assignment,
        state: PartitionState,
        offset: int,
        hint: Place | None,
        target: memoryview,
        blocking: bool,
        isolation: Isolation,
    ) -> Span | int:
        """Do `read` up to the first bytes, or up to the first aborted batches without any."""
        end = end_of(state, isolation)
        place = hint if hint is not None else self.locate(route, state, offset, end)
        bases = self.files.bases(route, state)
        while True:
            number = bisect_right(bases, place.segment_base)
            following = bases[number] if number < len(bases) else None
            if (
                following is not None and place.offset >= following
            ):  # continue with the next segment
                place = Place(following, following, self.files.schema_end(route, following))
                continue
            fd = self.files.open(route, place.segment_base)
            length = self.files.read_into(fd, target, place.file_position, blocking)
            try:
                until = end if following is None else min(following, end)
                if isolation is Isolation.COMMITTED and state.aborted_version:
                    result = walk_committed(
                        target, length, place, offset, until,
                        self.files.aborted_in(route, state, place.segment_base),
                        checksum_seed(route.topic_id, route.partition),
                    )  # fmt: skip
                else:
                    result = walk(target, length, place, offset, until)
            except LogReadError as error:
                if error.code is ErrorCode.CORRUPT_BATCH:
                    error.resume_offset = self.behind(route, state, max(place.offset, offset), end)
                raise
            if isinstance(result, Span):
                if (
                    result.end > result.start
                    or result.resume_offset >= 0
                    or result.following == place
                ):
                    return result
                place = result.following
                continue
            if result == 0 or (length == 0 and following is not None):
                if following is None:
                    # just sealed, with a successor that is not known yet; or what follows is lost
                    self.files.forget_segments(route)
                    self._check_damage(route, place.offset)
                    return Span(0, 0, Place(offset, place.segment_base, place.file_position))
                raise LogReadError(
                    ErrorCode.CORRUPT_BATCH,
                    f"{self.files.path(route, place.segment_base)} ends at offset {place.offset}, "
                    f"the next segment begins at {following}",
                    self.behind(route, state, max(place.offset, offset), end),
                )
            needed, position = result, place.file_position
            if needed > len(target):
                return needed
            if blocking:
                raise LogReadError(
                    ErrorCode.CORRUPT_BATCH,
                    f"{self.files.path(route, place.segment_base)} ends inside a batch at "
                    f"{position}",
                    self.behind(route, state, max(place.offset, offset), end),
                )
            fd = self.files.open(route, place.segment_base)
            raise ColdRead(fd, position, max(needed, PEEK_BYTES))

    def _check_damage(self, route: Assignment, offset: int) -> None:
        """Raise LogReadError if recovery has recorded this offset as lost."""
        known = self.files.metadata(route)
        damage = known.damage_at(offset) if known is not None else None
        if damage is not None:
            raise LogReadError(
                ErrorCode.CORRUPT_BATCH,
                f"offsets {damage.start} to {damage.end - 1} are lost",
                damage.end,
            )
