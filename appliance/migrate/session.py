"""One session of a copy: from where the target ends to the end of the source, and on.

A session ends with an exception when a connection is lost, or a batch is refused because the log
ends elsewhere. The next one reads the journal and the ends of the target's logs, and goes on there.

Owner: the process that copies.
Invariants:
- A partition is either written plainly, or in transactions, from its `open` entry on.
- No `open` entry is written while plain records of its partition have no outcome.
- A plain record has the source's offset behind that of the record before it.
- A partition goes on behind the last record that is certainly in the target.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from appliance.migrate.errors import MigrationError
from appliance.migrate.journal import Entry, Journal, begin_entry, open_entry, runs_entry
from appliance.migrate.offset_map import Mode
from appliance.migrate.plan import taken_sentence
from appliance.migrate.rows import LastRow, Rows, paired, runs_of
from shm.crash_points import crash_point
from tailrace.core.topic_partition import TopicPartition

COMMIT_S = 1.0
COMMIT_BYTES = 32 << 20
COMMIT_RECORDS = 100_000
PROGRESS_S = 5.0
READ_TIMEOUT_S = 0.5
Written = Mapping[TopicPartition, Sequence[Sequence[int]]]


class Source(Protocol):
    """The side that records come from."""

    def bounds(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, tuple[int, int]]: ...

    def assign(self, positions: Mapping[TopicPartition, int]) -> None: ...

    def stop(self, partition: TopicPartition) -> None: ...

    def unstable(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, tuple[int, int]]: ...

    def read(self, timeout_s: float) -> tuple[Sequence[Rows], dict[TopicPartition, int]]: ...

    def close(self) -> None: ...


class Target(Protocol):
    """The side that records go to."""

    @property
    def writes_plainly(self) -> bool: ...

    def open(self) -> list[bytes | None]: ...

    def ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]: ...

    def plain_count(self, partition: TopicPartition, start: int) -> int: ...

    def last_rows(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, LastRow]: ...

    def position_plain(self, positions: Mapping[TopicPartition, int]) -> None: ...

    def write_plain(self, rows: Rows) -> None: ...

    def settle(self, waiting_max: int = 0) -> None: ...

    def write(self, rows: Rows, target_end: int) -> None: ...

    def commit(
        self, entries_of: Callable[[Written], Sequence[Entry]]
    ) -> dict[TopicPartition, int]: ...

    def too_large(self, rows: Rows) -> tuple[int, int, int] | None: ...

    def missing_key(self, rows: Rows) -> int | None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Standing:
    """A partition in the session."""

    mode: Mode
    source_next: int
    target_end: int
    end_seen: int = -1
    """The source's end, when the partition was there; -1: it is not there."""
    committed_next: int = 0
    """`source_next` of the last commit."""


@dataclass(slots=True)
class Counts:
    """Sums over all sessions of this process."""

    records: int = 0
    byte_count: int = 0


