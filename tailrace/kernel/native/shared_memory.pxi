# Published words, lanes, rings, the partition table: what is hot of `shm.atomic_word`, `shm.lane`,
# `shm.ring`, `shm.partition_table` and `netfront.produce.ring_acks`.
#
# Each class here overrides methods of the class of its name there, which is the reference: its
# fields are set by that one's `__init__`, its docstrings say what each method does. A region whose
# words are instrumented (simulation, checks of invariants, crash tests) never gets here: see
# `shm.atomic_word`.
#
# Invariants: LOAD_WORD and STORE_WORD are the only way in which a published word is touched; every
# place in memory is computed from numbers that were held against the mapping's size when it was
# attached, or are reduced by `%` to it; a mapping lives as long as an object that points into it.

cdef extern from *:
    """ /* One 8-byte aligned machine load or store each: acquire and release. On x86-64 both are a
    plain `mov`, and the compiler moves nothing across them. */
    #define LOAD_WORD(at) __atomic_load_n((const uint64_t *)(at), __ATOMIC_ACQUIRE)
    #define STORE_WORD(at, value) __atomic_store_n((uint64_t *)(at), (uint64_t)(value), __ATOMIC_RELEASE)
    /* Between bytes that were copied and a word that is loaded to see whether they changed
    meanwhile: loads keep their order. */
    #define LOADS_BEFORE() __atomic_thread_fence(__ATOMIC_ACQUIRE)

    typedef struct {
        uint32_t length, kind, slot, flags;
        uint64_t session, correlation_id, arrival_ns, zeros[3];
    } LaneHead;
    _Static_assert(sizeof(LaneHead) == 64, "LANE_MESSAGE");

    typedef struct {
        uint64_t ordinal, position;
        uint32_t length, slot;
        int64_t base_offset, next_offset;
        uint64_t session, correlation_id, lane_position;
        uint32_t flags;
        uint16_t source_lane, result;
        int64_t producer_id;
        int32_t base_sequence;
        int16_t producer_epoch, control_type;
        uint32_t last_offset_delta, leader_epoch;
        int64_t append_time_us, max_timestamp_us, delay_ordinal, delay_position;
    } RingDescriptor;
    _Static_assert(sizeof(RingDescriptor) == 128, "DESCRIPTOR");
    """
    uint64_t LOAD_WORD(const void* at) noexcept nogil
    void STORE_WORD(void* at, uint64_t value) noexcept nogil
    void LOADS_BEFORE() noexcept nogil

    ctypedef struct LaneHead:
        uint32_t length, kind, slot, flags
        uint64_t session, correlation_id, arrival_ns
        uint64_t zeros[3]

    ctypedef struct RingDescriptor:
        uint64_t ordinal, position
        uint32_t length, slot
        int64_t base_offset, next_offset
        uint64_t session, correlation_id, lane_position
        uint32_t flags
        uint16_t source_lane, result
        int64_t producer_id
        int32_t base_sequence
        int16_t producer_epoch, control_type
        uint32_t last_offset_delta, leader_epoch
        int64_t append_time_us, max_timestamp_us, delay_ordinal, delay_position

cdef enum:
    HEAD_BYTES = 64  # LANE_MESSAGE_BYTES
    DESCRIPTOR_BYTES = 128
    OUTCOME_BYTES = 48
    OUTCOME_VERDICT = 0x0F
    OUTCOME_SECOND_PLACE = 0x10
    PLANNED = 1  # Verdict.PLANNED
    FAILED = 4
    DELETED = 5
    ACKS_MASK = 3
    ACKS_LEADER = 1
    ACKS_ALL = 2
    FLAG_DUPLICATE = 8
    FLAG_BYTES = 16
    FLAG_TRANSACTIONAL = 128
    FRONTS = 16  # FRONTS_MAX
    SLOT_BYTES = 576
    STATE_BYTES = 256
    LINE = 64
    REGION_HEADER = 128  # REGION_HEADER_BYTES

cdef uint32_t WRAP = 0xFFFFFFFF  # LANE_WRAP


