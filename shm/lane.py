"""A lane: a queue of messages from one process to one other, in shared memory.

Owner: the writing process stores `tail`, the reading one `consumed`.
Invariants: consumed <= tail <= consumed + lane_bytes; a message lies in one piece: header of 64 bytes, then its payload, padded to 64.
Layout: `LaneLayout`, `LANE_MESSAGE`; a header whose length is LANE_WRAP sends the reader to the lane's start.
Crash: a message is there once `tail` is stored. A reader that was killed may see messages again that it had acted on but not consumed; a
worker
    therefore goes on at the lane position of its last descriptor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shm.cell import Cell, are_compiled, is_twin_of, new
from shm.layout import LANE_MESSAGE, LANE_MESSAGE_BYTES, LANE_WRAP, LaneLayout
from shm.region import Region
from tailrace import kernel
from tailrace.formats.checksum import Readable


class LaneMessage(NamedTuple):
    """A message's header, its payload (valid until consumed), and where the next one begins."""

    kind: int
    slot: int
    flags: int
    session: int
    correlation_id: int
    arrival_ns: int
    payload: memoryview
    next_position: int


class LaneError(RuntimeError):
    """The lane's bytes contradict its words: whoever reads it must not go on."""


def _padded(length: int) -> int:
    return (length + 127) // 64 * 64  # header and payload, to a multiple of 64


class LaneWriter:
    """The writing end."""

    def __new__(cls, region: Region, *_: Any) -> LaneWriter:
        return new(cls, are_compiled(region.words))

    def __init__(self, region: Region) -> None:
        layout = LaneLayout(region.header.first)
        self.lane_bytes = layout.lane_bytes
        self.payload_max = layout.lane_bytes // 2 - LANE_MESSAGE_BYTES
        self._tail_word = Cell(region.words, layout.tail)
        self._consumed_word = Cell(region.words, layout.consumed)
        self._data = region.bytes[layout.data : layout.data + layout.lane_bytes]
        self._tail = self._tail_word.load()
        self._consumed = self._consumed_word.load()

    def try_write(
        self, kind: int, slot: int, flags: int, session: int, correlation_id: int, arrival_ns: int, payload: Sequence[Readable]
    ) -> bool:
        """Copy one message in, its payload from pieces; False when it does not fit now. Visible after `publish`."""
        length = sum(map(len, payload))
        size = _padded(length)
        tail = self._tail
        index = tail % self.lane_bytes
        room_to_end = self.lane_bytes - index
        needed = size if size <= room_to_end else room_to_end + size
        if tail + needed - self._consumed > self.lane_bytes:
            self._consumed = self._consumed_word.load()  # SYNC POINT: consumed
            if tail + needed - self._consumed > self.lane_bytes:
                if length > self.payload_max:
                    raise ValueError(f"a message of {length} bytes can never pass a lane of {self.lane_bytes}")
                return False
        if size > room_to_end:
            LANE_MESSAGE.pack_into(self._data, index, LANE_WRAP, 0, 0, 0, 0, 0, 0)
            tail += room_to_end
            index = 0
        LANE_MESSAGE.pack_into(self._data, index, length, kind, slot, flags, session, correlation_id, arrival_ns)
        index += LANE_MESSAGE_BYTES
        for piece in payload:
            end = index + len(piece)
            self._data[index:end] = piece
            index = end
        self._tail = tail + size
        return True

    def publish(self) -> bool:
        """Let the reader see what was written; False when nothing was."""
        if self._tail == self._tail_word.load():
            return False
        self._tail_word.store(self._tail)  # SYNC POINT: lane tail (the messages before it)
        return True

    @property
    def position(self) -> int:
        """Behind the last message that was written."""
        return self._tail

    def consumed(self) -> int:
        """Up to which position the reader has taken messages out."""
        return self._consumed_word.load()  # SYNC POINT: lane consumed

    def is_empty(self) -> bool:
        """Whether the reader has consumed everything."""
        return self._consumed_word.load() == self._tail


class LaneReader:
    """The reading end. `position` is where it reads next; `consume` gives the space back."""

    def __new__(cls, region: Region, *_: Any, **__: Any) -> LaneReader:
        return new(cls, are_compiled(region.words))

    def __init__(self, region: Region, resume_at: int = 0) -> None:
        layout = LaneLayout(region.header.first)
        self.lane_bytes = layout.lane_bytes
        self._tail_word = Cell(region.words, layout.tail)
        self._consumed_word = Cell(region.words, layout.consumed)
        self._data = region.bytes[layout.data : layout.data + layout.lane_bytes]
        self.position = max(self._consumed_word.load(), resume_at)

    def peek(self) -> LaneMessage | None:
        """The message at `position`, or None. Raises LaneError."""
        tail = self._tail_word.load()  # SYNC POINT: lane tail
        position = self.position
        if position == tail:
            return None
        index = position % self.lane_bytes
        fields = LANE_MESSAGE.unpack_from(self._data, index)
        if fields[0] == LANE_WRAP:
            position += self.lane_bytes - index
            index = 0
            fields = LANE_MESSAGE.unpack_from(self._data, 0)
        length = fields[0]
        following = position + _padded(length)
        if following > tail or index + LANE_MESSAGE_BYTES + length > self.lane_bytes:
            raise LaneError(f"a message of {length} bytes at {position} runs past the lane's tail {tail}")
        start = index + LANE_MESSAGE_BYTES
        return LaneMessage._make((*fields[1:], self._data[start : start + length], following))

    def has_more(self) -> bool:
        return self.position != self._tail_word.load()

    def advance(self, message: LaneMessage) -> None:
        """Step over `message`; its bytes stay valid until `consume`."""
        self.position = message.next_position

    def consume(self) -> int:
        """Give the space of everything stepped over back to the writer; answers how many bytes."""
        freed = self.position - self._consumed_word.load()
        if freed:
            self._consumed_word.store(self.position)  # SYNC POINT: consumed (everything before it was read; room for the writer)
        return freed


if kernel.compiled is not None:

    @is_twin_of(LaneWriter)
    class _CompiledLaneWriter(kernel.compiled.LaneWriter, LaneWriter):  # type: ignore[misc]
        def __init__(self, region: Region) -> None:
            LaneWriter.__init__(self, region)
            layout = LaneLayout(region.header.first)
            self._begin(region.bytes, layout.tail, layout.consumed, layout.data)

    @is_twin_of(LaneReader)
    class _CompiledLaneReader(kernel.compiled.LaneReader, LaneReader):  # type: ignore[misc]
        def __init__(self, region: Region, resume_at: int = 0) -> None:
            LaneReader.__init__(self, region, resume_at)
            layout = LaneLayout(region.header.first)
            self._begin(region.bytes, layout.tail, layout.consumed, layout.data, LaneMessage, LaneError)
