"""The kernel in Python: the truth that the compiled one is held against (`tests/tailrace/test_kernel.py`), and what is used where none is compiled.

Producing: `quick_send` takes a record that needs no thought into the open batch of its partition; a `RecordBuffer` holds the records of a batch and makes
the Arrow message of them. Consuming: `records` makes Record tuples of columns.

Owner: objects belong to one client; but for `records` and `murmur2`, which are pure, they are used under its lock.
Invariants: a record that was taken does not change with what the caller does afterwards; a call that raises has taken nothing; `room` never falls below
    what the records of the batch, by `RECORD_OVERHEAD_BYTES` and their bytes, leave of it.
"""

from __future__ import annotations

import functools
import gc
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from time import time_ns
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

P = ParamSpec("P")
R = TypeVar("R")
Headers = Sequence[tuple[str, bytes | None]] | None

RECORD_OVERHEAD_BYTES = 24
"""What a record costs in a batch beside key and value: timestamp, three offsets, bits."""
KNOWN_KEYS_MAX = 100_000
DATA_MAX = 2**31 - 1
"""Bytes of a column: Arrow's offsets have 32 bits."""
FEW = 16
"""Up to so many records `tailrace.few_rows` is quicker than Arrow's library."""
_MASK = 0xFFFFFFFF
_M = 0x5BD1E995


def murmur2(data: bytes) -> int:
    """Kafka's murmur2 of `data`, as an unsigned 32-bit number."""
    length = len(data)
    h = 0x9747B28C ^ length
    whole = length // 4
    for k in struct.unpack_from(f"<{whole}I", data):
        k = k * _M & _MASK
        k ^= k >> 24
        h = h * _M & _MASK ^ k * _M & _MASK
    rest = length & 3
    if rest:
        tail = data[whole * 4 :]
        if rest == 3:
            h ^= tail[2] << 16
        if rest >= 2:
            h ^= tail[1] << 8
        h ^= tail[0]
        h = h * _M & _MASK
    h ^= h >> 13
    h = h * _M & _MASK
    return h ^ h >> 15


