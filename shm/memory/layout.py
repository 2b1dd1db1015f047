"""Layout of shared memory: every offset, each computed from the one before. It reads and writes
nothing.

Each word has exactly one writing process, named beside it. Published words (see `atomic_word`) are
64 bytes apart, so that two processes never write the same cache line.

Layout of a region: 128 bytes of header, then by kind:

    ring     words | descriptors (128 B each) | outcomes (48 B each) |
             data (ring_bytes, page aligned)
    lane     words | data (lane_bytes)
    table    slots (576 B each)
    settings words | text | text
    control  words | process slots (320 B each) | measurements (2 KiB a process) |
             exemplars and credit of each front | measurements of the Kafka gateway |
             uses of rates of each front
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import ClassVar, NamedTuple

LAYOUT_VERSION = 8
REGION_MAGIC = 0x314D485352544C54
REGION_HEADER_BYTES = 128
LINE_BYTES = 64
PAGE_BYTES = 4096
WORD_BYTES = 8

#                     magic version kind boot_id instance generation size first second directory
REGION_HEADER = struct.Struct("<QII16s16sQQQQ16s")


@unique
class RegionKind(IntEnum):
    RING = 1
    LANE = 2
    TABLE = 3
    CONTROL = 4
    SETTINGS = 5


def align(value: int, to: int) -> int:
    return (value + to - 1) // to * to


# ---- ring ----------------------------------------------------------------------------------------

FRONTS_MAX = 16
SOURCE_CONTROLLER = 16
SOURCE_SCHEDULER = 17
SOURCE_GROUPS = 18
"""The transaction coordinator, in the process of groups."""
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
"""A batch delivered by the scheduler. (delay_ordinal, delay_position) is its last row."""
FLAG_CLOSED = 64
"""A mark in a delay log: ordinals below `delay_ordinal` are closed."""
FLAG_TRANSACTIONAL = 128
"""A batch of a transaction, or its marker: then `control_type` is not 0."""
SLOT_MAP_SHIFT = 8
"""First bit of the slot map version by which a batch was routed, in its flags. 0 without slots."""


OUTCOME_VERDICT = 0x0F
OUTCOME_SECOND_PLACE = 0x10


@unique
class Verdict(IntEnum):
    """Verdict on a descriptor, in the low bits of its outcome word.

    Bit 4 selects the valid one of the two places after the word. The upper bits are the
    descriptor's number + 1.
    """

    NONE = 0
    PLANNED = 1
    """The file position is decided. The bytes may or may not be there: a restarted flusher writes
    them to the same place.
    """
    DURABLE = 2
    WRITTEN = 3
    FAILED = 4
    DELETED = 5


class RingLayout(NamedTuple):
    """Layout of a worker's ring. The worker stores `producer_position` and `reclaimed`, the flusher
    `settled`, front i `cursor(i)`.
    """

    ring_bytes: int
    descriptor_count: int

    @property
    def producer_position(self) -> int:
        return REGION_HEADER_BYTES

    @property
    def reclaimed(self) -> int:
        return self.producer_position + LINE_BYTES

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


# ---- lane ----------------------------------------------------------------------------------------

#                          length kind slot flags session correlation arrival_ns
LANE_MESSAGE = struct.Struct("<IIIIQQQ24x")
LANE_MESSAGE_BYTES = 64
LANE_WRAP = 0xFFFFFFFF
assert LANE_MESSAGE.size == LANE_MESSAGE_BYTES


class LaneLayout(NamedTuple):
    """Layout of a lane. The writer stores `producer_position`, the reader the words of its line:
    `consumer_position`, and where its process began (0 in lanes of readers that do not say so).
    """

    lane_bytes: int

    @property
    def producer_position(self) -> int:
        return REGION_HEADER_BYTES

    @property
    def consumer_position(self) -> int:
        return self.producer_position + LINE_BYTES

    @property
    def reader_start(self) -> int:
        return self.consumer_position + WORD_BYTES

    @property
    def reader_generation(self) -> int:
        return self.reader_start + WORD_BYTES

    @property
    def data(self) -> int:
        return self.consumer_position + LINE_BYTES

    @property
    def size(self) -> int:
        return align(self.data + self.lane_bytes, PAGE_BYTES)


# ---- partition table -----------------------------------------------------------------------------

STATE_BYTES = 256
SLOT_BYTES = LINE_BYTES + 2 * STATE_BYTES
SLOTS_DEFAULT = 4096


@unique
class SlotState(IntEnum):
    FREE = 0
    ONLINE = 1
    OFFLINE_FOR_WRITES = 2
    DELETED = 3
    UNREADABLE = 4
    """The log could not be opened. It can be neither read nor written."""


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Layout of a partition table. The data directory's flusher writes each slot: a count, and two
    states of which one is valid (see `partition_table`).
    """

    slot_count: int

    STATES: ClassVar[tuple[int, int]] = (LINE_BYTES, LINE_BYTES + STATE_BYTES)

    def slot(self, slot: int) -> int:
        return REGION_HEADER_BYTES + slot * SLOT_BYTES

    @property
    def size(self) -> int:
        return align(REGION_HEADER_BYTES + self.slot_count * SLOT_BYTES, PAGE_BYTES)