cdef class Mapping:
    """Memory that others write too; it stays mapped as long as this lives."""

    cdef Py_buffer view
    cdef uint8_t* at
    cdef uint64_t size

    cdef int attach(self, memory) except -1:
        if self.at != NULL:
            raise ValueError("attached already")
        # A view of its own: `Region.close` may release the region's.
        PyObject_GetBuffer(memory[:], &self.view, PyBUF_WRITABLE)
        if <size_t>self.view.buf & 7:
            PyBuffer_Release(&self.view)
            raise ValueError("memory that does not begin at a multiple of 8")
        self.at = <uint8_t*>self.view.buf
        self.size = self.view.len
        return 0

    def __dealloc__(self):
        self.let_go()

    cdef void let_go(self) noexcept:
        if self.at != NULL:
            self.at = NULL
            self.size = 0
            PyBuffer_Release(&self.view)

    cdef uint8_t* word(self, uint64_t offset) except NULL:
        """The word at an offset."""
        return self.piece(offset, 8)

    cdef uint8_t* piece(self, uint64_t offset, uint64_t length) except NULL:
        """Where so many bytes from an aligned offset are."""
        if offset & 7 or length > self.size or offset > self.size - length:
            raise ValueError(f"{length} bytes at {offset} are not in a region of {self.size}, or not aligned")
        return self.at + offset


cdef class PublishedBuffer(Mapping):
    """A region's memory as published words, by index: see `shm.atomic_word`."""

    def __init__(self, memory):
        self.attach(memory)

    cdef uint8_t* at_index(self, Py_ssize_t index) except NULL:
        if index < 0 or <uint64_t>index >= self.size >> 3:
            raise IndexError(f"word {index} of a region that has {self.size >> 3}, or is closed")
        return self.at + 8 * index

    def __len__(self):
        return self.size >> 3

    def __getitem__(self, Py_ssize_t index):
        return LOAD_WORD(self.at_index(index))

    def __setitem__(self, Py_ssize_t index, uint64_t value):
        STORE_WORD(self.at_index(index), value)

    def release(self):
        """Unmap, as far as this is concerned."""
        self.let_go()


cdef class AtomicCounter:
    """One published word."""

    cdef PublishedBuffer words
    cdef Py_ssize_t index

    def __init__(self, PublishedBuffer words not None, uint64_t byte_offset):
        if byte_offset & 7:
            raise ValueError(f"word at {byte_offset} is not aligned")
        self.words = words
        self.index = byte_offset >> 3

    def load(self):
        return LOAD_WORD(self.words.at_index(self.index))

    def store(self, uint64_t value):
        STORE_WORD(self.words.at_index(self.index), value)


# ---- lanes ---------------------------------------------------------------------------------------

cdef inline uint64_t padded(uint64_t length) noexcept nogil:
    return (length + 127) // 64 * 64


cdef class LaneEnd(Mapping):
    cdef public uint64_t lane_bytes
    cdef uint8_t* producer_word
    cdef uint8_t* consumer_word
    cdef uint8_t* data

    cdef int begin(self, memory, uint64_t producer_position, uint64_t consumer_position, uint64_t data) except -1:
        self.attach(memory)
        self.producer_word, self.consumer_word = self.word(producer_position), self.word(consumer_position)
        if self.lane_bytes % 64 or self.lane_bytes < 128:
            raise ValueError(f"a lane of {self.lane_bytes} bytes")
        self.data = self.piece(data, self.lane_bytes)
        return 0


