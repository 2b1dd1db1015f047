"""Records of compacted topics, and what their readers may see of them.

Each record names itself: a transaction's by its value, another one by its timestamp, which no two
have. So a tombstone has a name, too.

Owner: one `tests.sim.compaction.schedule.CompactionSchedule`. It knows nothing of how the log is
    cleaned.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tests.kit.batches import TIME_US
from tests.kit.transactional.transaction_checker import TransactionHistory, parse

STAMP_MS = TIME_US // 1000 + 1


class Row(NamedTuple):
    """A record that is sent outside of transactions."""

    place: TopicPartition
    key: bytes
    value: bytes | None
    sent_ns: int


class Seen(NamedTuple):
    """A record as somebody read it."""

    offset: int
    key: bytes
    value: bytes | None
    stamp_ms: int


class Latest(NamedTuple):
    """The last record of a key that is known to be committed."""

    offset: int
    is_tombstone: bool
    sent_ns: int


@dataclass(slots=True)
class Pass:
    """One reading from the beginning on."""

    began_ns: int
    latest: dict[TopicPartition, dict[bytes, int]] = field(default_factory=dict)
    """Key -> offset of the last record."""
    passed: dict[TopicPartition, int] = field(default_factory=dict)
    """Offset at which the next record may begin."""


class TableHistory:
    """See the module's docstring."""

    def __init__(self, keys: int, retention_ns: int) -> None:
        """`retention_ns`: how long tombstones stay, delete.retention.ms."""
        self.transactions = TransactionHistory()
        self.rows: dict[int, Row] = {}
        """By timestamp."""
        self.offsets: dict[int, int] = {}
        """Offsets of acknowledged rows, by timestamp."""
        self.starts: defaultdict[TopicPartition, int] = defaultdict(int)
        """Beginning of each partition, as it was last seen."""
        self._keys = keys
        self._retention_ns = retention_ns
        self._names: dict[tuple[TopicPartition, int], object] = {}
        """Names of the records that a reader has found at an offset."""

    def key_of(self, value: bytes) -> bytes:
        """The key of a transaction's value."""
        return b"k%d" % (zlib.crc32(value) % self._keys)

    # ---- programs --------------------------------------------------------------------------------

    def send(self, place: TopicPartition, key: bytes, value: bytes | None, now_ns: int) -> int:
        """Note a record. Returns its timestamp."""
        stamp_ms = STAMP_MS + len(self.rows)
        self.rows[stamp_ms] = Row(place, key, value, now_ns)
        return stamp_ms

    def acknowledge(self, stamp_ms: int, offset: int) -> None:
        known = self.offsets.setdefault(stamp_ms, offset)
        assert known == offset, f"{self.rows[stamp_ms]} was acknowledged at {known}, now {offset}"

    def newest_sent_ns(self, place: TopicPartition, start: int, end: int) -> int:
        """Time at which the last of some acknowledged rows was sent, 0 if there are none."""
        return max(
            (one.sent_ns for _, one in self._committed(place) if start <= one.offset < end),
            default=0,
        )

    # ---- readers ---------------------------------------------------------------------------------

    def read(self, reader: Pass, record: Record, *, is_committed: bool) -> Seen:
        """A reader got a record."""
        place = TopicPartition(str(record.topic), record.partition)
        seen = Seen(record.offset, record.key or b"", record.value, record.timestamp)
        passed = reader.passed.get(place, 0)
        assert seen.offset >= passed, f"{place}: offset {seen.offset} came behind {passed - 1}"
        name = self._check(place, seen, is_committed=is_committed)
        known = self._names.setdefault((place, seen.offset), name)
        assert known == name, f"{place}: offset {seen.offset} was {known!r}, and is {name!r}"
        reader.passed[place] = seen.offset + 1
        reader.latest.setdefault(place, {})[seen.key] = seen.offset
        return seen

    def _check(self, place: TopicPartition, seen: Seen, *, is_committed: bool) -> object:
        """The name of a record that was sent as it was read. Raises AssertionError."""
        row = self.rows.get(seen.stamp_ms)
        if row is not None:
            assert (row.place, row.key, row.value) == (place, seen.key, seen.value), (
                f"{place}: {seen} was sent as {row}"
            )
            offset = self.offsets.get(seen.stamp_ms, seen.offset)
            assert offset == seen.offset, f"{place}: {seen} was acknowledged at {offset}"
            return seen.stamp_ms
        assert seen.value is not None, f"{place}: nobody has sent {seen}"
        token = parse(seen.value)[0]
        written = self.transactions.transactions.get(token)
        assert written is not None, f"{place}: nobody has sent {seen}"
        assert written.values.get(seen.value) == place, f"{seen} was not sent to {place}"
        assert self.key_of(seen.value) == seen.key, f"{place}: {seen} has another's key"
        offset = written.offsets.get(seen.value, seen.offset)
        assert offset == seen.offset, f"{place}: {seen} was acknowledged at {offset}"
        if is_committed:
            assert written.is_commit_asked, f"{place}: {seen} was read before its commit"
            assert written.outcome != "abort", f"{place}: aborted, and read: {seen}"
        return seen.value

    def latest(self, place: TopicPartition, below: int) -> dict[bytes, Latest]:
        """The last record below an offset of each key, of those known to be committed."""
        found: dict[bytes, Latest] = {}
        for key, one in self._committed(place):
            if one.offset < below and (key not in found or found[key].offset < one.offset):
                found[key] = one
        return found

    def _committed(self, place: TopicPartition) -> Iterator[tuple[bytes, Latest]]:
        for stamp_ms, offset in self.offsets.items():
            row = self.rows[stamp_ms]
            if row.place == place:
                yield row.key, Latest(offset, row.value is None, row.sent_ns)
        for written in self.transactions.transactions.values():
            if written.outcome == "commit":
                for value, offset in written.offsets.items():
                    if written.values[value] == place:
                        yield self.key_of(value), Latest(offset, False, 0)

    def _unsettled(self, place: TopicPartition) -> set[bytes]:
        """The keys that may have records of which no program knows the fate."""
        found = {
            row.key
            for stamp_ms, row in self.rows.items()
            if row.place == place and stamp_ms not in self.offsets
        }
        for written in self.transactions.transactions.values():
            if written.outcome == "":
                found |= {self.key_of(v) for v, its in written.values.items() if its == place}
        return found

    def _unknown_tombstones(self, place: TopicPartition) -> dict[bytes, int]:
        """Times of the tombstones whose fate no program knows, by key. The log may have had them,
        and they may have gone before a reader came.
        """
        return {
            row.key: row.sent_ns
            for stamp_ms, row in self.rows.items()
            if row.place == place and row.value is None and stamp_ms not in self.offsets
        }

    def check_pass(self, reader: Pass, ends: Mapping[TopicPartition, int], now_ns: int) -> None:
        """Check what a reader of committed records has seen up to its position. `ends`: the
        partitions that it has read to the end, of which every record's fate is known by `latest`.
        """
        for place, passed in reader.passed.items():
            below = max(passed, ends.get(place, 0))
            seen = reader.latest.get(place, {})
            unsettled = self._unsettled(place)
            newest = self.latest(place, 1 << 62)
            for key, last in self.latest(place, below).items():
                offset = seen.get(key, -1)
                if offset >= last.offset or newest[key].offset >= below:
                    continue
                if last.offset < self.starts[place]:
                    continue  # retention has removed it
                if key in unsettled and place not in ends:
                    continue
                # A record may have waited in the reader's buffer or socket since it began.
                since_ns = reader.began_ns
                if offset < 0:
                    since_ns = min(since_ns, last.sent_ns)
                if last.is_tombstone and now_ns - since_ns >= self._retention_ns:
                    continue  # the reader was slower than the tombstone's time
                raise AssertionError(
                    f"{place}: of key {key!r} a reader has passed {below} with offset {offset}, "
                    f"and {last} is lost; began {reader.began_ns}, now {now_ns}, "
                    f"retention {self._retention_ns}"
                )

    def check_all(self, place: TopicPartition, found: list[Seen]) -> None:
        """All that is committed is read in the end, where nothing is compacted."""
        offsets = {seen.offset for seen in found}
        for key, known in self._committed(place):
            is_here = known.offset in offsets or known.offset < self.starts[place]
            assert is_here, f"{place}: a record of {key!r} is lost: {known}"

    def check_log(
        self, place: TopicPartition, found: list[Seen], cleaned_below: int, now_ns: int
    ) -> None:
        """Check what is read in the end, when everything is decided and clean."""
        names = [self._names[place, seen.offset] for seen in found]
        assert len(names) == len(set(names)), f"{place}: a record is there twice"
        clean = [seen.key for seen in found if seen.offset < cleaned_below]
        assert len(clean) == len(set(clean)), f"{place}: a key is there twice below {cleaned_below}"
        last = {seen.key: seen.offset for seen in found}
        unknown = self._unknown_tombstones(place)
        for key, known in self.latest(place, 1 << 62).items():
            if last.get(key, -1) >= known.offset or known.offset < self.starts[place]:
                continue
            sent_ns = known.sent_ns if known.is_tombstone else unknown.get(key)
            assert sent_ns is not None, f"{place}: the latest of {key!r} is lost: {known}"
            assert key not in last, f"{place}: {key!r} has come back at {last[key]}: {known}"
            assert now_ns - sent_ns >= self._retention_ns, (
                f"{place}: the tombstone of {key!r} went early: {known} at {now_ns}"
            )
