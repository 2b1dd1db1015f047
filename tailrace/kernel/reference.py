"""Python reference of the kernel: the specification of the compiled one, and its replacement.

`tests/tailrace/kernel/test_kernel.py` compares the two. For producers, `fast_send` adds a record to
the open batch of its partition, and a `RecordBuffer` holds a batch's records and encodes its Arrow
message. For consumers, `records` makes Record tuples from columns.

Owner: objects belong to one client and are used under its lock. `records` and `murmur2` are pure.

Invariants:
- An added record does not change with later actions of the caller.
- A call that raises has added nothing.
- `room` never falls below the reservation minus the batch's records, each with its bytes and
  `RECORD_OVERHEAD_BYTES`.
"""

from __future__ import annotations

import functools
import gc
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from time import time_ns
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

P = ParamSpec("P")
R = TypeVar("R")
Headers = Sequence[tuple[str, bytes | None]] | None

RECORD_OVERHEAD_BYTES = 24
"""Bytes of a record in a batch beside key and value: timestamp, three offsets, validity bits."""
KNOWN_KEYS_MAX = 100_000
DATA_MAX = 2**31 - 1
"""Most bytes of a column: Arrow's offsets have 32 bits."""
FEW = 16
"""Most records for which `tailrace.kernel.small_batch` is faster than Arrow's library."""
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
    """The records of a batch until it is encoded."""

    __slots__ = ("_data_max", "cells", "headers")

    def __init__(self, data_max: int = DATA_MAX) -> None:
        self._data_max = data_max
        self.cells: list[Any] = []
        """Key, value, nanoseconds since 1970 of each record in one flat list, so adding a record is
        one operation (see `fast_send`).
        """
        self.headers: dict[int, Headers] = {}

    def __len__(self) -> int:
        return len(self.cells) // 3

    def add(self, key: bytes | None, value: Any, stamp_us: int, headers: Headers = None) -> int:
        """Append a record and return its row. `headers` are (UTF-8 text, bytes or None) pairs."""
        return self.add_into(None, key, value, stamp_us, headers, 0)

    def add_into(
        self,
        batch: OpenBatch | None,
        key: bytes | None,
        value: Any,
        stamp_us: int,
        headers: Headers,
        byte_count: int,
    ) -> int:
        """Append a record as `add` does, and take `byte_count` from the room of `batch`.

        Returns -1 if the batch has too little room.
        """
        cells = key, value, stamp_us * 1000
        kept = list(headers) if headers else None
        # From here on no object is created, so the garbage collector does not run.
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
        """The timestamp of each record, in microseconds."""
        return (
            self._stamps()  # type: ignore[return-value]
            if len(self) > FEW
            else [stamp_ns // 1000 for stamp_ns in self.cells[2::3]]
        )

    def ends_without_key(self) -> bool:
        """True if there is a last record and it has no key."""
        return bool(self.cells) and self.cells[-3] is None

    def picked(self, rows: Iterable[int]) -> RecordBuffer:
        """A new buffer with the given rows, in that order. Raises IndexError."""
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
        """Remove all records."""
        self.cells = []
        self.headers = {}

    def frame(self) -> pa.RecordBatch:
        """The records as a batch of the default schema. Raises
        InvalidRecordError, OverflowError.
        """
        from tailrace.core.errors import InvalidRecordError

        if self._data_max < DATA_MAX:
            self._check_sizes()
        stamps: Any = self._stamps()
        headers: Any = None
        if self.headers:
            headers = [self.headers.get(row) for row in range(len(self))]
        try:
            from tailrace.kernel.reference_arrow import default_rows

            return default_rows(stamps, self.keys(), self.values(), headers)
        except InvalidRecordError:
            self._check_sizes()
            raise

    def message(self, gap: int = 0) -> bytearray:
        """Encode one or more records as an encapsulated Arrow message of the default schema.

        Its metadata ends with `gap` zeros (a multiple of 8). Raises InvalidRecordError,
        OverflowError.
        """
        from tailrace.kernel import small_batch

        message: Any
        if len(self) <= FEW and not self.headers:
            self._check_sizes()
            message = small_batch.encode(list(self.stamps_us()), self.keys(), self.values())
        else:
            message = self.frame().serialize()
        view = memoryview(message)
        size = int.from_bytes(view[4:8], "little")
        return bytearray(b"").join(
            (
                b"\xff\xff\xff\xff",
                (size + gap).to_bytes(4, "little"),
                view[8 : 8 + size],
                bytes(gap),
                view[8 + size :],
            )
        )

    def _stamps(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        import numpy as np

        try:
            stamps = np.array(self.cells[2::3], np.int64)
        except OverflowError:
            # A given timestamp is beyond the range of nanoseconds.
            return np.array([stamp_ns // 1000 for stamp_ns in self.cells[2::3]], np.int64)
        stamps //= 1000
        return stamps

    def _check_sizes(self) -> None:
        for column in (self.keys(), self.values()):
            if sum(map(len, filter(None, column))) > self._data_max:
                raise OverflowError(
                    f"the keys or the values of a batch have more than {self._data_max} bytes"
                )


class OpenBatch:
    """The part of a producer's batch that `fast_send` uses."""

    __slots__ = ("callbacks", "room", "rows")

    def __init__(self) -> None:
        self.rows = RecordBuffer()
        """The batch's records until it is encoded."""
        self.room = 0
        """Unused bytes of its reservation in the producer's buffer_memory."""
        self.callbacks: list[tuple[int, Callable[..., None]]] | None = None
        """(row, callback for that record's result); None: there are none."""

    def add(
        self, key: bytes | None, value: Any, stamp_us: int, headers: Headers, byte_count: int
    ) -> int:
        """Append a record of `byte_count` bytes and return its row, or -1 if there is no room.

        The room may have gone during the call: the garbage collector may have run code that sends,
        and so filled or closed the batch.
        """
        return self.rows.add_into(self, key, value, stamp_us, headers, byte_count)


class OpenQueue:
    """The part of a partition's queue that names the batch for new records."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open: Any = None
        """An OpenBatch, or None."""


class PartitionCache(dict[object, tuple[Any, "bytes | None", int]]):
    """Cache of a topic's partitioning, which avoids calls of the partitioner.

    Key -> (queue, the key, bytes of its record beside the value). The entry of records without a
    key lasts as long as their batch is open.
    """

    def __init__(
        self, queues: Sequence[Any], *, accepts_partitions: bool, by_murmur2: bool
    ) -> None:
        """`accepts_partitions` is true if a record with a given partition can take the fast path.

        `by_murmur2` is true if keys go by Kafka's default partitioner.
        """
        super().__init__()

    def remember(self, key: bytes | None, queue: Any) -> None:
        """Store the partitioner's choice for a key."""
        if len(self) >= KNOWN_KEYS_MAX:
            self.clear()
        self[key] = queue, key, len(key or b"") + RECORD_OVERHEAD_BYTES

    def queue_of(self, key: object) -> Any:
        """The queue of a known key, None to ask the partitioner."""
        try:
            return self[key][0]
        except (
            KeyError,
            TypeError,
            ValueError,
        ):  # ValueError: a memoryview that can be written to has no hash
            return None

    def forget_keyless(self) -> None:
        """Forget the choice for records without a key, whose batch is closed."""
        self.pop(None, None)


def new_lock() -> threading.RLock:
    """A reentrant lock for a FastPathSender."""
    return threading.RLock()


class Alarm(Protocol):
    """A descriptor that becomes readable at a time. A thread that sleeps on it is not woken when
    that time is set.
    """

    fd: int

    def set(self, delay_ns: int, /) -> None:
        """Make `fd` readable after this time, and not before. Replaces an earlier time."""

    def cancel(self) -> None:
        """Make `fd` unreadable."""


def new_alarm() -> Alarm | None:
    """An alarm; its user closes `fd`. None: there is none, so wake the thread instead."""
    return None


class FastPathSender:
    """The part of a producer that `send` uses on the fast path."""

    def _begin_fast_sends(
        self, partition_cache: dict[str, PartitionCache], lock: threading.RLock
    ) -> None:
        """`partition_cache` (topic -> cache) is kept by the producer. `lock` is the producer's."""
        self._partition_cache = partition_cache
        self._sending = lock


class LoopSender:
    """The part of an event loop's producer that `send` uses on the fast path."""

    send_count: int = 0
    """Sends until now."""

    def _begin_loop_sends(
        self,
        producer: FastPathSender,
        connection: object,
        gates: dict[str, Any],
        running_loop: Callable[[], object],
        handle_type: type,
        yields_after: int,
    ) -> None:
        """`gates`: topics with a send that waits. `running_loop`: this thread's loop, or None.
        `handle_type`: a tuple (batch, row, connection).
        """

    def _send_in(self, loop: object) -> None:
        """The producer works in this loop."""

    def _sent_now(
        self, topic: Any, value: Any, key: Any, headers: Any, partition: Any, timestamp: Any,
        no_more: Any, on_delivery: Any, deliver_at: Any, deliver_after: Any, repeat: Any,
    ) -> Any:  # fmt: skip
        """Add a record of plain types to its partition's open batch, count it, and return its
        handle. None: it takes the long way, as do delayed records, each
        `yields_after`-th record, records in another loop, and those of a topic with a send that
        waits.

        Here all do: the same in Python is no faster than the long way.
        """
        return None


def header_lists(column: pa.Array) -> list[list[tuple[str, bytes | None]]]:
    """The headers of each record, from their column."""
    if column.null_count == len(column):
        return [[] for _ in range(len(column))]
    return [
        [(item["key"], item["value"]) for item in row] if row else [] for row in column.to_pylist()
    ]


PIECE_ROWS = 2_048
"""Rows that become records at a time, since a record takes many times the memory of its row."""


class ChunkedRows(Generic[R]):
    """Rows that become records on demand, in pieces. `make` converts (first row, count)."""

    def __init__(
        self,
        first_offset: int,
        count: int,
        make: Callable[[int, int], list[R]],
        offsets: np.ndarray[Any, np.dtype[np.int64]] | None = None,
    ) -> None:
        """`offsets`: that of each row; None: they are consecutive, from `first_offset` on."""
        self._first_offset = first_offset
        self._offsets = offsets
        self._taken = 0
        self._left = count
        self._make = make
        self._made: list[R] = []
        """Converted records in reverse order, taken from the end."""
        self._end = 0
        """The number of converted rows."""

    def __len__(self) -> int:
        return self._left

    @property
    def next_offset(self) -> int:
        """The offset of the first record left; the one behind the last record if there is none."""
        if self._offsets is None or not len(self._offsets):
            return self._first_offset + self._taken
        if not self._left:
            return int(self._offsets[-1]) + 1
        return int(self._offsets[self._taken])

    def take(self, into: list[R], count: int) -> None:
        """Append the next `count` records, or all that are left.

        Raises the errors of `make`; earlier records are then already appended.
        """
        count = min(count, self._left)
        while count > 0:
            if not self._made:
                self._made = self._next_piece()
            taken = min(count, len(self._made))
            into += self._made[: -taken - 1 : -1]
            del self._made[-taken:]
            self._taken += taken
            self._left -= taken
            count -= taken

    def _next_piece(self) -> list[R]:
        """Convert a piece with the garbage collector disabled.

        It creates many objects without cycles. The collector would traverse each several times, and
        the whole program's objects with them.
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


class RecordRows(ChunkedRows[R]):
    """Rows of equally long columns of the default schema that become tuples of `record_type`.

    See `tailrace.core.records.Record`. For columns that fail Arrow's validation, the compiled
    kernel raises ValueError, and this one does what Arrow does.
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
        offsets: np.ndarray[Any, np.dtype[np.int64]] | None = None,
    ) -> None:
        if not len(keys) == len(values) == len(headers) == len(stamps_us):
            raise ValueError("the columns have different lengths")
        if offsets is not None and len(offsets) != len(values):
            raise ValueError("the columns have different lengths")
        new: Any = tuple.__new__

        def make(first: int, count: int) -> list[R]:
            stamps = stamps_us[first : first + count]
            columns = (
                repeat(topic, count), repeat(partition, count),
                range(first_offset + first, first_offset + first + count)
                if offsets is None else offsets[first : first + count].tolist(),
                (stamps // 1000).tolist(),
                repeat(timestamp_type, count), keys.slice(first, count).to_pylist(),
                values.slice(first, count).to_pylist(),
                header_lists(headers.slice(first, count)), stamps.tolist(),
            )  # fmt: skip
            return list(map(functools.partial(new, record_type), zip(*columns, strict=True)))

        super().__init__(first_offset, len(values), make, offsets)


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
    """Convert all rows of RecordRows at once."""
    made: list[R] = []
    rows = RecordRows(
        record_type,
        topic,
        partition,
        first_offset,
        timestamp_type,
        stamps_us,
        keys,
        values,
        headers,
    )
    rows.take(made, len(rows))
    return made


def fast_send(
    handle_type: Callable[[tuple[Any, int]], Any],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator for `Producer.send` of a FastPathSender that adds most records on a fast path.

    It adds a record of plain types to its partition's open batch if that has room, else it calls
    the decorated function. `handle_type` makes the handle from (batch, row).
    """

    def decorate(send: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(send)
        def quick(
            self: Any, topic: Any, value: Any = None, key: Any = None, headers: Any = None,
            partition: Any = None, timestamp: Any = None, *,
            on_delivery: Any = None, deliver_at: Any = None, deliver_after: Any = None,
            repeat: Any = None,
        ) -> Any:  # fmt: skip
            # Most records are a few bytes, for a known key, in a batch with room. This is all the
            # work for each of them.
            if (
                type(value) is bytes
                and headers is None
                and partition is None
                and timestamp is None
                and on_delivery is None
                and deliver_at is None
                and deliver_after is None
                and repeat is None
            ):
                try:
                    queue, key, byte_count = self._partition_cache[topic][key]
                except (
                    KeyError,
                    TypeError,
                    ValueError,
                ):  # ValueError: a memoryview that can be written to has no hash
                    pass
                else:
                    # Not `acquire` and `try`: a signal handler could raise between them.
                    with self._sending:
                        # First, since a new tuple may start the garbage collector, which may run
                        # any code.
                        record = (key, value, time_ns())
                        batch = queue.open
                        if batch is not None and (room := batch.room - len(value) - byte_count) > 0:
                            batch.room = room
                            cells = batch.rows.cells
                            cells += record
                            return handle_type((batch, len(cells) // 3 - 1))
            return send(
                self, topic, value, key, headers, partition, timestamp, on_delivery=on_delivery,
                deliver_at=deliver_at, deliver_after=deliver_after,
                repeat=repeat,
            )  # fmt: skip

        return quick  # type: ignore[return-value]

    return decorate
