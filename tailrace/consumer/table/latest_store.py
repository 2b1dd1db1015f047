"""LatestStore: the latest value of each key, in packed memory.

    key --KeyNumbers--> number --places--> chunk and row --> value
                               --offsets, times, partitions--> the record that it came from

The same rule decides as in `tailrace.scanning.latest`: in a partition the highest offset is the
latest; between partitions the one with the latest time of any of the key's records (`claim`), and
with equal times the one with the higher number.

Owner: the table's thread changes it, under the table's lock. Readers hold the lock, too.

Invariants:
- The result does not depend on the order in which partitions are read. For that the store keeps
  tombstones for a day of the topic's time, if the topic has several partitions.
- `record_count` is the number of keys with a value.
- At most half of the rows in chunks are outdated, plus SLACK_ROWS. At most SMALL_CHUNKS_MAX chunks
  have fewer than SMALL_ROWS rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tailrace.consumer.table.chunk import Chunk, taken
from tailrace.kernel import KeyNumbers
from tailrace.scanning.latest.key_column import number_keys

NOTHING, TOMBSTONE = -1, -2
"""Places of keys without a value: none is known, or the latest record has none."""
ROW_BITS = 32
ROW_MASK = (1 << ROW_BITS) - 1
SMALL_ROWS, SMALL_CHUNKS_MAX = 1_024, 64
SLACK_ROWS = 10_000
CHUNK_BYTES = 4 << 20
TOMBSTONES_MIN = 1_000
TOMBSTONE_KEPT_US = 86_400_000_000
Numbers = np.ndarray[Any, np.dtype[Any]]


class Rows(NamedTuple):
    """Records of one partition, in offset order."""

    partition: int
    keys: pa.Array
    values: pa.RecordBatch
    """The columns of a row (see `Chunk`)."""
    offsets: Numbers
    times_us: Numbers
    has_value: Numbers
    """Booleans: False for a tombstone."""


class StoredRow(NamedTuple):
    """The latest record of a key."""

    value: Any
    headers: list[tuple[str, bytes]]
    partition: int
    offset: int
    time_us: int


class LatestStore:
    """The latest value of each key."""

    def __init__(self, *, typed: bool) -> None:
        self._typed = typed
        self._keys = KeyNumbers()
        self._columns: dict[str, Numbers] = {
            "place": np.full(1024, NOTHING, np.int64), "offset": np.full(1024, -1, np.int64),
            "time": np.full(1024, -1, np.int64), "claim": np.full(1024, -1, np.int64),
            "partition": np.full(1024, -1, np.int32),
        }  # fmt: skip
        """One item for each key number, and room for more."""
        self._places = self._columns["place"].data
        self._chunks: dict[int, Chunk] = {}
        self._next_chunk = 0
        self._newest_us = 0
        self._tombstones_limit = TOMBSTONES_MIN
        self.record_count = 0
        self.tombstone_count = 0

    @property
    def byte_count(self) -> int:
        """The memory of keys and values."""
        return (
            int(self._keys.byte_count)
            + sum(column.nbytes for column in self._columns.values())
            + sum(chunk.byte_count for chunk in self._chunks.values())
        )

    # ---- lookups ---------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return self.place_of(key) >= 0

    def place_of(self, key: bytes) -> int:
        """The place of a key's value; negative: it has none."""
        number = self._keys.find(key)
        return NOTHING if number < 0 else self._places[number]

    def value_at(self, place: int) -> Any:
        """The value at a place of `place_of`."""
        return self._chunks[place >> ROW_BITS].value(place & ROW_MASK)

    def row_of(self, key: bytes) -> StoredRow | None:
        """The latest record of a key with a value, None without one."""
        number = self._keys.find(key)
        if number < 0 or self._places[number] < 0:
            return None
        place = self._places[number]
        chunk = self._chunks[place >> ROW_BITS]
        return StoredRow(
            chunk.value(place & ROW_MASK),
            chunk.headers(place & ROW_MASK),
            *(int(self._columns[name][number]) for name in ("partition", "offset", "time")),
        )

    def snapshot(self) -> Iterator[tuple[bytes, Any]]:
        """Keys and values as they are now, in no order; values are made when they are taken.

        It copies the keys, and keeps the chunks.
        """
        ends_data, data = self._keys.keys()
        ends = np.frombuffer(ends_data, np.int64)
        places = self._columns["place"][: len(self._keys)].copy()
        chunks = dict(self._chunks)
        return (
            (
                data[ends[number] : ends[number + 1]],
                chunks[place >> ROW_BITS].value(place & ROW_MASK),
            )
            for number, place in enumerate(places.tolist())
            if place >= 0
        )

    def key_snapshot(self) -> Iterator[bytes]:
        """The keys of `snapshot`."""
        ends_data, data = self._keys.keys()
        ends = np.frombuffer(ends_data, np.int64).tolist()
        places = self._columns["place"][: len(self._keys)].copy().tolist()
        return (
            data[ends[number] : ends[number + 1]]
            for number, place in enumerate(places)
            if place >= 0
        )

    # ---- changes ---------------------------------------------------------------------------------

    def apply(self, rows: Rows) -> Numbers:
        """Apply records of a partition. Returns the rows that were the latest of their keys when
        they came.
        """
        numbers = number_keys(self._keys, rows.keys)
        if len(self._keys) > len(self._places):
            self._grow()
        at: Numbers = np.flatnonzero(numbers >= 0)
        numbers = numbers[at]
        if not len(at):
            return at
        # Offsets up to the known one were applied before: a fetch was repeated.
        partition = self._columns["partition"][numbers]
        is_new = (partition != rows.partition) | (
            rows.offsets[at] > self._columns["offset"][numbers]
        )
        if ((partition >= 0) & (partition != rows.partition)).any():
            is_new &= self._is_latest(rows, at, numbers)
        at, numbers = at[is_new], numbers[is_new]
        if len(at):
            self._put(rows, at, numbers)
        return at

    def _is_latest(self, rows: Rows, at: Numbers, numbers: Numbers) -> Numbers:
        """For each row: True if it, or an earlier row of its key here, is later than the record
        of another partition.
        """
        partition, claim = self._columns["partition"][numbers], self._columns["claim"][numbers]
        times = rows.times_us[at]
        is_later = (partition < 0) | (partition == rows.partition) | (times > claim)
        is_later |= (times == claim) & (partition < rows.partition)
        order = np.argsort(numbers, kind="stable")
        firsts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        counts = np.cumsum(is_later[order])
        before = np.repeat(
            counts[firsts] - is_later[order][firsts], np.diff(firsts, append=len(order))
        )
        result: Numbers = np.empty(len(order), bool)
        result[order] = counts > before
        return result

    def _put(self, rows: Rows, at: Numbers, numbers: Numbers) -> None:
        """Put the last row of each key into its place."""
        columns = self._columns
        place, claim, partition = columns["place"], columns["claim"], columns["partition"]
        times = np.maximum(rows.times_us[at], NOTHING)
        claim[numbers[partition[numbers] != rows.partition]] = NOTHING
        np.maximum.at(claim, numbers, times)
        self._newest_us = max(self._newest_us, int(times.max()))
        before = place[numbers]
        place[numbers] = at
        is_last = place[numbers] == at
        at, numbers, before = at[is_last], numbers[is_last], before[is_last]
        columns["offset"][numbers], columns["time"][numbers] = rows.offsets[at], rows.times_us[at]
        partition[numbers] = rows.partition
        place[numbers] = TOMBSTONE
        self._forget(before)
        has_value = rows.has_value[at]
        kept = at[has_value]
        if len(kept):
            place[numbers[has_value]] = self._add_chunk(taken(rows.values, kept))
        self.record_count += len(kept)
        self.tombstone_count += len(at) - len(kept)

    def _forget(self, places: Numbers) -> None:
        """Count values and tombstones at these places as outdated."""
        self.tombstone_count -= int(np.count_nonzero(places == TOMBSTONE))
        values = places[places >= 0]
        self.record_count -= len(values)
        for chunk, count in zip(*np.unique(values >> ROW_BITS, return_counts=True), strict=True):
            self._chunks[int(chunk)].live_count -= int(count)

    def _add_chunk(self, batch: pa.RecordBatch) -> Numbers:
        """Add a chunk; returns the places of its rows."""
        number = self._next_chunk
        self._next_chunk += 1
        self._chunks[number] = Chunk(batch, typed=self._typed)
        places: Numbers = np.arange(batch.num_rows, dtype=np.int64) + (number << ROW_BITS)
        return places

    def _grow(self) -> None:
        before, size = len(self._places), max(len(self._keys), len(self._places) * 3 // 2)
        self._places.release()
        for column in self._columns.values():
            column.resize(size, refcheck=False)
            column[before:] = NOTHING
        self._places = self._columns["place"].data

    def remove_below(self, partition: int, offset: int) -> list[bytes]:
        """Remove the keys whose latest record is in this partition, below this offset. Returns
        those that had a value.
        """
        count = len(self._keys)
        place = self._columns["place"][:count]
        gone = np.flatnonzero(
            (self._columns["partition"][:count] == partition)
            & (self._columns["offset"][:count] < offset)
        )
        had_value = gone[place[gone] >= 0]
        keys = self._keys_of(had_value)
        self._forget(place[gone])
        for column in self._columns.values():
            column[gone] = NOTHING
        return keys

    def _keys_of(self, numbers: Numbers) -> list[bytes]:
        if not len(numbers):
            return []
        ends_data, data = self._keys.keys()
        ends = np.frombuffer(ends_data, np.int64)
        return [data[ends[number] : ends[number + 1]] for number in numbers.tolist()]

    def convert(self, convert: Callable[[pa.RecordBatch], pa.RecordBatch]) -> None:
        """Convert all values: the topic has another schema. Raises what `convert` does, and has
        changed nothing then.
        """
        converted = {number: convert(chunk.batch) for number, chunk in self._chunks.items()}
        for number, batch in converted.items():
            before = self._chunks[number]
            after = self._chunks[number] = Chunk(batch, typed=self._typed)
            after.live_count = before.live_count

    # ---- tidying ---------------------------------------------------------------------------------

    def tidy(self, partition_count: int) -> None:
        """Copy the live rows out of chunks that are small or mostly outdated, and drop tombstones
        and unused keys, where the invariants ask for it.
        """
        for number in [n for n, chunk in self._chunks.items() if not chunk.live_count]:
            del self._chunks[number]
        row_count = sum(chunk.batch.num_rows for chunk in self._chunks.values())
        small = [n for n, c in self._chunks.items() if c.batch.num_rows < SMALL_ROWS]
        if len(small) > SMALL_CHUNKS_MAX:
            self._unite(small)
        if row_count - self.record_count > self.record_count // 2 + SLACK_ROWS:
            self._unite(
                [
                    number
                    for number, chunk in self._chunks.items()
                    if chunk.live_count * 4 < chunk.batch.num_rows * 3
                ]
            )
        unused = len(self._keys) - self.record_count
        if unused > self._tombstones_limit and unused > self.record_count // 4:
            self._drop_unused(partition_count)

    def _unite(self, chunks: list[int]) -> None:
        """Copy the live rows of these chunks into new ones."""
        if not chunks:
            return
        places = self._columns["place"][: len(self._keys)]
        is_of = np.zeros(self._next_chunk + 1, bool)
        is_of[chunks] = True
        numbers = np.flatnonzero(places >= 0)
        numbers = numbers[is_of[places[numbers] >> ROW_BITS]]
        numbers = numbers[np.argsort(places[numbers], kind="stable")]
        at = places[numbers]
        edges = np.flatnonzero(np.diff(at >> ROW_BITS, prepend=-1, append=-1))
        pieces: list[pa.RecordBatch] = []
        begin = row_count = byte_count = 0
        for first, following in itertools.pairwise(edges):
            chunk = self._chunks.pop(int(at[first] >> ROW_BITS))
            pieces.append(taken(chunk.batch, at[first:following] & ROW_MASK))
            row_count += int(following - first)
            byte_count += chunk.byte_count
            if byte_count > CHUNK_BYTES or following == len(at):
                united = pa.concat_batches([_like(piece, pieces) for piece in pieces])
                places[numbers[begin : begin + row_count]] = self._add_chunk(united)
                pieces, begin, row_count, byte_count = [], begin + row_count, 0, 0

    def _drop_unused(self, partition_count: int) -> None:
        """Forget the keys without a value. Tombstones stay for a day where another partition may
        have an older value of the key.
        """
        count = len(self._keys)
        place, claim = self._columns["place"][:count], self._columns["claim"][:count]
        is_kept = place >= 0
        if partition_count > 1:
            is_kept |= (place == TOMBSTONE) & (claim > self._newest_us - TOMBSTONE_KEPT_US)
        kept = np.flatnonzero(is_kept)
        self._keys.retain(kept.astype(np.int32))
        self._places.release()
        self._columns = {name: column[kept] for name, column in self._columns.items()}
        self._places = self._columns["place"].data
        self.tombstone_count = len(kept) - self.record_count
        self._tombstones_limit = max(TOMBSTONES_MIN, 2 * self.tombstone_count)


def _like(piece: pa.RecordBatch, pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
    """A piece with the columns of the widest: those of headers may be left out."""
    widest = max(pieces, key=lambda other: other.num_columns)
    if piece.num_columns == widest.num_columns:
        return piece
    columns = [
        *piece.columns,
        *(
            pa.nulls(piece.num_rows, field.type)
            for field in list(widest.schema)[piece.num_columns :]
        ),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=widest.schema)