# ---- control -------------------------------------------------------------------------------------

WORKERS_MAX = 128
FLUSHERS_MAX = 16
PROCESS_BYTES = 384


@unique
class Role(IntEnum):
    SUPERVISOR = 0
    CONTROLLER = 1
    FRONT = 2
    WORKER = 3
    FLUSHER = 4
    SCHEDULER = 5
    CONSOLE = 6
    GROUPS = 7
    CLEANER = 8


_ROLE_START = {
    Role.SUPERVISOR: 0,
    Role.CONTROLLER: 1,
    Role.CONSOLE: 2,
    Role.GROUPS: 3,
    Role.FRONT: 4,
    Role.FLUSHER: 4 + FRONTS_MAX,
    Role.SCHEDULER: 4 + FRONTS_MAX + FLUSHERS_MAX,
    Role.WORKER: 4 + FRONTS_MAX + 2 * FLUSHERS_MAX,
    Role.CLEANER: 4 + FRONTS_MAX + 2 * FLUSHERS_MAX + WORKERS_MAX,
}


PROCESSES_MAX = _ROLE_START[Role.CLEANER] + FLUSHERS_MAX


@unique
class DirectoryState(IntEnum):
    """State of a flusher's data directory, in its word DISK_FULL."""

    OK = 0
    FULL = 1
    LOST = 2


@unique
class ProcessWord(IntEnum):
    """Words of a process's slot, in cache lines: supervisor (0-7), the process itself (8-15 and
    24-47), controller (16-23).
    """

    GENERATION = 0
    LIVE = 1
    PID = 2
    RESTARTS = 3
    """Times that it was started again after it had ended by itself."""
    STOP = 4
    """Generation that must finish its accepted work and end."""
    WITHOUT_MEMORY = 5
    """Spare worker or groups: 1 while it is wanted but shared memory has no room for it."""
    TRANSACTION_LANES = 6
    """Worker: 1 once the lanes between it and the transaction coordinator exist."""
    BEAT = 8
    READY_GENERATION = 9
    WORK_COUNT = 10
    BYTES_COUNT = 11
    REFUSED_COUNT = 12
    SESSIONS = 13
    """Front: number of open sessions."""
    FEED_REQUESTED = 14
    """Generation that requests the whole catalog from the controller."""
    DISK_FULL = 15
    """Flusher: not 0 while its data directory has less free space than its reserve."""
    FED_GENERATION = 16
    """Generation to which the controller has sent the whole catalog."""
    DEDICATED_TO = 17
    """Spare worker: slot + 1 of the partition that needs it, 0 if none does."""
    DEDICATED_DIR = 18
    """Spare worker: index + 1 of the data directory whose flusher follows its
    ring, once decided.
    """
    INTERNAL_ERRORS = 24
    """Messages that failed with an unexpected error, over all generations (see
    `shm.runtime.error_handler`).
    """
    HTTP_PORT = 25
    """Console: its port, 0 while it does not listen."""
    GROUPS_REQUESTED = 26
    """Front: 1 once a client has sent a request that the groups process answers."""
    COMMIT_COUNT = 27
    """Controller and groups: number of committed database transactions."""
    OFFSET_COMMITS = 28
    """Groups: number of offset commit requests handled, over all generations."""
    NOTIFICATIONS_OFF = 29
    """Front: 1 while it needs no ring for settled batches (see `shm.queues.settled_notifications`).
    """
    TRANSACTIONS_REQUESTED = 30
    """Groups: its generation, once it needs the lanes to the workers and a block of producer ids.
    Worker: 1 once a partition has an open transaction and the coordinator is not connected.
    """
    SCHEDULER_REQUESTED = 31
    """Controller: 1 once there was a topic with delays. Front: 1 once a client has sent a request
    that the scheduler answers.
    """
    CLEANING = 32
    """Flusher: the number of the job that its cleaner has to do, 0 if there is none (see
    `workers.segment.cleaning_job`).
    """
    CLEANING_REPORTS = 33
    """Cleaner: number of reports written, over all generations."""
    CLEANED_BYTES_IN = 34
    """Cleaner: bytes of segments read, over all generations."""
    CLEANED_BYTES_OUT = 35
    """Cleaner: bytes of segments written, over all generations."""
    CLEANED_PASSES = 36
    """Cleaner: passes over a log completed, over all generations."""
    THROTTLED_US = 37
    """Cleaner: time waited for cleaner.io.max.bytes.per.second, over all generations."""
    CLEANING_JOBS = 38
    """Flusher: number of jobs made, over all generations."""
    DECIDED = 39
    """Groups: 1 + ordinal of the newest transaction decision that is durable, over all generations;
    0 until the coordinator has read those that are stored.
    """
    CARRIED_OUT = 40
    """Groups: 1 + ordinal up to which every worker has carried out the decisions, as far as it has
    reported.
    """
    GROUPS_REFUSED = 41
    """Groups: 1 while its requests are refused, because groups.db cannot be used."""


