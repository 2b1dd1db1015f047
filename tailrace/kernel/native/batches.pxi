# Is a batch of a producer plainly good? And the worker's append step for one that is.
#
# `fast_append` takes what needs no thought: batches that `workers.append.worker.Worker` would
# append, of a client, to a partition without delays, the next in sequence of a producer that is
# known. It says nothing of others: they stay in the lane, and `Worker._produce`, which has the
# errors, looks at them anew. So a batch that is taken here is one that `verify_batch`,
# `validate_batch` and `ProducerTable.decide` take, and what is written is what the worker writes,
# byte for byte. (`tests/workers/append/test_fast_append.py` holds both against each other.)
#
# Invariants: no read leaves the batch, whatever its bytes are: each number found in it is held
# against the batch's length, in 64 bits without overflow, before it is followed; a batch that is
# not taken has changed nothing that anybody reads.

cdef extern from *:
    """
    typedef struct {
        uint32_t header_crc, attributes, body_crc, batch_length;
        int64_t base_offset;
        uint32_t last_offset_delta, record_count;
        int64_t first_timestamp_us, max_timestamp_us, append_time_us, producer_id;
        int32_t base_sequence;
        int16_t producer_epoch;
        uint16_t control_type;
        int32_t leader_epoch;
        uint32_t schema_id;
        int64_t durable_offset, due_us, delay_position, min_tick;
        uint32_t extension_length, merged_count;
        uint64_t previous_position;
        uint16_t header_length, version;
        uint32_t magic;
    } BatchHead;
    _Static_assert(sizeof(BatchHead) == 136, "HEADER_BYTES");
    """
    ctypedef struct BatchHead:
        uint32_t header_crc, attributes, body_crc, batch_length
        int64_t base_offset
        uint32_t last_offset_delta, record_count
        int64_t first_timestamp_us, max_timestamp_us, append_time_us, producer_id
        int32_t base_sequence
        int16_t producer_epoch
        uint16_t control_type
        int32_t leader_epoch
        uint32_t schema_id
        int64_t durable_offset, due_us, delay_position, min_tick
        uint32_t extension_length, merged_count
        uint64_t previous_position
        uint16_t header_length, version
        uint32_t magic

cdef enum:
    BATCH_HEAD_BYTES = 136  # HEADER_BYTES
    METADATA_MAX = 1 << 20  # METADATA_MAX_BYTES
    TRANSACTIONAL = 1  # ATTRIBUTE_TRANSACTIONAL
    STANDING_MASK = 0xFFFF  # transactional_producers: epoch, and the bit of a sealed one
    COMPRESSED = 32  # ATTRIBUTE_COMPRESSED
    LOG_APPEND_TIME = 16  # ATTRIBUTE_LOG_APPEND_TIME
    OF_LOG = 1 << 30  # no attribute
    VALIDITY = 0  # BufferKind
    FIXED = 1
    OFFSETS_32 = 2
    MESSAGE_RECORD_BATCH = 3
    UNPACKED_FACTOR = 16
    UNPACKED_MIN = 1 << 20
    UNPACKED_MAX = 64 << 20
    ROWS_MIN = 1 << 20
    ROWS_FREE = 1 << 16
    # producer_state._BATCH: epoch, first and last sequence; base and next offset, time
    REMEMBERED_BYTES = 36
    PRODUCERS_KEPT = 256  # producer_state.KEPT
    ONLINE = 1  # SlotState.ONLINE
    PIECE_BYTES = 256 << 10  # copied and checked at a time: a part of a core's second-level cache

cdef uint32_t BATCH_MAGIC = 0x31425254
cdef uint32_t SEQUENCES = 1U << 31  # SEQUENCE_MODULUS
cdef int64_t TRANSACTIONAL_PRODUCER_IDS = <int64_t>1 << 62
cdef object _crc32c = None


cdef uint32_t crc(const uint8_t* data, Py_ssize_t length, uint32_t seed) except? 0xFFFFFFFF:
    """By the one checksum function of Tailrace (`tailrace.format.crc32c`), which keeps nothing of
    what it is given.
    """
    return _crc32c(PyMemoryView_FromMemory(<char*>data, length, PyBUF_READ), seed)