cdef class LaneWriter(LaneEnd):
    cdef public uint64_t payload_max
    cdef public uint64_t _producer_position
    cdef public uint64_t _consumer_position

    def _begin(self, memory, uint64_t producer_position, uint64_t consumer_position, uint64_t data):
        self.begin(memory, producer_position, consumer_position, data)

    def try_write(
        self, uint32_t kind, uint32_t slot, uint32_t flags, uint64_t session, uint64_t correlation_id, uint64_t arrival_ns, payload
    ):
        cdef uint64_t length = 0, size, producer_position = self._producer_position, index, room_to_end, needed, end
        cdef Py_buffer piece_view
        cdef LaneHead head
        for piece in payload:
            length += <uint64_t>len(piece)
        if length > self.lane_bytes:
            raise ValueError(f"a message of {length} bytes can never pass a lane of {self.lane_bytes}")
        size = padded(length)
        index = producer_position % self.lane_bytes
        room_to_end = self.lane_bytes - index
        needed = size if size <= room_to_end else room_to_end + size
        if producer_position + needed - self._consumer_position > self.lane_bytes:
            self._consumer_position = LOAD_WORD(self.consumer_word)  # SYNC POINT: consumer_position
            if producer_position + needed - self._consumer_position > self.lane_bytes:
                if length > self.payload_max:
                    raise ValueError(f"a message of {length} bytes can never pass a lane of {self.lane_bytes}")
                return False
        if size > room_to_end:
            memset(&head, 0, HEAD_BYTES)
            head.length = WRAP
            memcpy(self.data + index, &head, HEAD_BYTES)
            producer_position += room_to_end
            index = 0
        memset(&head, 0, HEAD_BYTES)
        head.length, head.kind, head.slot, head.flags = <uint32_t>length, kind, slot, flags
        head.session, head.correlation_id, head.arrival_ns = session, correlation_id, arrival_ns
        memcpy(self.data + index, &head, HEAD_BYTES)
        index += HEAD_BYTES
        end = index + length
        for piece in payload:
            PyObject_GetBuffer(piece, &piece_view, PyBUF_SIMPLE)
            try:
                if <uint64_t>piece_view.len > end - index:
                    raise ValueError("a piece has more bytes than its length says")
                memcpy(self.data + index, piece_view.buf, piece_view.len)
                index += piece_view.len
            finally:
                PyBuffer_Release(&piece_view)
        self._producer_position = producer_position + size
        return True

    def commit(self):
        if self._producer_position == LOAD_WORD(self.producer_word):
            return False
        STORE_WORD(self.producer_word, self._producer_position)  # SYNC POINT: lane producer_position (the messages before it)
        return True

    def consumer_position(self):
        return LOAD_WORD(self.consumer_word)  # SYNC POINT: lane consumer_position

    def is_empty(self):
        return LOAD_WORD(self.consumer_word) == self._producer_position


cdef class LaneReader(LaneEnd):
    cdef public uint64_t position
    cdef public object _data
    cdef object message_type
    cdef object error_type

    def _begin(self, memory, uint64_t producer_position, uint64_t consumer_position, uint64_t data, message_type, error_type):
        """`message_type`: LaneMessage; `error_type`: LaneError."""
        if not issubclass(message_type, tuple):
            raise TypeError("a message is a tuple")
        self.begin(memory, producer_position, consumer_position, data)
        self.message_type, self.error_type = message_type, error_type

    cdef LaneHead* peek_head(self, uint64_t* following, uint32_t* length_found) except? NULL:
        """The head of the message at `position`, wholly within the lane with its payload, that
        one's length, and where the next message begins; NULL without an error: there is none.
        """
        cdef uint64_t producer_position = LOAD_WORD(self.producer_word)  # SYNC POINT: lane producer_position
        cdef uint64_t position = self.position, index
        cdef uint32_t length
        if position == producer_position:
            return NULL
        index = position % self.lane_bytes
        if index > self.lane_bytes - HEAD_BYTES:
            raise self.error_type(f"no message begins at {position}")
        memcpy(&length, self.data + index, 4)
        if length == WRAP:
            position += self.lane_bytes - index
            index = 0
            memcpy(&length, self.data, 4)
        following[0] = position + padded(length)
        if following[0] > producer_position or index + HEAD_BYTES + length > self.lane_bytes:
            raise self.error_type(f"a message of {length} bytes at {position} runs past the lane's producer_position {producer_position}")
        length_found[0] = length
        return <LaneHead*>(self.data + index)

    def peek(self):
        cdef uint64_t following = 0
        cdef uint32_t length = 0
        cdef Py_ssize_t start
        cdef LaneHead* found = self.peek_head(&following, &length)
        cdef LaneHead head
        if found == NULL:
            return None
        memcpy(&head, found, HEAD_BYTES)
        start = <uint8_t*>found - self.data + HEAD_BYTES
        cdef object message = ALLOC(<PyTypeObject*>self.message_type, 8)
        give(message, 0, head.kind)
        give(message, 1, head.slot)
        give(message, 2, head.flags)
        give(message, 3, head.session)
        give(message, 4, head.correlation_id)
        give(message, 5, head.arrival_ns)
        give(message, 6, self._data[start : start + length])
        give(message, 7, following)
        return message

    def has_more(self):
        return self.position != LOAD_WORD(self.producer_word)

    def consume(self):
        cdef uint64_t freed = self.position - LOAD_WORD(self.consumer_word)
        if freed:
            STORE_WORD(self.consumer_word, self.position)  # SYNC POINT: consumer_position (everything before it was read; room for the writer)
        return freed


# ---- rings ---------------------------------------------------------------------------------------