BUCKET_COUNT = 24
"""Buckets of a histogram: below 2^14 ns, each power of two up to 2^36 ns (69 s), above."""
BUCKET_FIRST_BITS = 14
HISTOGRAM_BYTES = (BUCKET_COUNT + 1) * WORD_BYTES
"""The buckets, then the sum in nanoseconds."""
EXEMPLAR_BYTES = 5 * WORD_BYTES
"""Sequence, trace id (two words), duration in nanoseconds, time in microseconds since 1970."""
COUNTERS_MAX = 64
KAFKA_APIS_MAX = 128
KAFKA_CODES_MAX = 192
KAFKA_WORDS = 8
"""Connections, bytes of requests, bytes of responses; the others are free."""
KAFKA_BYTES = (
    KAFKA_WORDS + 2 * KAFKA_APIS_MAX + KAFKA_CODES_MAX
) * WORD_BYTES + KAFKA_APIS_MAX * HISTOGRAM_BYTES
MEASUREMENT_BYTES = 2048
USES_MAX = 64
"""Rates of quotas whose use a front shows to the others."""


@unique
class Measure(IntEnum):
    """Histograms of a process, in the order of its measurements. Each process writes its own."""

    PRODUCE = 0
    """Front: from the receipt of a PRODUCE request to its response."""
    FETCH = 1
    """Front: from the receipt of a FETCH request to its response, with the wait for data."""
    DELIVERY = 2
    """Front: from the append of the newest batch to the response of a fetch that waited for it."""
    SYNC = 3
    """Flusher: the write and sync of a group of batches."""
    COMMIT = 4
    """Groups and controller: a database commit."""


@unique
class Phase(IntEnum):
    RECOVERING = 0
    RUNNING = 1
    STOPPING = 2


@dataclass(frozen=True, slots=True)
class ControlLayout:
    """Layout of the control region. The supervisor stores `phase`, each front its `port`."""

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
    def measurements(self) -> int:
        return align(self.processes + PROCESSES_MAX * PROCESS_BYTES, PAGE_BYTES)

    def histogram(self, role: Role, index: int, measure: Measure) -> int:
        return self._measurements_of(role, index) + measure * HISTOGRAM_BYTES

    def request_counters(self, role: Role, index: int) -> int:
        """Words by API."""
        return self._measurements_of(role, index) + len(Measure) * HISTOGRAM_BYTES

    def error_counters(self, role: Role, index: int) -> int:
        """Words by error code."""
        return self.request_counters(role, index) + COUNTERS_MAX * WORD_BYTES

    @property
    def _exemplars(self) -> int:
        return self.measurements + PROCESSES_MAX * MEASUREMENT_BYTES

    def exemplars(self, front: int) -> int:
        """Exemplars of a front's PRODUCE durations, one for each bucket."""
        return self._exemplars + front * BUCKET_COUNT * EXEMPLAR_BYTES

    def credit(self, front: int) -> int:
        """A front's credit: held bytes, budget, waiting connections. Then its waits for quotas:
        their number, and microseconds of four kinds.
        """
        return align(self.exemplars(FRONTS_MAX), LINE_BYTES) + front * LINE_BYTES

    @property
    def kafka(self) -> int:
        """Words of the Kafka gateway: see `shm.tables.kafka_measurements`."""
        return align(self.credit(FRONTS_MAX), LINE_BYTES)

    def rate_use(self, front: int, row: int) -> int:
        """Index of the words of a row of a front's uses: see `shm.tables.rate_uses`."""
        return (self._rate_uses + (front * USES_MAX + row) * 2 * WORD_BYTES) // WORD_BYTES

    @property
    def _rate_uses(self) -> int:
        return align(self.kafka + KAFKA_BYTES, LINE_BYTES)

    def _measurements_of(self, role: Role, index: int) -> int:
        return self.measurements + (_ROLE_START[role] + index) * MEASUREMENT_BYTES

    @property
    def size(self) -> int:
        return align(self._rate_uses + FRONTS_MAX * USES_MAX * 2 * WORD_BYTES, PAGE_BYTES)


# ---- settings ------------------------------------------------------------------------------------


class SettingsLayout(NamedTuple):
    """Layout of a settings block. Its publisher stores `version` and the texts, each process its
    own `applied`.
    """

    text_bytes: int

    @property
    def version(self) -> int:
        return REGION_HEADER_BYTES

    def applied(self, role: Role, index: int) -> int:
        return self.version + LINE_BYTES * (1 + _ROLE_START[role] + index)

    def text(self, version: int) -> int:
        """Place of the text of `version`: its length, then its bytes. Two places take turns."""
        return self.applied(Role.CLEANER, FLUSHERS_MAX) + (version & 1) * self._place_bytes

    @property
    def _place_bytes(self) -> int:
        return align(WORD_BYTES + self.text_bytes, LINE_BYTES)

    @property
    def size(self) -> int:
        return align(self.text(0) + 2 * self._place_bytes, PAGE_BYTES)