class Session:
    """A copy from the journal's state on."""

    def __init__(
        self,
        source: Source,
        target: Target,
        journal: Journal,
        topic_ids: Mapping[str, str],
        counts: Counts,
        *,
        appends: bool,
    ) -> None:
        """`appends`: partitions of the target may have records of others before the copy."""
        self.source = source
        self.target = target
        self.journal = journal
        self.counts = counts
        self.standings: dict[TopicPartition, Standing] = {}
        self.refused: dict[TopicPartition, str] = {}
        """Partitions that do not go on, with the sentence."""
        self._last_rows: dict[TopicPartition, LastRow] = {}
        self._topic_ids = topic_ids
        self._appends = appends
        self._runs: dict[TopicPartition, list[list[int]]] = {}
        """Offsets of the source in the open transaction, as [first, count]."""
        self.last_lag = -1
        """The lag when it was last looked up, -1: not yet."""
        self._is_whole = True
        """False while a step or a commit runs, and behind one that failed."""
        self._bytes = self._records = 0
        self._commit_at_s = self._progress_at_s = 0.0

    # ---- the beginning ---------------------------------------------------------------------------

    def begin(self, partitions: Sequence[TopicPartition]) -> None:
        """Find where each partition goes on, and read from there. Raises InterruptedSessionError,
        MigrationError.
        """
        bounds, ends = self.source.bounds(partitions), self.target.ends(partitions)
        begun = [each for each in partitions if self.journal.map_of(each).mode is Mode.NEW]
        taken = sorted({each.topic for each in begun if ends[each]})
        if taken and not self._appends:
            raise MigrationError(taken_sentence(taken[0], keeps_offsets=self.target.writes_plainly))
        entries = [
            begin_entry(each, self._topic_ids.get(each.topic, ""), bounds[each][0], ends[each])
            for each in begun
        ]
        if entries:
            self.target.commit(lambda _: entries)
            for entry in entries:
                self.journal.add(entry)
        crash_point("migrate.after_begin")
        for partition in partitions:
            self.standings[partition] = self._standing(partition, ends[partition])
        self._check_bounds(bounds)
        if self.target.writes_plainly:
            self.target.position_plain(
                {
                    each: standing.target_end
                    for each, standing in self.standings.items()
                    if standing.mode is Mode.PLAIN
                }
            )
        self._find_last_rows(bounds)
        self.source.assign(
            {
                each: one.source_next - (each in self._last_rows)
                for each, one in self.standings.items()
            }
        )
        self._commit_at_s = self._progress_at_s = time.monotonic()

    def _standing(self, partition: TopicPartition, end: int) -> Standing:
        found = self.journal.map_of(partition)
        if self.target.writes_plainly and found.mode is Mode.PLAIN:
            found.grow(end)
        elif self.target.writes_plainly and found.mode is Mode.OPEN:
            # Plain records of the session before may have come behind its last known end.
            start, first = found.target_next, found.plain_next
            count = self.target.plain_count(partition, start) if end > start else 0
            if count:
                entry = {
                    **runs_entry(partition, [], first + count), "runs": [[first, start, count]],
                }  # fmt: skip
                self.target.commit(lambda _: [entry])
                self.journal.add(entry)
        mode = found.mode
        if mode is Mode.PLAIN and not self.target.writes_plainly:
            mode = Mode.RUNS
        return Standing(mode, found.source_next, end, committed_next=found.source_next)

    def _find_last_rows(self, bounds: Mapping[TopicPartition, tuple[int, int]]) -> None:
        """The last record of a partition that was written plainly is read again in the source, if
        it is still there: the target may have no other writer.
        """
        offsets = {}
        for partition, standing in self.standings.items():
            found = self.journal.map_of(partition)
            if (
                self.target.writes_plainly
                and standing.mode is not Mode.OPEN
                and found.record_count
                and bounds[partition][0] < standing.source_next
            ):
                offsets[partition] = found.target_next - 1
        self._last_rows = self.target.last_rows(offsets)

    def _is_as_before(self, rows: Rows) -> bool:
        """True unless the last record of the target is not that of the source."""
        last = self._last_rows.pop(rows.partition, None)
        standing = self.standings[rows.partition]
        if last is None or rows.offsets[0] != standing.source_next - 1:
            return True
        if last.is_first_of(rows):
            return True
        self._refuse(
            rows.partition,
            f"{rows.partition.topic}-{rows.partition.partition} has a last record in the target "
            f"that is not the one at offset {rows.offsets[0]} of the source: somebody else has "
            "written to it. Begin under another --name, with a new topic in the target, and let "
            "no other program write to it before the switch.",
        )
        return False

    def _check_bounds(self, bounds: Mapping[TopicPartition, tuple[int, int]]) -> None:
        """Records that the source has deleted before they were copied are left out; a source that
        ends before the copy is not the one that was copied. A partition that has left records out
        is no longer written plainly.
        """
        opened = []
        for partition, standing in self.standings.items():
            first, end = bounds[partition]
            if standing.source_next > end:
                raise MigrationError(
                    f"{partition.topic}-{partition.partition} ends at {end} in the source, and was "
                    f"copied up to {standing.source_next}: it was cut or created again. Begin "
                    "under another --name, with a new topic in the target."
                )
            if standing.source_next < first:
                standing.source_next = first
                if standing.mode is Mode.PLAIN:
                    opened.append(open_entry(partition, first, standing.target_end))
                    standing.mode = Mode.OPEN
        if opened:
            self.target.commit(lambda _: opened)
            for entry in opened:
                self.journal.add(entry)
            crash_point("migrate.after_open")

    # ---- copying ---------------------------------------------------------------------------------

    def step(self, timeout_s: float = READ_TIMEOUT_S) -> int:
        """Copy what has come. Returns the number of records. Raises InterruptedSessionError,
        MigrationError.
        """
        self._is_whole = False
        parts, ends = self.source.read(timeout_s)
        count = 0
        for rows in parts:
            self.standings[rows.partition].end_seen = -1
            count += self._copy(rows)
        for partition, offset in ends.items():
            if partition in self.standings:
                self.standings[partition].end_seen = offset
        if not parts:
            self.target.settle()
        now_s = time.monotonic()
        if self._runs and (
            not parts
            or now_s >= self._commit_at_s + COMMIT_S
            or self._bytes >= COMMIT_BYTES
            or self._records >= COMMIT_RECORDS
        ):
            self.commit()
        self._is_whole = True
        return count

    def _copy(self, rows: Rows) -> int:
        standing = self.standings[rows.partition]
        if rows.partition in self.refused or not self._is_as_before(rows):
            return 0
        rows = self._accepted(rows, standing)
        if not len(rows):
            return 0
        self.counts.records += len(rows)
        self.counts.byte_count += rows.byte_count
        accepted_count = len(rows)
        if standing.mode is Mode.PLAIN:
            plain_count = rows.consecutive_count(standing.source_next)
            if plain_count:
                part = rows if plain_count == len(rows) else rows.part(0, plain_count)
                self.target.write_plain(part)
                standing.source_next += plain_count
                standing.target_end += plain_count
                crash_point("migrate.after_plain")
            if plain_count < len(rows):
                self._open(rows.partition, standing)
                rows = rows.part(plain_count, len(rows))
        if standing.mode is not Mode.PLAIN:
            self.target.write(rows, standing.target_end)
            self._runs.setdefault(rows.partition, []).extend(runs_of(rows.offsets))
            self._bytes += rows.byte_count
            self._records += len(rows)
            standing.source_next = rows.offsets[-1] + 1
        return accepted_count

    def _accepted(self, rows: Rows, standing: Standing) -> Rows:
        """The rows before the first one that the target cannot take, and behind the last copied."""
        known = sum(1 for offset in rows.offsets[:1] if offset < standing.source_next)
        if known:
            behind = next(
                (row for row, each in enumerate(rows.offsets) if each >= standing.source_next),
                len(rows),
            )
            rows = rows.part(behind, len(rows))
            if not len(rows):
                return rows
        found = self.target.too_large(rows)
        where = f"{rows.partition.topic}-{rows.partition.partition}"
        if found is not None:
            row, size, limit = found
            self._refuse(
                rows.partition,
                f"the record at offset {rows.offsets[row]} of {where} has {size} bytes; the topic "
                f"takes {limit}. Raise max.message.bytes of the topic in the target, then run this "
                "again.",
            )
            rows = rows.part(0, row)
        row_without_key = self.target.missing_key(rows) if len(rows) else None
        if row_without_key is not None:
            self._refuse(
                rows.partition,
                f"the record at offset {rows.offsets[row_without_key]} of {where} has no key, "
                "which a compacted topic needs. Set cleanup.policy of the topic in the target to "
                "delete, then run this again.",
            )
            rows = rows.part(0, row_without_key)
        return rows

    def _refuse(self, partition: TopicPartition, sentence: str) -> None:
        if partition not in self.refused:
            self.refused[partition] = sentence
            self.source.stop(partition)

    def _open(self, partition: TopicPartition, standing: Standing) -> None:
        """From now on the partition's records are written in transactions."""
        self.target.settle()
        self.commit()
        entry = open_entry(partition, standing.source_next, standing.target_end)
        self.target.commit(lambda _: [entry])
        self.journal.add(entry)
        standing.mode = Mode.OPEN
        crash_point("migrate.after_open")

    def commit(self, extra: Sequence[Entry] = ()) -> None:
        """Commit what is written in transactions, and entries. Raises InterruptedSessionError."""
        if not self._runs and not extra:
            return
        self._is_whole = False
        entries: list[Entry] = []

        def entries_of(written: Written) -> list[Entry]:
            entries[:] = [
                runs_entry(each, paired(runs, written[each]), self.standings[each].source_next)
                for each, runs in self._runs.items()
            ]
            return [*entries, *extra]

        ends = self.target.commit(entries_of)
        for entry in (*entries, *extra):
            self.journal.add(entry)
        for partition, end in ends.items():
            standing = self.standings[partition]
            standing.target_end, standing.mode = end, Mode.RUNS
            standing.committed_next = standing.source_next
        self._runs.clear()
        self._bytes = self._records = 0
        self._commit_at_s = time.monotonic()
        self._is_whole = True

    def note_progress(self, *, is_forced: bool = False) -> None:
        """Write how far it is, every few seconds; this notices a session that has taken over."""
        now_s = time.monotonic()
        if not is_forced and now_s < self._progress_at_s + PROGRESS_S:
            return
        self._progress_at_s = now_s
        self.last_lag = self.lag(self.source.bounds(self.standings))
        entry = {
            "kind": "progress", "at_ms": time.time_ns() // 1_000_000, "lag": self.last_lag,
            "records": self.record_count,
        }  # fmt: skip
        self.commit([entry])

    # ---- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Everything that was read is durable, and the maps have it. Raises
        InterruptedSessionError.
        """
        self.target.settle()
        self.commit()
        for partition, standing in self.standings.items():
            if standing.mode is Mode.PLAIN:
                self.journal.map_of(partition).grow(standing.target_end)

    def note_end(self) -> None:
        """Write that this run has ended. A session that failed half-way writes nothing, because its
        open transaction must be aborted. Raises InterruptedSessionError, MigrationError.
        """
        if self._is_whole and self.journal.switched_ms is None:
            self.finish()
            self.commit([{"kind": "ended", "at_ms": time.time_ns() // 1_000_000}])

    @property
    def is_at_end(self) -> bool:
        """True if every partition that goes on is at its end."""
        return all(
            standing.end_seen >= 0 or partition in self.refused
            for partition, standing in self.standings.items()
        )

    @property
    def record_count(self) -> int:
        """The number of records in the target, those of other sessions too."""
        count = 0
        for partition, standing in self.standings.items():
            found = self.journal.map_of(partition)
            count += found.record_count
            if standing.mode is Mode.PLAIN:
                count += max(0, standing.source_next - found.source_next)
        return count

    def lag(self, bounds: Mapping[TopicPartition, tuple[int, int]]) -> int:
        """Offsets of the source that are not copied yet."""
        total = 0
        for partition, standing in self.standings.items():
            _, end = bounds[partition]
            reached = max(standing.source_next, standing.end_seen)
            total += max(0, end - reached)
        return total
