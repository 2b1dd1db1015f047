"""Every offset in shared memory, each computed from the one before. Descriptions only: nothing here reads or writes.

Owner of each word is named beside it; a word has exactly one writing process. Words that are published (see `cell`) lie 64 bytes apart,
so that
two processes never write the same cache line.

Layout of a region: 128 bytes of header, then what its kind says.

    ring     words | descriptors (128 B each) | outcomes (48 B each) | data (ring_bytes, page aligned)
    lane     words | data (lane_bytes)
    table    slots (384 B each)
    control  words | process slots (256 B each)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

LAYOUT_VERSION = 3
REGION_MAGIC = 0x314D485352544C54
REGION_HEADER_BYTES = 128
LINE_BYTES = 64
PAGE_BYTES = 4096
WORD_BYTES = 8

#                     magic version kind boot_id instance generation size first second directory
REGION_HEADER = struct.Struct("<QII16s16sQQQQ16s")


class RegionKind(IntEnum):
    RING = 1
    LANE = 2
    TABLE = 3
    CONTROL = 4


def align(value: int, to: int) -> int:
    return (value + to - 1) // to * to


# ---- ring ------------------------------------------------------------------------------------------------------------------------------

FRONTS_MAX = 16
SOURCE_COORDINATOR = 16
SOURCE_SCHEDULER = 17
DESCRIPTOR_BYTES = 128
OUTCOME_BYTES = 48
ALIGNMENT_BYTES = 64

DESCRIPTOR = struct.Struct("<QQIIqqQQQIHHqihhIIqqqq")
assert DESCRIPTOR.size == DESCRIPTOR_BYTES

ACKS_NONE = 0
ACKS_LEADER = 1
ACKS_ALL = 2
ACKS_MASK = 3
FLAG_CONTROL = 4
FLAG_DUPLICATE = 8
FLAG_BYTES = 16
FLAG_DELIVERED = 32
"""A batch that the scheduler delivered: (delay_ordinal, delay_position) is its last row."""
FLAG_CLOSED = 64
"""A mark in a delay log: ordinals below `delay_ordinal` are closed."""
SLOT_MAP_SHIFT = 8
"""From this bit on the flags of a batch say by which version of its topic's slot map it was routed; 0: the topic has none."""


OUTCOME_VERDICT = 0x0F
OUTCOME_SECOND_PLACE = 0x10


class Verdict(IntEnum):
    """What became of a descriptor; the low bits of its outcome word. Bit 4 says which of the two places behind the word holds, the rest is the
    descriptor's count.
    """

    NONE = 0
    PLANNED = 1
    """The place in the file is decided, the bytes may or may not be there: a restarted flusher writes them to the same place."""
    DURABLE = 2
    WRITTEN = 3
    FAILED = 4
    DELETED = 5


@dataclass(frozen=True, slots=True)
class RingLayout:
    """A worker's ring. Words: `head` and `reclaimed` are the worker's, `settled` the flusher's, `cursor(i)` front i's."""

    ring_bytes: int
    descriptor_count: int

    @property
    def head(self) -> int:
        return REGION_HEADER_BYTES

    @property
    def reclaimed(self) -> int:
        return self.head + LINE_BYTES

    @property
    def settled(self) -> int:
        return self.reclaimed + LINE_BYTES

    def cursor(self, front: int) -> int:
        return self.settled + LINE_BYTES * (1 + front)

    @property
    def descriptors(self) -> int:
        return self.cursor(FRONTS_MAX)

    @property
    def outcomes(self) -> int:
        return self.descriptors + DESCRIPTOR_BYTES * self.descriptor_count

    @property
    def data(self) -> int:
        return align(self.outcomes + OUTCOME_BYTES * self.descriptor_count, PAGE_BYTES)

    @property
    def size(self) -> int:
        return self.data + self.ring_bytes


# ---- lane ------------------------------------------------------------------------------------------------------------------------------

#                          length kind slot flags session correlation arrival_ns
LANE_MESSAGE = struct.Struct("<IIIIQQQ24x")
LANE_MESSAGE_BYTES = 64
LANE_WRAP = 0xFFFFFFFF
assert LANE_MESSAGE.size == LANE_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """One writer, one reader. Words: `tail` is the writer's, `consumed` the reader's."""

    lane_bytes: int

    @property
    def tail(self) -> int:
        return REGION_HEADER_BYTES

    @property
    def consumed(self) -> int:
        return self.tail + LINE_BYTES

    @property
    def data(self) -> int:
        return self.consumed + LINE_BYTES

    @property
    def size(self) -> int:
        return align(self.data + self.lane_bytes, PAGE_BYTES)


# ---- partition table -------------------------------------------------------------------------------------------------------------------

