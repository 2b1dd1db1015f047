"""LatestOffsets: the offsets with the latest record of each key, found by reading the keys alone.

In a partition the record with the highest offset is a key's latest. A key has records in several
partitions if the number of partitions was changed, or the sender chose them. Then the partition
with the latest time of any of the key's records has the latest one; with equal times the partition
with the higher number. (Were only the latest records compared, a live table could not decide
without the others: an earlier clock may take the time back.)

Owner: one scan, one thread. `LatestOffsets` does not change once it is found.

Invariants:
- Each key of the plan's rows has exactly one latest record. Rows without a key have none.
- The memory of the search is at most `latest_memory_bytes` and one batch, beside one bit for each
  offset of the plan. Where the keys do not fit, it reads them several times, each time those with
  hashes in one range.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.core.topic_partition import TopicPartition
from tailrace.kernel import KeyNumbers
from tailrace.scanning.columns import LOG_COLUMNS, Column, Origin
from tailrace.scanning.latest.key_column import TAGS_END, chosen_key, number_keys
from tailrace.scanning.scan_plan import PartitionRange, ScanPlan

Read = Callable[[ScanPlan], Iterator[pa.RecordBatch]]
"""Reads the rows of a plan."""
Numbers = np.ndarray[Any, np.dtype[np.int64]]
_OFFSET, _TIME = (
    next(column for column in LOG_COLUMNS if column.origin is origin)
    for origin in (Origin.OFFSET, Origin.TIME)
)


class LatestOffsets:
    """A set of offsets of each partition, one bit an offset."""

    def __init__(self, ranges: tuple[PartitionRange, ...]) -> None:
        self._bits = {
            r.key: (r.start, np.zeros((r.end - r.start + 7) // 8, np.uint8)) for r in ranges
        }

    def add(self, key: TopicPartition, offsets: Numbers) -> None:
        """Add these offsets of a partition, each of them once."""
        if not len(offsets):
            return
        start, bits = self._bits[key]
        places = np.sort(offsets) - start
        at = places >> 3
        firsts = np.flatnonzero(np.diff(at, prepend=-1))
        bits[at[firsts]] |= np.bitwise_or.reduceat(
            np.left_shift(1, places & 7).astype(np.uint8), firsts
        )

    def rows(self, key: TopicPartition, offsets: Numbers) -> Numbers:
        """The rows whose offsets are in the set. `offsets` are those of a batch, ascending."""
        start, bits = self._bits[key]
        first, last = int(offsets[0]) - start, int(offsets[-1]) - start
        if last - first + 1 == len(offsets):  # without gaps
            whole = np.unpackbits(bits[first >> 3 : (last >> 3) + 1], bitorder="little")
            return np.flatnonzero(whole[first & 7 : (first & 7) + len(offsets)])
        places = offsets - start
        return np.flatnonzero(bits[places >> 3] >> (places & 7).astype(np.uint8) & 1)

    def part(self, ranges: Iterable[PartitionRange]) -> LatestOffsets:
        """The set of some partitions' ranges, parts of those that the set is of."""
        found = LatestOffsets(())
        for r in ranges:
            start, bits = self._bits[r.key]
            first = (r.start - start) >> 3
            until = (r.end - start + 7) >> 3
            before = found._bits.get(r.key)
            if before is not None:  # several ranges of one partition: what lies between, too
                first = min(first, (before[0] - start) >> 3)
                until = max(until, ((before[0] - start) >> 3) + len(before[1]))
            found._bits[r.key] = start + (first << 3), bits[first:until].copy()
        return found

    @property
    def byte_count(self) -> int:
        """The memory of the set."""
        return sum(bits.nbytes for _, bits in self._bits.values())


def check_key(made: ScanPlan) -> Column:
    """The column with the keys of a plan's rows. Raises InvalidSettingError."""
    return chosen_key(made.topic, made.topic_schema, made.settings.key_column, typed=made.typed)


def find_latest(
    made: ScanPlan, read: Read, after_batch: Callable[[], None] = lambda: None
) -> LatestOffsets:
    """Find the latest record of each key of a plan. `after_batch` is called after each batch.

    Raises what `read` raises.
    """
    key = check_key(made)
    keys_only = replace(made, settings=replace(made.settings, on_damage=None))
    found = LatestOffsets(made.ranges)
    low, secret = 0, os.urandom(16)  # the parts divide the keys by the same hashes
    while low < TAGS_END:
        part = _PartOfKeys(keys_only, key, low, secret)
        for number, r in enumerate(made.ranges):
            part.read_range(number, r, read, after_batch)
        part.add_to(found)
        low = part.high
    return found


