"""Lane: a queue of messages from one process to another in shared memory.

Owner: the writer stores `producer_position`, the reader stores `consumer_position`, `reader_start`
and `reader_generation`.

Invariants:
- consumer_position <= producer_position <= consumer_position + lane_bytes.
- A message is contiguous: a header of 64 bytes, then its payload, padded to 64.

Layout: `LaneLayout`, `LANE_MESSAGE`. A header with length LANE_WRAP sends the reader to the lane's
start.

Crash: a message exists once `producer_position` is stored. A killed reader's successor may see
messages again that were handled but not consumed. A worker therefore resumes at the lane position
of its last descriptor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shm.memory.atomic_word import AtomicCounter, are_compiled, compiled_variant_of, new
from shm.memory.layout import LANE_MESSAGE, LANE_MESSAGE_BYTES, LANE_WRAP, LaneLayout
from shm.memory.region import Region
from tailrace import kernel
from tailrace.format.crc32c import Readable


class LaneMessage(NamedTuple):
    """Header of a message, its payload (valid until consumed), and the position
    of the next message.
    """

    kind: int
    slot: int
    flags: int
    session: int
    correlation_id: int
    arrival_ns: int
    payload: memoryview
    next_position: int


class LaneError(RuntimeError):
    """The lane's bytes contradict its positions. The reader must stop."""


def _padded(length: int) -> int:
    return (length + 127) // 64 * 64  # header and payload, to a multiple of 64


class LaneWriter:
    """Writer of a lane."""

    def __new__(cls, region: Region, *_: Any) -> LaneWriter:
        return new(cls, are_compiled(region.words))

    def __init__(self, region: Region) -> None:
        layout = LaneLayout(region.header.first)
        self.lane_bytes = layout.lane_bytes
        self.payload_max = layout.lane_bytes // 2 - LANE_MESSAGE_BYTES
        self._producer_word = AtomicCounter(region.words, layout.producer_position)
        self._consumer_word = AtomicCounter(region.words, layout.consumer_position)
        self._start_word = AtomicCounter(region.words, layout.reader_start)
        self._generation_word = AtomicCounter(region.words, layout.reader_generation)
        self._data = region.bytes[layout.data : layout.data + layout.lane_bytes]
        self._producer_position = self._producer_word.load()
        self._consumer_position = self._consumer_word.load()

    def try_write(
        self,
        kind: int,
        slot: int,
        flags: int,
        session: int,
        correlation_id: int,
        arrival_ns: int,
        payload: Sequence[Readable],
    ) -> bool:
        """Write one message, with its payload in pieces. Return False if it does not fit now.

        The reader sees it after `commit`. Raises ValueError for a payload above `payload_max`.
        """
        length = sum(map(len, payload))
        size = _padded(length)
        producer_position = self._producer_position
        index = producer_position % self.lane_bytes
        room_to_end = self.lane_bytes - index
        needed = size if size <= room_to_end else room_to_end + size
        if producer_position + needed - self._consumer_position > self.lane_bytes:
            self._consumer_position = self._consumer_word.load()  # SYNC POINT: consumer_position
            if producer_position + needed - self._consumer_position > self.lane_bytes:
                if length > self.payload_max:
                    raise ValueError(
                        f"a message of {length} bytes can never pass a lane of {self.lane_bytes}"
                    )
                return False
        if size > room_to_end:
            LANE_MESSAGE.pack_into(self._data, index, LANE_WRAP, 0, 0, 0, 0, 0, 0)
            producer_position += room_to_end
            index = 0
        LANE_MESSAGE.pack_into(
            self._data, index, length, kind, slot, flags, session, correlation_id, arrival_ns
        )
        index += LANE_MESSAGE_BYTES
        for piece in payload:
            end = index + len(piece)
            self._data[index:end] = piece
            index = end
        self._producer_position = producer_position + size
        return True

    def commit(self) -> bool:
        """Publish the written messages. Return False if there are none."""
        if self._producer_position == self._producer_word.load():
            return False
        # SYNC POINT: lane producer_position (the messages before it)
        self._producer_word.store(self._producer_position)
        return True

    @property
    def position(self) -> int:
        """End position of the last written message."""
        return self._producer_position

    def consumed_before(self, generation: int) -> int:
        """Return the position up to which the readers before this generation, which has been
        started, have consumed. The reader of this generation may have consumed more.
        """
        consumer_position = self._consumer_word.load()  # SYNC POINT: lane consumer_position
        if self._generation_word.load() != generation:  # SYNC POINT: lane reader_generation
            return consumer_position  # it had not begun when that was loaded
        return self._start_word.load()

    def is_empty(self) -> bool:
        """True if the reader has consumed everything."""
        return self._consumer_word.load() == self._producer_position