cdef class Ring(Mapping):
    cdef public uint64_t ring_bytes
    cdef public uint64_t capacity
    cdef uint8_t* producer_word
    cdef uint8_t* reclaimed_word
    cdef uint8_t* settled_word
    cdef uint8_t* cursor_words
    cdef uint8_t* descriptors
    cdef uint8_t* outcomes
    cdef uint8_t* bytes_at
    cdef object descriptor_type

    def _begin(
        self, memory, uint64_t producer_position, uint64_t reclaimed, uint64_t settled, uint64_t first_cursor, uint64_t descriptors, uint64_t outcomes,
        uint64_t data, descriptor_type,
    ):
        """`descriptor_type`: Descriptor."""
        if not issubclass(descriptor_type, tuple):
            raise TypeError("a descriptor is a tuple")
        self.attach(memory)
        if not 0 < self.capacity <= 1 << 32 or self.ring_bytes % 64 or not self.ring_bytes:
            raise ValueError(f"a ring of {self.ring_bytes} bytes and {self.capacity} descriptors")
        self.producer_word, self.reclaimed_word, self.settled_word = self.word(producer_position), self.word(reclaimed), self.word(settled)
        self.cursor_words = self.piece(first_cursor, FRONTS * LINE)
        self.descriptors = self.piece(descriptors, DESCRIPTOR_BYTES * self.capacity)
        self.outcomes = self.piece(outcomes, OUTCOME_BYTES * self.capacity)
        self.bytes_at = self.piece(data, self.ring_bytes)
        self.descriptor_type = descriptor_type

    cdef inline RingDescriptor* found(self, uint64_t number) noexcept:
        return <RingDescriptor*>(self.descriptors + number % self.capacity * DESCRIPTOR_BYTES)

    cdef inline uint8_t* outcome_at(self, uint64_t number) noexcept:
        return self.outcomes + number % self.capacity * OUTCOME_BYTES

    def descriptor(self, uint64_t number):
        cdef RingDescriptor d
        memcpy(&d, self.found(number), DESCRIPTOR_BYTES)
        cdef object made = ALLOC(<PyTypeObject*>self.descriptor_type, 22)
        give(made, 0, d.ordinal)
        give(made, 1, d.position)
        give(made, 2, d.length)
        give(made, 3, d.slot)
        give(made, 4, d.base_offset)
        give(made, 5, d.next_offset)
        give(made, 6, d.session)
        give(made, 7, d.correlation_id)
        give(made, 8, d.lane_position)
        give(made, 9, d.flags)
        give(made, 10, d.source_lane)
        give(made, 11, d.result)
        give(made, 12, d.producer_id)
        give(made, 13, d.base_sequence)
        give(made, 14, d.producer_epoch)
        give(made, 15, d.control_type)
        give(made, 16, d.last_offset_delta)
        give(made, 17, d.leader_epoch)
        give(made, 18, d.append_time_us)
        give(made, 19, d.max_timestamp_us)
        give(made, 20, d.delay_ordinal)
        give(made, 21, d.delay_position)
        return made

    def plan(self, uint64_t number, uint64_t segment_base, uint64_t file_position):
        cdef uint8_t* outcome = self.outcome_at(number)
        cdef uint64_t word = (number + 1) << 8 | (~LOAD_WORD(outcome) & OUTCOME_SECOND_PLACE) | PLANNED
        cdef uint64_t place[2]
        place[0], place[1] = segment_base, file_position
        memcpy(outcome + 8 + (word & OUTCOME_SECOND_PLACE), place, 16)
        STORE_WORD(outcome, word)  # SYNC POINT: outcome (the place before it; read by a successor)

    def judge(self, uint64_t number, uint64_t verdict):
        cdef uint8_t* outcome = self.outcome_at(number)
        # SYNC POINT: outcome (before settled)
        STORE_WORD(outcome, (number + 1) << 8 | (LOAD_WORD(outcome) & OUTCOME_SECOND_PLACE) | (verdict & OUTCOME_VERDICT))

    cdef uint64_t verdict(self, uint64_t number) noexcept:
        """What became of a descriptor; 0 (NONE) where the flusher has not come to it."""
        cdef uint64_t word = LOAD_WORD(self.outcome_at(number))  # SYNC POINT: outcome
        return word & OUTCOME_VERDICT if word >> 8 == number + 1 else 0

    cdef uint64_t used_bytes(self) noexcept:
        cdef uint64_t producer_position = LOAD_WORD(self.producer_word), reclaimed = LOAD_WORD(self.reclaimed_word)  # SYNC POINT: producer_position, reclaimed
        cdef uint64_t end, start
        if producer_position == reclaimed:
            return 0
        end, start = self.found(producer_position - 1).position + self.found(producer_position - 1).length, self.found(reclaimed).position
        return end - start if end > start else 0

    def used(self):
        return self.used_bytes()

    def is_crowded(self):
        return self.used_bytes() > self.ring_bytes // 2 or LOAD_WORD(self.producer_word) - LOAD_WORD(self.reclaimed_word) > self.capacity // 2


