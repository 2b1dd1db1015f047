"""A source and a target of a migration in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import orjson

from appliance.migrate.journal import Entry, Journal
from appliance.migrate.rows import LastRow, Rows, size_of
from appliance.migrate.session import Counts, Session
from tailrace.core.topic_partition import TopicPartition

PARTITION = TopicPartition("orders", 0)


class Source:
    """One partition, whose records are their offsets."""

    def __init__(self) -> None:
        self.first = self.end = self.position = 0
        self.high_watermark: int | None = None
        """With an open transaction."""

    def bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        return dict.fromkeys(partitions, (self.first, self.end))

    def unstable(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, tuple[int, int]]:
        if self.high_watermark is None:
            return {}
        return dict.fromkeys(partitions, (self.end, self.high_watermark))

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self.position = positions[PARTITION]
        assert self.position >= self.first

    def stop(self, partition: TopicPartition) -> None:
        assert partition == PARTITION

    def read(self, timeout_s: float) -> tuple[Sequence[Rows], dict[TopicPartition, int]]:
        del timeout_s
        offsets = list(range(self.position, min(self.end, self.position + 50)))
        if not offsets:
            return [], {PARTITION: self.end}
        self.position = offsets[-1] + 1
        values = [b"%d" % offset for offset in offsets]
        keys = [b"k"] * len(offsets)
        stamps = [1] * len(offsets)
        return [Rows(PARTITION, offsets, stamps, keys, values, None, size_of(keys, values))], {}

    def close(self) -> None:
        pass


class Target:
    """A log and a journal. Each transaction ends with a marker, None in the log."""

    writes_plainly = True

    def __init__(self) -> None:
        self.log: list[int | None] = []
        self.journal: list[bytes | None] = []
        self.size_max = 1 << 30
        self._sent: list[int] = []

    def open(self) -> list[bytes | None]:
        self._sent.clear()
        return self.journal

    def ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, len(self.log))

    def plain_count(self, partition: TopicPartition, start: int) -> int:
        assert partition == PARTITION
        return len(self.log) - start

    def last_rows(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, LastRow]:
        return {
            each: LastRow(1, b"k", b"%d" % (self.log[offset] or 0))
            for each, offset in offsets.items()
        }

    def position_plain(self, positions: Mapping[TopicPartition, int]) -> None:
        assert set(positions.values()) <= {len(self.log)}

    def write_plain(self, rows: Rows) -> None:
        self.log += rows.offsets

    def settle(self, waiting_max: int = 0) -> None:
        pass

    def write(self, rows: Rows, target_end: int) -> None:
        assert target_end == len(self.log)
        self._sent += rows.offsets

    def commit(
        self,
        entries_of: Callable[[Mapping[TopicPartition, Sequence[Sequence[int]]]], Sequence[Entry]],
    ) -> dict[TopicPartition, int]:
        written = {PARTITION: [[len(self.log), len(self._sent)]]} if self._sent else {}
        self.journal += [orjson.dumps(entry) for entry in entries_of(written)]
        if not self._sent:
            return {}
        self.log += [*self._sent, None]
        self._sent.clear()
        return {PARTITION: len(self.log)}

    def too_large(self, rows: Rows) -> tuple[int, int, int] | None:
        return rows.first_over(self.size_max)

    def missing_key(self, rows: Rows) -> int | None:
        del rows
        return None

    def close(self) -> None:
        pass


def session_of(source: Source, target: Target) -> Session:
    """A session that has begun."""
    session = Session(
        source, target, Journal(target.open()), {"orders": "id"}, Counts(), appends=False
    )
    session.begin([PARTITION])
    return session


def copy(source: Source, target: Target) -> Session:
    """A session that has copied everything up to the end of the source."""
    session = session_of(source, target)
    while not session.is_at_end:
        session.step()
    session.finish()
    return session