STATE_BYTES = 160
SLOT_BYTES = LINE_BYTES + 2 * STATE_BYTES
SLOTS_DEFAULT = 4096


class SlotState(IntEnum):
    FREE = 0
    ONLINE = 1
    OFFLINE_FOR_WRITES = 2
    DELETED = 3
    UNREADABLE = 4
    """The log could not be opened, and nothing is known of it: neither reads nor writes."""


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Slots, each written by the flusher of its data directory: a count, and two states of which one holds (see `partition_table`)."""

    slot_count: int

    STATES: ClassVar[tuple[int, int]] = (LINE_BYTES, LINE_BYTES + STATE_BYTES)

    def slot(self, slot: int) -> int:
        return REGION_HEADER_BYTES + slot * SLOT_BYTES

    @property
    def size(self) -> int:
        return align(REGION_HEADER_BYTES + self.slot_count * SLOT_BYTES, PAGE_BYTES)


# ---- control ---------------------------------------------------------------------------------------------------------------------------

WORKERS_MAX = 128
FLUSHERS_MAX = 16
PROCESS_BYTES = 256


class Role(IntEnum):
    SUPERVISOR = 0
    COORDINATOR = 1
    FRONT = 2
    WORKER = 3
    FLUSHER = 4
    SCHEDULER = 5
    CONSOLE = 6
    GROUPS = 7


_ROLE_START = {
    Role.SUPERVISOR: 0,
    Role.COORDINATOR: 1,
    Role.CONSOLE: 2,
    Role.GROUPS: 3,
    Role.FRONT: 4,
    Role.FLUSHER: 4 + FRONTS_MAX,
    Role.SCHEDULER: 4 + FRONTS_MAX + FLUSHERS_MAX,
    Role.WORKER: 4 + FRONTS_MAX + 2 * FLUSHERS_MAX,
}


class ProcessWord(IntEnum):
    """Words of a process's slot: one cache line each for supervisor (0-7), the process itself (8-15 and 24-31), coordinator (16-23)."""

    GENERATION = 0
    LIVE = 1
    PID = 2
    RESTARTS = 3
    STOP = 4
    """The generation that is to finish what it has taken and end."""
    WITHOUT_MEMORY = 5
    """Of a spare worker, and of the process of groups: 1 while it is wanted and shared memory has no room for it."""
    BEAT = 8
    READY_GENERATION = 9
    WORK_COUNT = 10
    BYTES_COUNT = 11
    REFUSED_COUNT = 12
    SESSIONS = 13
    """A front's open sessions."""
    WANTS_FEED = 14
    """The generation that asks the coordinator for the whole catalog."""
    DISK_FULL = 15
    """A flusher's: not 0 while its data directory has less free than its reserve."""
    FED_GENERATION = 16
    """The generation to which the coordinator has sent the whole catalog."""
    DEDICATED_TO = 17
    """A spare worker's: the slot + 1 of the partition that it is wanted for, 0 while it is not wanted."""
    DEDICATED_DIR = 18
    """A spare worker's: the index + 1 of the data directory whose flusher follows its ring, once that is decided."""
    INTERNAL_ERRORS = 24
    """How many messages, over all generations, failed in a way that nobody expected (see `shm.runtime.boundary`)."""
    HTTP_PORT = 25
    """The console's: where it listens; 0 while it does not."""
    WANTS_GROUPS = 26
    """A front's: 1 once a client has asked it for something that the process of groups decides."""
    COMMIT_COUNT = 27
    """Of the coordinator and of the process of groups: transactions of its database that it has committed."""
    OFFSET_COMMITS = 28
    """Of the process of groups, over all generations: requests to commit offsets that it has handled."""
    SETTLED_UNWANTED = 29
    """A front's: 1 while it needs not be rung for what settles (see `shm.settled_news`)."""


class Phase(IntEnum):
    RECOVERING = 0
    RUNNING = 1
    STOPPING = 2


@dataclass(frozen=True, slots=True)
class ControlLayout:
    """Words: `phase` and `port` are the supervisor's and front 0's."""

    @property
    def phase(self) -> int:
        return REGION_HEADER_BYTES

    def port(self, front: int) -> int:
        return self.phase + LINE_BYTES * (1 + front)

    @property
    def processes(self) -> int:
        return self.port(FRONTS_MAX)

    def process_word(self, role: Role, index: int, word: ProcessWord) -> int:
        return self.processes + (_ROLE_START[role] + index) * PROCESS_BYTES + word * WORD_BYTES

    @property
    def size(self) -> int:
        return align(self.processes + (_ROLE_START[Role.WORKER] + WORKERS_MAX) * PROCESS_BYTES, PAGE_BYTES)