cdef class RingWriter(Ring):
    cdef public uint64_t next_number
    cdef public uint64_t next_position
    cdef public uint64_t _reclaimed

    def reclaim(self, list live_fronts not None):
        cdef uint64_t limit = LOAD_WORD(self.settled_word), cursor  # SYNC POINT: settled
        cdef Py_ssize_t front
        for number in live_fronts:
            front = number
            if not 0 <= front < FRONTS:
                raise IndexError(f"front {front}")
            cursor = LOAD_WORD(self.cursor_words + front * LINE)  # SYNC POINT: cursor (a front has read what lies before it)
            limit = min(limit, cursor)
        if limit > self._reclaimed:
            self._reclaimed = limit
            STORE_WORD(self.reclaimed_word, limit)  # SYNC POINT: reclaimed (before what lies below it is written over)

    cdef bint reserve(self, uint64_t length, uint64_t* position) noexcept:
        """Whether so many bytes and a descriptor fit now, and where."""
        cdef uint64_t at = (self.next_position + 63) // 64 * 64, oldest
        if self.next_number - self._reclaimed >= self.capacity:
            return False
        if at % self.ring_bytes + length > self.ring_bytes:
            at = (at + self.ring_bytes - 1) // self.ring_bytes * self.ring_bytes
        if not length:
            position[0] = self.next_position
            return True
        oldest = self.found(self._reclaimed).position if self._reclaimed < self.next_number else at
        if at + length - oldest > self.ring_bytes:
            return False
        position[0] = at
        return True

    def try_claim(self, uint64_t length):
        cdef uint64_t position = 0
        return position if self.reserve(length, &position) else None

    cdef void write_descriptor(self, RingDescriptor* d) noexcept:
        """The next descriptor; its ordinal is filled in."""
        d.ordinal = self.next_number + 1
        memcpy(self.found(self.next_number), d, DESCRIPTOR_BYTES)
        self.next_number += 1
        self.next_position = d.position + d.length

    def write(
        self, uint64_t position, uint32_t length, uint32_t slot, int64_t base_offset, int64_t next_offset, uint64_t session,
        uint64_t correlation_id, uint64_t lane_position, uint32_t flags, uint16_t source_lane, uint16_t result, int64_t producer_id,
        int32_t base_sequence, int16_t producer_epoch, uint32_t last_offset_delta, uint32_t leader_epoch, int64_t append_time_us,
        int64_t max_timestamp_us, int64_t delay_ordinal=0, int64_t delay_position=0, int16_t control_type=0,
    ):
        cdef RingDescriptor d
        d.position, d.length, d.slot, d.base_offset, d.next_offset = position, length, slot, base_offset, next_offset
        d.session, d.correlation_id, d.lane_position = session, correlation_id, lane_position
        d.flags, d.source_lane, d.result = flags, source_lane, result
        d.producer_id, d.base_sequence, d.producer_epoch = producer_id, base_sequence, producer_epoch
        d.last_offset_delta, d.leader_epoch = last_offset_delta, leader_epoch
        d.append_time_us, d.max_timestamp_us = append_time_us, max_timestamp_us
        d.delay_ordinal, d.delay_position, d.control_type = delay_ordinal, delay_position, control_type
        self.write_descriptor(&d)

    def commit(self):
        if self.next_number == LOAD_WORD(self.producer_word):
            return False
        STORE_WORD(self.producer_word, self.next_number)  # SYNC POINT: producer_position (bytes and descriptors before it; read by flusher and fronts)
        return True