class LaneReader:
    """Reader of a lane.

    It reads next at `position`. `consume` frees the space of what it has read.
    """

    def __new__(cls, region: Region, *_: Any, **__: Any) -> LaneReader:
        return new(cls, are_compiled(region.words))

    def __init__(self, region: Region, resume_at: int = 0) -> None:
        layout = LaneLayout(region.header.first)
        self.lane_bytes = layout.lane_bytes
        self._producer_word = AtomicCounter(region.words, layout.producer_position)
        self._consumer_word = AtomicCounter(region.words, layout.consumer_position)
        self._start_word = AtomicCounter(region.words, layout.reader_start)
        self._generation_word = AtomicCounter(region.words, layout.reader_generation)
        self._data = region.bytes[layout.data : layout.data + layout.lane_bytes]
        self.position = max(self._consumer_word.load(), resume_at)

    def begin(self, generation: int) -> None:
        """Publish where the process of this generation begins to read. Call it before the first
        `consume`.
        """
        self._start_word.store(self.position)
        # SYNC POINT: lane reader_generation (the start before it)
        self._generation_word.store(generation)

    def peek(self) -> LaneMessage | None:
        """Return the message at `position`, or None. Raises LaneError."""
        producer_position = self._producer_word.load()  # SYNC POINT: lane producer_position
        position = self.position
        if position == producer_position:
            return None
        index = position % self.lane_bytes
        fields = LANE_MESSAGE.unpack_from(self._data, index)
        if fields[0] == LANE_WRAP:
            position += self.lane_bytes - index
            index = 0
            fields = LANE_MESSAGE.unpack_from(self._data, 0)
        length = fields[0]
        following = position + _padded(length)
        if following > producer_position or index + LANE_MESSAGE_BYTES + length > self.lane_bytes:
            raise LaneError(
                f"a message of {length} bytes at {position} runs past the lane's "
                f"producer_position {producer_position}"
            )
        start = index + LANE_MESSAGE_BYTES
        return LaneMessage._make((*fields[1:], self._data[start : start + length], following))

    def has_more(self) -> bool:
        return self.position != self._producer_word.load()

    def advance(self, message: LaneMessage) -> None:
        """Move past `message`. Its bytes stay valid until `consume`."""
        self.position = message.next_position

    def consume(self) -> int:
        """Free the space of everything read. Return the number of bytes."""
        freed = self.position - self._consumer_word.load()
        if freed:
            # SYNC POINT: consumer_position (everything before it was read; room for the writer)
            self._consumer_word.store(self.position)
        return freed


if kernel.compiled is not None:

    @compiled_variant_of(LaneWriter)
    class _CompiledLaneWriter(kernel.compiled.LaneWriter, LaneWriter):  # type: ignore[misc]
        def __init__(self, region: Region) -> None:
            LaneWriter.__init__(self, region)
            layout = LaneLayout(region.header.first)
            self._begin(
                region.bytes, layout.producer_position, layout.consumer_position, layout.data
            )

    @compiled_variant_of(LaneReader)
    class _CompiledLaneReader(kernel.compiled.LaneReader, LaneReader):  # type: ignore[misc]
        def __init__(self, region: Region, resume_at: int = 0) -> None:
            LaneReader.__init__(self, region, resume_at)
            layout = LaneLayout(region.header.first)
            self._begin(
                region.bytes,
                layout.producer_position,
                layout.consumer_position,
                layout.data,
                LaneMessage,
                LaneError,
            )