class RecordBuffer:
    """The records of a batch, from its first to its encoding."""

    __slots__ = ("_data_max", "cells", "headers")

    def __init__(self, data_max: int = DATA_MAX) -> None:
        self._data_max = data_max
        self.cells: list[Any] = []
        """key, value, nanoseconds since 1970, and so on: one list, so that a record is one addition (see `quick_send`)."""
        self.headers: dict[int, Headers] = {}

    def __len__(self) -> int:
        return len(self.cells) // 3

    def add(self, key: bytes | None, value: Any, stamp_us: int, headers: Headers = None) -> int:
        """Append a record; returns its row. `headers`: (text that is UTF-8, bytes or None) pairs."""
        return self.add_into(None, key, value, stamp_us, headers, 0)

    def add_into(self, batch: FillingBatch | None, key: bytes | None, value: Any, stamp_us: int, headers: Headers, byte_count: int) -> int:
        """The same; with a batch, if that has room for `byte_count`, which are taken of it, else returns -1."""
        cells = key, value, stamp_us * 1000
        kept = list(headers) if headers else None
        # From here on nothing is made that could have the collector run.
        if batch is not None:
            room = batch.room - byte_count
            if room < 0:
                return -1
            batch.room = room
        row = len(self.cells) // 3
        self.cells += cells
        if kept:
            self.headers[row] = kept
        return row

    def keys(self) -> list[bytes | None]:
        """The key of each record."""
        return self.cells[0::3]

    def values(self) -> list[Any]:
        """The value of each record."""
        return self.cells[1::3]

    def stamps_us(self) -> Sequence[int]:
        """The timestamp of each record."""
        return self._stamps() if len(self) > FEW else [stamp_ns // 1000 for stamp_ns in self.cells[2::3]]  # type: ignore[return-value]

    def ends_without_key(self) -> bool:
        """Whether there is a last record, and it has no key."""
        return bool(self.cells) and self.cells[-3] is None

    def picked(self, rows: Iterable[int]) -> RecordBuffer:
        """The records of some rows, in that order. Raises IndexError."""
        chosen = RecordBuffer(self._data_max)
        cells, count = self.cells, len(self)
        for there, row in enumerate(rows):
            if not 0 <= row < count:
                raise IndexError(f"there are rows 0 to {count - 1}, not {row}")
            chosen.cells += cells[3 * row : 3 * row + 3]
            if row in self.headers:
                chosen.headers[there] = self.headers[row]
        return chosen

    def clear(self) -> None:
        """Forget all records."""
        self.cells = []
        self.headers = {}

    def frame(self) -> pa.RecordBatch:
        """The records as a batch of the default schema. Raises InvalidRecordError, OverflowError."""
        from tailrace.errors import InvalidRecordError
        from tailrace.formats import arrow_batch

        if self._data_max < DATA_MAX:
            self._check_sizes()
        headers = [self.headers.get(row) for row in range(len(self))] if self.headers else None
        try:
            return arrow_batch.default_rows(self._stamps(), self.keys(), self.values(), headers)  # type: ignore[arg-type]
        except InvalidRecordError:
            self._check_sizes()
            raise

    def message(self, gap: int = 0) -> bytearray:
        """The records as an encapsulated Arrow message of the default schema whose metadata has `gap` more bytes of padding, zeros, a multiple of 8, than it
        needs. There is a record at least. Raises InvalidRecordError, OverflowError.
        """
        from tailrace import few_rows

        message: Any
        if len(self) <= FEW and not self.headers:
            self._check_sizes()
            message = few_rows.encode(list(self.stamps_us()), self.keys(), self.values())
        else:
            message = self.frame().serialize()
        view = memoryview(message)
        size = int.from_bytes(view[4:8], "little")
        return bytearray(b"").join(
            (b"\xff\xff\xff\xff", (size + gap).to_bytes(4, "little"), view[8 : 8 + size], bytes(gap), view[8 + size :])
        )

    def _stamps(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        import numpy as np

        try:
            stamps = np.array(self.cells[2::3], np.int64)
        except OverflowError:  # of a timestamp that was given: further from 1970 than nanoseconds can say
            return np.array([stamp_ns // 1000 for stamp_ns in self.cells[2::3]], np.int64)
        stamps //= 1000
        return stamps

    def _check_sizes(self) -> None:
        for column in (self.keys(), self.values()):
            if sum(map(len, filter(None, column))) > self._data_max:
                raise OverflowError(f"the keys, or the values, of a batch have more than {self._data_max} bytes")


class FillingBatch:
    """Of a batch of a producer: what `quick_send` adds to."""

    __slots__ = ("callbacks", "room", "rows")

    def __init__(self) -> None:
        self.rows = RecordBuffer()
        """Its records until it is encoded."""
        self.room = 0
        """How much of its reservation in the producer's buffer_memory is not used yet."""
        self.callbacks: list[tuple[int, Callable[..., None]]] | None = None
        """(row, what is to be called with that record's fate); None: nothing is."""

    def add(self, key: bytes | None, value: Any, stamp_us: int, headers: Headers, byte_count: int) -> int:
        """Append a record that takes `byte_count`; returns its row. -1: there is no room, or none any more: while its parts were made, the collector may have
        run code that sends, and so has filled or closed the batch.
        """
        return self.rows.add_into(self, key, value, stamp_us, headers, byte_count)


class FillingQueue:
    """Of a partition's queue: which batch takes records."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open: Any = None
        """A FillingBatch, or None."""


class Choices(dict[object, tuple[Any, "bytes | None", int]]):
    """Where the records of a topic go: what is known without asking a partitioner again.

    Key -> (queue, the key, what a record of it takes in a batch beside its value); without a key that is so for as long as the batch is open.
    """

    def __init__(self, queues: Sequence[Any], *, takes_partitions: bool, by_murmur2: bool) -> None:
        """`takes_partitions`: a record whose partition is named needs no more thought. `by_murmur2`: keys go by Kafka's default partitioner."""
        super().__init__()

    def remember(self, key: bytes | None, queue: Any) -> None:
        """What the partitioner has chosen."""
        if len(self) >= KNOWN_KEYS_MAX:
            self.clear()
        self[key] = queue, key, len(key or b"") + RECORD_OVERHEAD_BYTES

    def queue_of(self, key: object) -> Any:
        """Where records of a key that was seen before go; None: ask the partitioner."""
        try:
            return self[key][0]
        except (KeyError, TypeError):
            return None

    def forget_keyless(self) -> None:
        """The batch of records without a key is closed."""
        self.pop(None, None)


def new_lock() -> threading.RLock:
    """A lock for a QuickSender, reentrant."""
    return threading.RLock()


class QuickSender:
    """Of a producer: what its `send` needs for a record that needs no thought."""

    def _begin_quick_sends(self, choices: dict[str, Choices], lock: threading.RLock) -> None:
        """`choices`: topic -> what is known of it, kept by the producer. `lock`: the producer's."""
        self._choices = choices
        self._acquire, self._release = lock.acquire, lock.release


def header_lists(column: pa.Array) -> list[list[tuple[str, bytes | None]]]:
    """The headers of each record, from their column."""
    if column.null_count == len(column):
        return [[] for _ in range(len(column))]
    return [[(item["key"], item["value"]) for item in row] if row else [] for row in column.to_pylist()]


PIECE_ROWS = 2_048
"""So many rows become records at a time: a record takes many times what its row does."""


class PiecedRows(Generic[R]):
    """Rows that become records when they are asked for, a piece at a time. `make` makes those of (first, count) rows."""

    def __init__(self, first_offset: int, count: int, make: Callable[[int, int], list[R]]) -> None:
        self.next_offset = first_offset
        """Of the first record that is left."""
        self._left = count
        self._make = make
        self._made: list[R] = []
        """The last first: records are taken from the end."""
        self._end = 0
        """So many rows have become records."""

    def __len__(self) -> int:
        return self._left

    def take(self, into: list[R], count: int) -> None:
        """Append the next `count` records, or all that are left. Raises what `make` does; what came before that is appended then."""
        count = min(count, self._left)
        while count > 0:
            if not self._made:
                self._made = self._next_piece()
            taken = min(count, len(self._made))
            into += self._made[: -taken - 1 : -1]
            del self._made[-taken:]
            self.next_offset += taken
            self._left -= taken
            count -= taken

    def _next_piece(self) -> list[R]:
        """Many objects at once, none of them in a cycle: the collector would look at each several times, and at the whole program's objects with them (half of
        a consumer's time, measured). It looks once, afterwards.
        """
        count = min(PIECE_ROWS, self._left)
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            made = self._make(self._end, count)
        finally:
            if was_enabled:
                gc.enable()
        self._end += count
        made.reverse()
        return made


class RecordRows(PiecedRows[R]):
    """Rows of columns of the default schema, all of one length, that become tuples of `record_type` (see `tailrace.records.Record`). The columns have passed
    Arrow's validation, else the compiled kernel raises ValueError, and this one does what Arrow does.
    """

    def __init__(
        self,
        record_type: type[R],
        topic: str,
        partition: int,
        first_offset: int,
        timestamp_type: int,
        stamps_us: np.ndarray[Any, np.dtype[np.int64]],
        keys: pa.Array,
        values: pa.Array,
        headers: pa.Array,
    ) -> None:
        if not len(keys) == len(values) == len(headers) == len(stamps_us):
            raise ValueError("the columns have different lengths")
        new: Any = tuple.__new__

        def make(first: int, count: int) -> list[R]:
            stamps = stamps_us[first : first + count]
            columns = (
                repeat(topic, count), repeat(partition, count), range(first_offset + first, first_offset + first + count), (stamps // 1000).tolist(),
                repeat(timestamp_type, count), keys.slice(first, count).to_pylist(), values.slice(first, count).to_pylist(),
                header_lists(headers.slice(first, count)), stamps.tolist(),
            )  # fmt: skip
            return list(map(functools.partial(new, record_type), zip(*columns, strict=True)))

        super().__init__(first_offset, len(values), make)


def records(
    record_type: type[R],
    topic: str,
    partition: int,
    first_offset: int,
    timestamp_type: int,
    stamps_us: np.ndarray[Any, np.dtype[np.int64]],
    keys: pa.Array,
    values: pa.Array,
    headers: pa.Array,
) -> list[R]:
    """All records of RecordRows at once."""
    made: list[R] = []
    rows = RecordRows(record_type, topic, partition, first_offset, timestamp_type, stamps_us, keys, values, headers)
    rows.take(made, len(rows))
    return made


def quick_send(handle_type: Callable[[tuple[Any, int]], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For `Producer.send`, of a QuickSender: adds a record to its partition's open batch, where that has room and the record is of plain types and needs no
    thought; else the decorated function is called. `handle_type`: makes the handle, of (batch, row).
    """

    def decorate(send: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(send)
        def quick(
            self: Any, topic: Any, value: Any = None, key: Any = None, headers: Any = None, partition: Any = None, timestamp: Any = None, *,
            on_delivery: Any = None, deliver_at: Any = None, deliver_after: Any = None, repeat: Any = None,
        ) -> Any:  # fmt: skip
            # Most records are a few bytes for a key that was seen before, in a batch that has room: this much is done for each of them, and no more.
            if (
                type(value) is bytes and headers is None and partition is None and timestamp is None and on_delivery is None and deliver_at is None
                and deliver_after is None and repeat is None
            ):  # fmt: skip
                try:
                    queue, key, byte_count = self._choices[topic][key]
                except (KeyError, TypeError):
                    pass
                else:
                    self._acquire()
                    try:
                        record = key, value, time_ns()  # first: to make a tuple may have the collector run, and that any code
                        batch = queue.open
                        if batch is not None and (room := batch.room - len(value) - byte_count) > 0:
                            batch.room = room
                            cells = batch.rows.cells
                            cells += record
                            return handle_type((batch, len(cells) // 3 - 1))
                    finally:
                        self._release()
            return send(
                self, topic, value, key, headers, partition, timestamp, on_delivery=on_delivery, deliver_at=deliver_at, deliver_after=deliver_after,
                repeat=repeat,
            )  # fmt: skip

        return quick  # type: ignore[return-value]

    return decorate