cdef class AckWalker:
    cdef public object _ring
    cdef public uint64_t _front
    cdef public uint64_t _generation
    cdef public uint64_t _producer_cursor
    cdef public uint64_t _settled_cursor
    cdef Ring ring
    cdef uint64_t limit
    cdef object answer_type
    cdef object ok
    cdef object code_of
    cdef object code_of_verdict

    def _begin(self, Ring ring not None, uint64_t limit, answer_type, code_of, code_of_verdict):
        """`answer_type`: Answer; `code_of`: of a number that is not 0; `code_of_verdict`:
        likewise.
        """
        if not issubclass(answer_type, tuple) or self._front >= FRONTS:
            raise TypeError("an answer is a tuple, and there are 16 fronts")
        self.ring, self.limit, self.answer_type = ring, limit, answer_type
        self.code_of, self.code_of_verdict, self.ok = code_of, code_of_verdict, code_of(0)

    cdef inline bint is_mine(self, RingDescriptor* d) noexcept:
        return d.source_lane == self._front and d.session >> 32 == self._generation

    cdef object made(self, RingDescriptor* d, object code):
        cdef object answer = ALLOC(<PyTypeObject*>self.answer_type, 7)
        give(answer, 0, d.session)
        give(answer, 1, d.correlation_id)
        give(answer, 2, code)
        give(answer, 3, d.base_offset)
        give(answer, 4, d.append_time_us)
        give(answer, 5, d.leader_epoch)
        give(answer, 6, (d.flags & FLAG_DUPLICATE) != 0)
        return answer

    def walk(self, answer, set settled_slots not None):
        cdef Ring ring = self.ring
        cdef uint64_t settled = LOAD_WORD(ring.settled_word)  # SYNC POINT: settled; read before producer_position, so that it never passes the producer_position cursor
        cdef uint64_t producer_position = min(LOAD_WORD(ring.producer_word), self._producer_cursor + self.limit)  # SYNC POINT: producer_position
        cdef uint64_t count = producer_position - self._producer_cursor, number, verdict
        cdef int64_t slot = -1
        cdef RingDescriptor d
        for number in range(self._producer_cursor, producer_position):
            memcpy(&d, ring.found(number), DESCRIPTOR_BYTES)
            if ((d.flags & ACKS_MASK) == ACKS_LEADER or (d.result and (d.flags & ACKS_MASK) == ACKS_ALL)) and self.is_mine(&d):
                answer(self.made(&d, self.code_of(d.result) if d.result else self.ok))
        self._producer_cursor = producer_position
        settled = min(settled, producer_position)
        for number in range(self._settled_cursor, settled):
            memcpy(&d, ring.found(number), DESCRIPTOR_BYTES)
            if d.flags & FLAG_BYTES and <int64_t>d.slot != slot:
                slot = d.slot
                settled_slots.add(slot)
            if (d.flags & ACKS_MASK) == ACKS_ALL and not d.result and self.is_mine(&d):
                verdict = ring.verdict(number)
                answer(self.made(&d, self.code_of_verdict(verdict)))
        if settled > self._settled_cursor:
            count += settled - self._settled_cursor
            self._settled_cursor = settled
            STORE_WORD(ring.cursor_words + self._front * LINE, settled)  # SYNC POINT: cursor (everything before it was read)
        return count

    def has_more(self):
        return self._producer_cursor != LOAD_WORD(self.ring.producer_word) or self._settled_cursor < min(
            LOAD_WORD(self.ring.settled_word), self._producer_cursor
        )


# ---- the partition table -------------------------------------------------------------------------

cdef struct AppendState:
    uint64_t state, leader_epoch, log_start_offset, high_watermark, log_end_offset


cdef class PartitionTable(Mapping):
    cdef public uint64_t slot_count

    def _begin(self, memory):
        self.attach(memory)
        self.piece(REGION_HEADER, self.slot_count * SLOT_BYTES)

    cdef int shown(self, uint64_t slot, uint64_t offset, void* found, size_t length) except -1:
        """Copy fields of the state that holds, all of one time."""
        cdef uint8_t* start
        cdef uint64_t count, recount
        if slot >= self.slot_count:
            raise IndexError(f"slot {slot} of {self.slot_count}")
        start = self.at + REGION_HEADER + slot * SLOT_BYTES
        count = LOAD_WORD(start)  # SYNC POINT: slot
        while True:
            memcpy(found, start + LINE + (count & 1) * STATE_BYTES + offset, length)
            LOADS_BEFORE()
            recount = LOAD_WORD(start)
            if recount == count:
                return 0
            count = recount

    def append_state(self, uint64_t slot):
        cdef AppendState found
        self.shown(slot, 24, &found, sizeof(found))
        return found.state, found.leader_epoch, found.log_start_offset, found.high_watermark, found.log_end_offset