class _PartOfKeys:
    """The latest records of the keys whose tags are in one range: as many as memory has room for.

    Arrays have one item for each key number, and room for more.
    """

    def __init__(self, made: ScanPlan, key: Column, low: int, secret: bytes) -> None:
        self._made = made
        self._key = key
        self._low, self.high = low, TAGS_END
        self._keys = KeyNumbers(secret)
        self._with_times = len(made.ranges) > 1
        names = ("partition", "offset", *(("time",) if self._with_times else ()))
        self._best = {name: np.full(1024, -1, np.int64) for name in names}
        self._here: dict[str, Numbers] = {}
        """The latest records in the partition that is read."""

    def read_range(
        self, number: int, r: PartitionRange, read: Read, after_batch: Callable[[], None]
    ) -> None:
        """Read the keys of the plan's range of this number."""
        columns = (self._key, _OFFSET, *((_TIME,) if self._with_times else ()))
        size = len(self._best["offset"])
        self._here = {
            name: np.full(size, -1, np.int64) for name in self._best if name != "partition"
        }
        for batch in read(replace(self._made, columns=columns, ranges=(r,))):
            self._add(batch)
            after_batch()
        self._merge(number)

    def _add(self, batch: pa.RecordBatch) -> None:
        numbers = number_keys(self._keys, batch.column(0), self._low, self.high)
        if len(self._keys) > len(self._best["offset"]):
            self._grow()
        here = np.flatnonzero(numbers >= 0)
        is_all = len(here) == len(numbers)
        numbers = numbers if is_all else numbers[here]
        offsets = _integers(batch.column(1))
        # Of several rows of one key the last is what remains.
        self._here["offset"][numbers] = offsets if is_all else offsets[here]
        if self._with_times:
            times = _integers(batch.column(2))
            np.maximum.at(self._here["time"], numbers, times if is_all else times[here])
        self._narrow_if_full()

    def _grow(self) -> None:
        size = max(len(self._keys), len(self._best["offset"]) * 3 // 2)
        for arrays in (self._best, self._here):
            for name, array in arrays.items():
                arrays[name] = np.full(size, -1, np.int64)
                arrays[name][: len(array)] = array

    def _narrow_if_full(self) -> None:
        """Give up the keys with the higher hashes if the memory is used up: a later part has
        them.
        """
        while self._byte_count() > self._made.settings.latest_memory_bytes and (
            self.high - self._low > 1 and len(self._keys) > 1
        ):
            self.high = (self._low + self.high) // 2
            tags = np.frombuffer(self._keys.tags(), np.uint32)
            kept = np.flatnonzero(tags < self.high).astype(np.int32)
            self._keys.retain(kept)
            for arrays in (self._best, self._here):
                for name, array in arrays.items():
                    arrays[name] = array[kept]

    def _byte_count(self) -> int:
        arrays = (*self._best.values(), *self._here.values())
        return int(self._keys.byte_count) + sum(array.nbytes for array in arrays)

    def _merge(self, number: int) -> None:
        """Compare the partition's latest records with those of the partitions before."""
        count = len(self._keys)
        best, here = self._best, self._here
        is_later = here["offset"][:count] >= 0
        if self._with_times:
            is_later &= (best["partition"][:count] < 0) | (
                here["time"][:count] >= best["time"][:count]
            )
        later = np.flatnonzero(is_later)
        best["partition"][later] = number
        for name, array in here.items():
            best[name][later] = array[later]
        self._here = {}

    def add_to(self, found: LatestOffsets) -> None:
        """Add the latest records of these keys to the set."""
        count = len(self._keys)
        for number, r in enumerate(self._made.ranges):
            here = self._best["partition"][:count] == number
            found.add(r.key, self._best["offset"][:count][here])


def _integers(column: pa.Array) -> Numbers:
    """The values of a column of 64-bit integers or times without nulls."""
    data = np.frombuffer(column.buffers()[1], np.int64)
    return data[column.offset : column.offset + len(column)]