cdef struct ShapeBuffer:
    int32_t kind
    int64_t bit_width


cdef struct ShapeNode:
    bint top_level
    int32_t parent
    int64_t list_size
    int32_t buffer_count


cdef class BatchShape:
    """What `validate_batch` needs of a SchemaLayout."""

    cdef ShapeNode* nodes
    cdef ShapeBuffer* buffers
    cdef uint32_t node_count
    cdef uint32_t buffer_count
    cdef object __weakref__

    def __cinit__(self, layout):
        global _crc32c
        if _crc32c is None:
            from tailrace.format.crc32c import crc32c

            _crc32c = crc32c
        specs = [buffer for node in layout.nodes for buffer in node.buffers]
        if len(layout.nodes) > 4096 or len(specs) != layout.buffer_count:
            raise ValueError("a layout with too many columns, or that miscounts its buffers")
        self.node_count, self.buffer_count = len(layout.nodes), len(specs)
        self.nodes = <ShapeNode*>realloc(NULL, (self.node_count + 1) * sizeof(ShapeNode))
        self.buffers = <ShapeBuffer*>realloc(NULL, (self.buffer_count + 1) * sizeof(ShapeBuffer))
        if self.nodes == NULL or self.buffers == NULL:
            raise MemoryError
        for index, node in enumerate(layout.nodes):
            if not -1 <= node.parent_index < index or not 0 <= node.list_size <= 1 << 24:
                raise ValueError("a layout whose nodes are not depth first")
            self.nodes[index].top_level, self.nodes[index].parent = node.top_level, node.parent_index
            self.nodes[index].list_size, self.nodes[index].buffer_count = node.list_size, len(node.buffers)
        for index, spec in enumerate(specs):
            if not 0 <= spec.bit_width <= 1 << 30:
                raise ValueError("a layout with too wide values")
            self.buffers[index].kind, self.buffers[index].bit_width = spec.kind, spec.bit_width

    def __dealloc__(self):
        free(self.nodes)
        free(self.buffers)


# A flatbuffer, from its first byte to the header behind it: shorter than METADATA_MAX, so sums of a
# place and an offset found in it stay far below 2^63.
cdef struct Flat:
    const uint8_t* at
    int64_t size


cdef inline int64_t u16_at(Flat* flat, int64_t place) noexcept nogil:
    """-1: outside."""
    cdef uint16_t number
    if place < 0 or place > flat.size - 2:
        return -1
    memcpy(&number, flat.at + place, 2)
    return number


cdef inline int64_t u32_at(Flat* flat, int64_t place) noexcept nogil:
    """-1: outside."""
    cdef uint32_t number
    if place < 0 or place > flat.size - 4:
        return -1
    memcpy(&number, flat.at + place, 4)
    return number


cdef inline bint i64_at(Flat* flat, int64_t place, int64_t* number) noexcept nogil:
    if place < 0 or place > flat.size - 8:
        return False
    memcpy(number, flat.at + place, 8)
    return True


cdef inline int64_t followed(Flat* flat, int64_t place) noexcept nogil:
    """Where an offset leads; -1: the offset lies outside."""
    cdef int64_t offset = u32_at(flat, place)
    return -1 if offset < 0 else place + offset


cdef int64_t field_at(Flat* flat, int64_t table, int index) noexcept nogil:
    """Where a field of a table stands; 0: it is absent; -1: outside."""
    cdef int64_t found = u32_at(flat, table), vtable, vtable_bytes, relative
    if found < 0:
        return -1
    vtable = table - <int32_t><uint32_t>found
    vtable_bytes = u16_at(flat, vtable)
    if vtable_bytes < 0:
        return -1
    if 4 + 2 * index + 2 > vtable_bytes:
        return 0
    relative = u16_at(flat, vtable + 4 + 2 * index)
    if relative < 0:
        return -1
    return table + relative if relative else 0


cdef bint optional_i64(Flat* flat, int64_t table, int index, int64_t* number) noexcept nogil:
    """A field, 0 when it is absent. False: outside."""
    cdef int64_t place = field_at(flat, table, index)
    number[0] = 0
    return place == 0 or (place > 0 and i64_at(flat, place, number))


cdef int64_t pairs_at(Flat* flat, int64_t table, int index, uint32_t count) noexcept nogil:
    """Where the items of a vector of exactly so many pairs of 64-bit numbers begin, all of them
    inside; -1: there is none such.
    """
    cdef int64_t place = field_at(flat, table, index), vector
    if place <= 0:
        return -1
    vector = followed(flat, place)
    if u32_at(flat, vector) != count or vector + 4 + 16 * <int64_t>count > flat.size:
        return -1
    return vector + 4


cdef bint has_valid_structure(const uint8_t* batch, int64_t length, int64_t metadata_size, BatchHead* head, BatchShape shape, int64_t max_message_bytes) noexcept nogil:
    """As `validate_batch` of a batch that is a client's; of a batch whose checksums are right.
    False: perhaps not.
    """
    cdef Flat flat
    cdef int64_t root, table, place, body_length, row_count, nodes, buffers, count
    cdef int64_t body_start = 8 + metadata_size
    cdef bint is_compressed
    flat.at, flat.size = batch + 8, metadata_size - BATCH_HEAD_BYTES
    root = followed(&flat, 0)
    place = field_at(&flat, root, 1)
    if place <= 0 or place >= flat.size or flat.at[place] != MESSAGE_RECORD_BATCH or not optional_i64(&flat, root, 3, &body_length):
        return False
    place = field_at(&flat, root, 2)
    if place <= 0:
        return False
    table = followed(&flat, place)
    place = field_at(&flat, table, 3)
    if place < 0:
        return False
    is_compressed = place > 0
    place = field_at(&flat, table, 4)
    if place < 0 or (place > 0 and u32_at(&flat, followed(&flat, place)) != 0):
        return False
    if not optional_i64(&flat, table, 0, &row_count):
        return False
    nodes = pairs_at(&flat, table, 1, shape.node_count)
    buffers = pairs_at(&flat, table, 2, shape.buffer_count)
    if nodes < 0 or buffers < 0:
        return False
    if body_length != length - body_start or row_count != head.record_count or is_compressed != ((head.attributes & COMPRESSED) != 0):
        return False

    # Ranges, and the sizes that buffers unpack to.
    cdef int64_t limit = min(max(UNPACKED_FACTOR * min(max_message_bytes, UNPACKED_MAX), UNPACKED_MIN), UNPACKED_MAX)
    cdef int64_t unpacked = 0, end = 0, offset, size, claimed
    cdef uint32_t index
    for index in range(shape.buffer_count):
        memcpy(&offset, flat.at + buffers + 16 * <int64_t>index, 8)
        memcpy(&size, flat.at + buffers + 16 * <int64_t>index + 8, 8)
        if size < 0 or offset < end or offset > body_length or size > body_length - offset or offset & 7:
            return False
        end = offset + size
        if is_compressed:
            claimed = unpacked_size(batch + body_start + offset, size, limit)
            if claimed < 0:
                return False
            unpacked += claimed
            if unpacked > limit:
                return False
    if not is_compressed:
        unpacked = body_length
    if row_count > min(max(<int64_t>ROWS_MIN, max_message_bytes // 8), ROWS_FREE + 8 * unpacked):
        return False

    # Columns against rows, parents and buffers.
    cdef int64_t values = 0, values_max = max(limit, 8 * body_length), cells, nulls, parent_cells, needed
    cdef uint32_t buffer = 0
    cdef int32_t of_node
    cdef ShapeNode* node
    for index in range(shape.node_count):
        node = shape.nodes + index
        memcpy(&cells, flat.at + nodes + 16 * <int64_t>index, 8)
        memcpy(&nulls, flat.at + nodes + 16 * <int64_t>index + 8, 8)
        if cells < 0 or cells > values_max or nulls < 0 or nulls > cells or (node.top_level and cells != row_count):
            return False
        values += cells
        if values > values_max:
            return False
        if node.parent >= 0:
            memcpy(&parent_cells, flat.at + nodes + 16 * <int64_t>node.parent, 8)
            if cells < parent_cells * node.list_size:
                return False
        for of_node in range(node.buffer_count):
            memcpy(&offset, flat.at + buffers + 16 * <int64_t>buffer, 8)
            memcpy(&size, flat.at + buffers + 16 * <int64_t>buffer + 8, 8)
            if is_compressed:
                size = unpacked_size(batch + body_start + offset, size, limit)
            needed = 0
            if size == 0 and cells == 0:
                pass
            elif shape.buffers[buffer].kind == VALIDITY:
                needed = (cells + 7) // 8 if nulls else 0
            elif shape.buffers[buffer].kind == FIXED:
                needed = (cells * shape.buffers[buffer].bit_width + 7) // 8
            elif shape.buffers[buffer].kind == OFFSETS_32:
                needed = 4 * (cells + 1)
            if size < needed:
                return False
            buffer += 1
    return True


cdef inline int64_t unpacked_size(const uint8_t* buffer, int64_t size, int64_t limit) noexcept nogil:
    """What a compressed buffer of so many bytes claims to unpack to; -1: nothing that is
    allowed.
    """
    cdef int64_t claimed
    if size == 0:
        return 0
    if size < 8:
        return -1
    memcpy(&claimed, buffer, 8)
    if claimed == -1:
        return size - 8
    return claimed if 0 <= claimed <= limit else -1


cdef inline bint is_unset(int64_t number) noexcept nogil:
    return number == 0 or number == -1


cdef int64_t read_plain_head(const uint8_t* batch, int64_t length, BatchHead* head, uint32_t allowed) noexcept nogil:
    """The header of a client's batch, form proven as by `verify_batch` and `validate_batch`;
    returns where it stands, 0: perhaps it is not good. `allowed`: attributes that it may have
    besides COMPRESSED; OF_LOG: what a segment may have, it may be a merged one.
    """
    cdef uint32_t continuation, metadata_size
    cdef int64_t position
    if length < 8 + BATCH_HEAD_BYTES or length > UNPACKED_MAX:
        return 0
    memcpy(&continuation, batch, 4)
    memcpy(&metadata_size, batch + 4, 4)
    if continuation != 0xFFFFFFFFU or metadata_size & 7 or metadata_size < BATCH_HEAD_BYTES or metadata_size > METADATA_MAX:
        return 0
    position = 8 + <int64_t>metadata_size - BATCH_HEAD_BYTES
    if position + BATCH_HEAD_BYTES > length:
        return 0
    memcpy(head, batch + position, BATCH_HEAD_BYTES)
    if head.magic != BATCH_MAGIC or head.version != (2 if head.attributes & TRANSACTIONAL else 1) or head.header_length != BATCH_HEAD_BYTES or head.extension_length:
        return 0
    if head.batch_length != length or length & 7 or head.attributes & ~(<uint32_t>COMPRESSED | (allowed & ~<uint32_t>OF_LOG)):
        return 0
    if head.base_offset < 0 or head.last_offset_delta >= SEQUENCES or head.record_count == 0 or head.record_count - 1 != head.last_offset_delta:
        return 0
    if not is_unset(head.due_us) or not is_unset(head.delay_position) or not is_unset(head.min_tick) or head.previous_position:
        return 0
    if head.control_type or (head.merged_count and not allowed & OF_LOG) or (head.producer_id >= TRANSACTIONAL_PRODUCER_IDS) != ((head.attributes & TRANSACTIONAL) != 0):
        return 0
    return position


cdef int64_t plain_head(const uint8_t* batch, int64_t length, BatchHead* head, uint32_t seed, BatchShape shape, int64_t max_message_bytes, uint32_t allowed) except -1:
    """Where the header, now in `head`, of a client's batch stands that `verify_batch` and
    `validate_batch` take, if the checksum of its body is right. 0: perhaps they do not.
    """
    cdef int64_t position = read_plain_head(batch, length, head, allowed)
    if not position or not has_valid_structure(batch, length, position + BATCH_HEAD_BYTES - 8, head, shape, max_message_bytes):
        return 0
    return position if crc(batch + position + 4, BATCH_HEAD_BYTES - 4, seed) == head.header_crc else 0


cdef bint has_right_body(const uint8_t* batch, int64_t length, int64_t position, const BatchHead* head) except -1:
    """Whether the body of a batch, whose header stands at `position`, has the checksum that the
    header says.
    """
    cdef int64_t body = position + BATCH_HEAD_BYTES
    return crc(batch + body, length - body, crc(batch, position, 0)) == head.body_crc


def is_valid_batch(batch, uint32_t seed, BatchShape shape not None, int64_t max_message_bytes):
    """Whether a client's batch is plainly good: `verify_batch` and `validate_batch` take it. False:
    ask them.
    """
    cdef Py_buffer view
    cdef BatchHead head
    cdef int64_t position
    PyObject_GetBuffer(batch, &view, PyBUF_SIMPLE)
    try:
        position = plain_head(<const uint8_t*>view.buf, view.len, &head, seed, shape, max_message_bytes, 0)
        return position > 0 and has_right_body(<const uint8_t*>view.buf, view.len, position, &head)
    finally:
        PyBuffer_Release(&view)


cdef bint copy_is_right(uint8_t* target, const uint8_t* batch, int64_t length, int64_t position, uint32_t body_crc) except -1:
    """Copy a batch whose header stands at `position`; whether the copy's body has this checksum.
    Piece by piece: what was copied is still in the processor's cache when it is checked, so that
    memory is passed over once.
    """
    cdef int64_t at = position + BATCH_HEAD_BYTES, size
    cdef uint32_t found
    memcpy(target, batch, at)
    found = crc(target, position, 0)
    while at < length:
        size = min(<int64_t>PIECE_BYTES, length - at)
        memcpy(target + at, batch + at, size)
        found = crc(target + at, size, found)
        at += size
    return found == body_crc


# ---- the worker's append step --------------------------------------------------------------------

cdef class FastPathPartition:
    """What a worker knows of one of its partitions, as far as each batch asks for it: see
    `workers.append.partitions.Partition`.
    """

    cdef public int64_t next_offset
    cdef public int64_t leader_epoch
    cdef public int64_t last_append_us
    cdef public int64_t max_message_bytes
    cdef public int64_t slot_map_version
    cdef public bint log_append_time
    cdef public uint32_t seed
    cdef uint32_t schema_id
    cdef Py_ssize_t data_dir
    cdef bint has_special_rules
    cdef BatchShape shape

    def _note(self, BatchShape shape not None, uint32_t schema_id, Py_ssize_t data_dir, bint has_special_rules):
        """What follows from the assignment. `has_special_rules`: it is a delay log."""
        self.shape, self.schema_id, self.data_dir, self.has_special_rules = shape, schema_id, data_dir, has_special_rules


cdef struct Remembered:
    int32_t epoch, base_sequence, last_sequence
    int64_t base_offset, next_offset, append_time_us


cdef bint is_next_in_sequence(bytes packed, BatchHead* head, int64_t forget_before_us) noexcept:
    """As `ProducerTable.decide` says APPEND of a producer that is known, in its epoch."""
    cdef int32_t numbers[3]
    cdef int64_t time_us
    if PyBytes_GET_SIZE(packed) < REMEMBERED_BYTES:
        return False
    memcpy(numbers, PyBytes_AS_STRING(packed), 12)
    memcpy(&time_us, PyBytes_AS_STRING(packed) + 28, 8)
    return (
        time_us >= forget_before_us and numbers[0] == head.producer_epoch
        and <int64_t>head.base_sequence == (<int64_t>numbers[2] + 1) % <int64_t>SEQUENCES
    )


cdef bytes remembered_first(BatchHead* head, int64_t base_offset, int64_t next_offset, int64_t append_us):
    """As `ProducerTable.record` packs the first batch of a producer."""
    cdef bytes made = PyBytes_FromStringAndSize(NULL, REMEMBERED_BYTES)
    remember(PyBytes_AS_STRING(made), head, base_offset, next_offset, append_us)
    return made


cdef void remember(char* at, BatchHead* head, int64_t base_offset, int64_t next_offset, int64_t append_us) noexcept:
    cdef int32_t numbers[3]
    cdef int64_t places[3]
    numbers[0], numbers[1] = head.producer_epoch, head.base_sequence
    numbers[2] = <int32_t>((<int64_t>head.base_sequence + head.last_offset_delta) % <int64_t>SEQUENCES)
    places[0], places[1], places[2] = base_offset, next_offset, append_us
    memcpy(at, numbers, 12)
    memcpy(at + 12, places, 24)


cdef bytes remembered(bytes packed, BatchHead* head, int64_t base_offset, int64_t next_offset, int64_t append_us, Py_ssize_t older_bytes):
    """As `ProducerTable.record` packs it."""
    cdef Py_ssize_t kept = min(PyBytes_GET_SIZE(packed), older_bytes)
    cdef int64_t newest_offset
    memcpy(&newest_offset, PyBytes_AS_STRING(packed) + 12, 8)
    if newest_offset >= base_offset:
        return packed
    cdef bytes made = PyBytes_FromStringAndSize(NULL, REMEMBERED_BYTES + kept)
    cdef char* at = PyBytes_AS_STRING(made)
    remember(at, head, base_offset, next_offset, append_us)
    memcpy(at + REMEMBERED_BYTES, PyBytes_AS_STRING(packed), kept)
    return made


cdef enum Standing:
    NEEDS_THOUGHT
    IS_OPEN
    OPENS


cdef Standing standing_of(BatchHead* head, dict registered, dict opened) except *:
    """A transactional batch's standing: the coordinator has registered exactly its epoch, not
    sealed, and its producer has the same epoch open in the partition, or nothing.
    """
    if head.producer_id < TRANSACTIONAL_PRODUCER_IDS or head.producer_epoch < 0:
        return NEEDS_THOUGHT
    cdef object producer = head.producer_id
    cdef PyObject* known = PyDict_GetItemWithError(registered, producer)
    if known == NULL or (<int64_t><object>known & STANDING_MASK) != head.producer_epoch:
        return NEEDS_THOUGHT
    known = PyDict_GetItemWithError(opened, producer)
    if known == NULL:
        return OPENS
    return IS_OPEN if <int64_t>(<object>known)[0] == head.producer_epoch else NEEDS_THOUGHT


cdef int append_one(
    RingWriter ring, LaneReader lane, uint16_t source, uint32_t produce_kind, dict partitions, list tables, int64_t now_us,
    int64_t expiration_us, Py_ssize_t older_bytes, dict registered, RingDescriptor* d,
) except -1:
    """The lane's next message into the ring, if it is a batch that needs no thought. Returns 0: it
    is not; 1: it was; 2: it was, and opens a transaction in the partition.
    """
    cdef uint64_t following = 0, position = 0
    cdef uint32_t length = 0
    cdef LaneHead message
    cdef LaneHead* found = lane.peek_head(&following, &length)
    if found == NULL:
        return 0
    memcpy(&message, found, HEAD_BYTES)
    cdef const uint8_t* batch = <const uint8_t*>found + HEAD_BYTES
    if message.kind != produce_kind or message.flags & 0xFC or not ring.reserve(length, &position):
        return 0
    cdef PyObject* known = PyDict_GetItemWithError(partitions, message.slot)
    if known == NULL or not isinstance(<object>known, FastPathPartition):
        return 0
    cdef FastPathPartition partition = <FastPathPartition>known
    if (
        partition.shape is None or partition.has_special_rules or length > partition.max_message_bytes
        or (message.flags >> 8) != partition.slot_map_version or partition.data_dir >= PyList_GET_SIZE(tables)
    ):
        return 0
    table = <object>PyList_GET_ITEM(tables, partition.data_dir)
    if table is None:
        return 0
    cdef AppendState shown
    (<PartitionTable?>table).shown(message.slot, 24, &shown, sizeof(shown))
    if shown.state != ONLINE or <int64_t>shown.leader_epoch != partition.leader_epoch:
        return 0
    cdef BatchHead head
    cdef int64_t at = plain_head(batch, length, &head, partition.seed, partition.shape, partition.max_message_bytes, 0 if registered is None else TRANSACTIONAL)
    if not at or head.schema_id != partition.schema_id:
        return 0
    if head.durable_offset and head.durable_offset != partition.next_offset + 1:
        return 0
    cdef uint32_t flags = message.flags | FLAG_BYTES
    cdef Standing standing = IS_OPEN
    if head.attributes & TRANSACTIONAL:
        standing = standing_of(&head, registered, partition.producers.transactions._open)
        if standing == NEEDS_THOUGHT:
            return 0
        flags |= FLAG_TRANSACTIONAL

    cdef int64_t append_us = max(now_us, partition.last_append_us)
    cdef int64_t base_offset = partition.next_offset, next_offset = base_offset + head.last_offset_delta + 1
    cdef dict producers = None
    cdef object producer = None
    cdef bytes packed = None
    if head.producer_id >= 0:
        producers = partition.producers._producers
        producer = head.producer_id
        known = PyDict_GetItemWithError(producers, producer)
        if standing == OPENS:
            # its producer's earlier batches went with their marker
            if known != NULL or head.base_sequence or len(producers) >= PRODUCERS_KEPT:
                return 0
            packed = remembered_first(&head, base_offset, next_offset, append_us)
        elif known == NULL or not is_next_in_sequence(<bytes?><object>known, &head, append_us - expiration_us):
            return 0
        else:
            packed = remembered(<bytes><object>known, &head, base_offset, next_offset, append_us, older_bytes)

    # Nothing above has changed anything; below, what can fail comes before what anybody can see:
    # nobody reads the ring behind its head.
    cdef uint64_t index = position % ring.ring_bytes
    if index + length > ring.ring_bytes:
        return 0
    cdef uint8_t* target = ring.bytes_at + index
    if not copy_is_right(target, batch, length, at, head.body_crc):
        return 0
    if partition.log_append_time:
        head.attributes |= LOG_APPEND_TIME
        head.first_timestamp_us = head.max_timestamp_us = append_us
    head.base_offset, head.append_time_us, head.durable_offset = base_offset, append_us, shown.high_watermark
    head.leader_epoch = <int32_t>partition.leader_epoch
    memcpy(target + at, &head, BATCH_HEAD_BYTES)
    head.header_crc = crc(target + at + 4, BATCH_HEAD_BYTES - 4, partition.seed)
    memcpy(target + at, &head.header_crc, 4)
    if producers is not None:
        producers[producer] = packed
    d.position, d.length, d.slot, d.base_offset, d.next_offset = position, length, message.slot, base_offset, next_offset
    d.session, d.correlation_id, d.lane_position = message.session, message.correlation_id, following
    d.flags, d.source_lane, d.result = flags, source, 0
    d.producer_id, d.base_sequence, d.producer_epoch = head.producer_id, head.base_sequence, head.producer_epoch
    d.last_offset_delta, d.leader_epoch = head.last_offset_delta, <uint32_t>partition.leader_epoch
    d.append_time_us, d.max_timestamp_us = append_us, head.max_timestamp_us
    d.delay_ordinal = d.delay_position = d.control_type = 0
    ring.write_descriptor(d)
    partition.next_offset, partition.last_append_us = next_offset, append_us
    lane.position = following
    return 2 if standing == OPENS else 1


def fast_append(
    RingWriter ring not None, LaneReader lane not None, uint16_t source, uint32_t produce_kind, Py_ssize_t count_max, dict partitions not None,
    list tables not None, int64_t now_us, int64_t expiration_us, Py_ssize_t older_bytes, dict registered,
):
    """Append what a lane has, up to the first message that needs thought: see
    `reference.fast_append`.
    """
    cdef Py_ssize_t count = 0
    cdef int64_t byte_count = 0
    cdef bint has_replies = False
    cdef int appended
    cdef RingDescriptor d
    while count < count_max:
        appended = append_one(
            ring, lane, source, produce_kind, partitions, tables, now_us, expiration_us, older_bytes, registered, &d
        )
        if not appended:
            break
        count += 1
        byte_count += d.length
        has_replies = has_replies or (d.flags & ACKS_MASK) == ACKS_LEADER
        if appended == 2:
            return count, byte_count, has_replies, (d.slot, d.producer_id, d.producer_epoch, d.base_offset)
    return count, byte_count, has_replies, None
