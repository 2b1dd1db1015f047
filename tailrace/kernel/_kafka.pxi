# Kafka's records to batches of the default schema and back: `reference_kafka.py` says what.
#
# In: one pass reads all records, and notes in scratch memory the time and the place of each cell and
# where it will end in its column. Then the size of any range of rows is a subtraction, and each
# column is one loop of copies. Out: one pass writes into memory that is large enough in any case,
# and gives back what is left.
#
# Scratch memory is kept for the next call, at most KAFKA_KEPT_BYTES of it.

cdef extern from *:
    """
    /* faults of a number: 1 cut off, 2 too long */

    static inline int kafka_varint(const uint8_t** at, const uint8_t* end, int32_t* number) {
        const uint8_t* p = *at;
        uint32_t bits, byte;
        if (p >= end) return 1;
        bits = *p++;
        if (bits >= 128) {
            int shift = 7;
            bits &= 127;
            do {
                if (p >= end) return 1;
                byte = *p++;
                if (shift == 28 && byte > 15) return 2;
                bits |= (byte & 127) << shift;
                shift += 7;
            } while (byte >= 128);
        }
        *at = p;
        *number = (int32_t)(bits >> 1) ^ -(int32_t)(bits & 1);
        return 0;
    }

    static inline int kafka_varlong(const uint8_t** at, const uint8_t* end, int64_t* number) {
        const uint8_t* p = *at;
        uint64_t bits = 0, byte;
        int shift = 0;
        do {
            if (p >= end) return 1;
            byte = *p++;
            if (shift == 63 && byte > 1) return 2;
            bits |= (byte & 127) << shift;
            shift += 7;
        } while (byte >= 128);
        *at = p;
        *number = (int64_t)(bits >> 1) ^ -(int64_t)(bits & 1);
        return 0;
    }

    static inline uint64_t kafka_zigzag(int64_t number) {
        return ((uint64_t)number << 1) ^ (uint64_t)(number >> 63);
    }

    static inline int kafka_size(uint64_t bits) {
        return (70 - __builtin_clzll(bits | 1)) / 7;
    }

    static inline uint8_t* kafka_put(uint8_t* at, uint64_t bits) {
        while (bits > 127) {
            *at++ = (uint8_t)(bits | 128);
            bits >>= 7;
        }
        *at++ = (uint8_t)bits;
        return at;
    }

    /* `room`: the bytes, from both places on, that may be read and written: those behind the length
       are written again later. */
    static inline void kafka_copy(void* to, const void* from, int64_t length, int64_t room) {
        if (length <= 256 && ((length + 15) & ~(int64_t)15) <= room) {
            int64_t done;
            for (done = 0; done < length; done += 16)
                __builtin_memcpy((char*)to + done, (const char*)from + done, 16);
        } else
            memcpy(to, from, (size_t)length);
    }

    static inline int kafka_is_ascii(const uint8_t* p, int64_t n) {
        uint64_t seen = 0, some;
        for (; n >= 8; n -= 8, p += 8) {
            __builtin_memcpy(&some, p, 8);
            seen |= some;
        }
        for (; n > 0; n--, p++) seen |= *p;
        return !(seen & 0x8080808080808080ull);
    }

    static inline int64_t kafka_ms(int64_t us) {
        return us / 1000 - (us % 1000 < 0);
    }
    """
    int kafka_varint(const uint8_t** at, const uint8_t* end, int32_t* number) noexcept nogil
    int kafka_varlong(const uint8_t** at, const uint8_t* end, int64_t* number) noexcept nogil
    uint64_t kafka_zigzag(int64_t number) noexcept nogil
    int kafka_size(uint64_t bits) noexcept nogil
    uint8_t* kafka_put(uint8_t* at, uint64_t bits) noexcept nogil
    void kafka_copy(void* to, const void* source, int64_t length, int64_t room) noexcept nogil
    int kafka_is_ascii(const uint8_t* data, int64_t length) noexcept nogil
    int64_t kafka_ms(int64_t us) noexcept nogil
    bint __builtin_add_overflow(int64_t first, int64_t second, int64_t* sum) noexcept nogil

cdef enum:
    # reference_kafka.Fault
    KAFKA_CUT_OFF = 1
    KAFKA_NEGATIVE_LENGTH = 3
    KAFKA_BYTES_LEFT = 4
    KAFKA_OFFSET_DELTA = 5
    KAFKA_TIMESTAMP = 6
    KAFKA_HEADER_COUNT = 7
    KAFKA_HEADER_NAME_NULL = 8
    KAFKA_HEADER_NAME_NOT_UTF8 = 9
    KAFKA_KEY_MISSING = 10
    KAFKA_RECORD_TOO_LARGE = 11
    KAFKA_RECORDS_LEFT = 12
    KAFKA_COLUMNS = 13
    KAFKA_RECORD_MIN = 7  # RECORD_MIN_BYTES
    KAFKA_RECORDS_MAX = 1 << 30  # RECORDS_MAX_BYTES
    KAFKA_KEPT_BYTES = 8 << 20
    # A record's numbers at their longest: its length, attributes, both deltas, two lengths, a count.
    KAFKA_NUMBERS_MAX = 5 + 1 + 10 + 5 + 5 + 5 + 5
    KAFKA_BUFFERS = 17  # COLUMN_BUFFERS
    KAFKA_SCRATCH = 8

cdef uint32_t KAFKA_NULL = 0xFFFFFFFFU


cdef struct KafkaCells:
    int32_t* ends  # where each cell ends among the bytes of the column; the first one is 0
    uint32_t* places  # where its bytes begin among the records, KAFKA_NULL: it is null
    int64_t nulls


cdef struct KafkaRows:
    Buffer scratch[KAFKA_SCRATCH]
    const uint8_t* records
    int64_t length
    int64_t count
    int64_t* stamps
    KafkaCells keys
    KafkaCells values
    int32_t* list_ends
    int64_t without_headers
    KafkaCells names
    KafkaCells contents


cdef Buffer[KAFKA_SCRATCH] _kafka_scratch
cdef object _RecordFault = None


cdef int raise_fault(int fault, int64_t row) except -1:
    global _RecordFault
    if _RecordFault is None:
        from tailrace.kernel.reference_kafka import RecordFault

        _RecordFault = RecordFault
    raise _RecordFault(fault, row)


cdef void take_kafka_scratch(KafkaRows* rows) noexcept:
    """The rows have the scratch memory that is kept: Python code may run before they give it back,
    and convert other records.
    """
    memset(rows, 0, sizeof(KafkaRows))
    memcpy(rows.scratch, _kafka_scratch, sizeof(_kafka_scratch))
    memset(_kafka_scratch, 0, sizeof(_kafka_scratch))


cdef void release_kafka_scratch(KafkaRows* rows) noexcept:
    cdef int index
    cdef Py_ssize_t size = 0
    for index in range(KAFKA_SCRATCH):
        size += rows.scratch[index].size
    if size <= KAFKA_KEPT_BYTES and _kafka_scratch[0].at == NULL:
        memcpy(_kafka_scratch, rows.scratch, sizeof(_kafka_scratch))
        return
    for index in range(KAFKA_SCRATCH):
        let_go(&rows.scratch[index])


cdef int find_header_scratch(KafkaRows* rows, int64_t headers) except -1:
    """There is scratch memory for so many headers; what is there of earlier ones is kept. The ends
    of the buffers stay 0.
    """
    cdef int index
    for index in range(4, 8):
        make_room(&rows.scratch[index], 4 * (headers + 1))
    rows.names.ends, rows.names.places = <int32_t*>rows.scratch[4].at, <uint32_t*>rows.scratch[5].at
    rows.contents.ends, rows.contents.places = <int32_t*>rows.scratch[6].at, <uint32_t*>rows.scratch[7].at
    return 0


cdef int find_row_scratch(KafkaRows* rows) except -1:
    make_room(&rows.scratch[0], 8 * rows.count)
    make_room(&rows.scratch[1], 8 * (rows.count + 1))
    make_room(&rows.scratch[2], 8 * (rows.count + 1))
    make_room(&rows.scratch[3], 4 * (rows.count + 1))
    rows.stamps = <int64_t*>rows.scratch[0].at
    rows.keys.ends = <int32_t*>rows.scratch[1].at
    rows.keys.places = <uint32_t*>(rows.keys.ends + rows.count + 1)
    rows.values.ends = <int32_t*>rows.scratch[2].at
    rows.values.places = <uint32_t*>(rows.values.ends + rows.count + 1)
    rows.list_ends = <int32_t*>rows.scratch[3].at
    find_header_scratch(rows, rows.count)
    return 0


cdef inline int kafka_cell(const uint8_t* records, const uint8_t** at, const uint8_t* end, KafkaCells* cells, int64_t row) noexcept nogil:
    """The next length, and its bytes, are a cell. Returns a fault or 0."""
    cdef int32_t length = 0
    cdef int fault = kafka_varint(at, end, &length)
    if fault:
        return fault
    if length < 0:
        if length < -1:
            return KAFKA_NEGATIVE_LENGTH
        cells.nulls += 1
        cells.places[row] = KAFKA_NULL
        cells.ends[row + 1] = cells.ends[row]
        return 0
    if length > end - at[0]:
        return KAFKA_CUT_OFF
    cells.places[row] = <uint32_t>(at[0] - records)
    cells.ends[row + 1] = cells.ends[row] + length
    at[0] += length
    return 0


cdef int read_kafka_rows(KafkaRows* rows, int64_t base_ms, int64_t missing_us, bint requires_key, int64_t headers_max, int64_t* fault_row) except -1:
    """Read all records into the scratch memory. Returns a fault or 0."""
    cdef const uint8_t* at = rows.records
    cdef const uint8_t* records_end = at + rows.length
    cdef const uint8_t* end
    cdef const uint8_t* name
    cdef int32_t number = 0
    cdef int64_t delta = 0, time_ms = 0, row, headers = 0, room = rows.count, i
    cdef int fault
    rows.keys.ends[0] = rows.values.ends[0] = rows.list_ends[0] = rows.names.ends[0] = rows.contents.ends[0] = 0
    for row in range(rows.count):
        fault_row[0] = row
        fault = kafka_varint(&at, records_end, &number)
        if fault:
            return fault
        if number < 0:
            return KAFKA_NEGATIVE_LENGTH
        if number > records_end - at or number < 1:
            return KAFKA_CUT_OFF
        end = at + number
        at += 1
        fault = kafka_varlong(&at, end, &delta)
        if fault:
            return fault
        if __builtin_add_overflow(base_ms, delta, &time_ms) or not -TIMESTAMP_MAX_MS <= time_ms <= TIMESTAMP_MAX_MS:
            return KAFKA_TIMESTAMP
        fault = kafka_varint(&at, end, &number)
        if fault:
            return fault
        if number != row:
            return KAFKA_OFFSET_DELTA
        rows.stamps[row] = missing_us if time_ms == -1 else time_ms * 1000
        fault = kafka_cell(rows.records, &at, end, &rows.keys, row)
        if fault:
            return fault
        if requires_key and rows.keys.places[row] == KAFKA_NULL:
            return KAFKA_KEY_MISSING
        fault = kafka_cell(rows.records, &at, end, &rows.values, row)
        if fault:
            return fault
        fault = kafka_varint(&at, end, &number)
        if fault:
            return fault
        if number:
            if number < 0 or number > (end - at) >> 1:
                return KAFKA_HEADER_COUNT
            if number > headers_max:
                return KAFKA_RECORD_TOO_LARGE
            if headers + number > room:
                room = max(2 * room, headers + number)
                # The buffers' ends are 0, so what they have is at most their size: it moves along.
                find_header_scratch(rows, room)
            for i in range(number):
                fault = kafka_cell(rows.records, &at, end, &rows.names, headers)
                if fault:
                    return fault
                if rows.names.places[headers] == KAFKA_NULL:
                    return KAFKA_HEADER_NAME_NULL
                name = rows.records + rows.names.places[headers]
                if not kafka_is_ascii(name, at - name) and not is_utf8(name, at - name):
                    return KAFKA_HEADER_NAME_NOT_UTF8
                fault = kafka_cell(rows.records, &at, end, &rows.contents, headers)
                if fault:
                    return fault
                headers += 1
        else:
            rows.without_headers += 1
        rows.list_ends[row + 1] = <int32_t>headers
        if at != end:
            return KAFKA_BYTES_LEFT
    if at != records_end:
        fault_row[0] = rows.count
        return KAFKA_RECORDS_LEFT
    return 0


cdef bint is_utf8(const uint8_t* data, int64_t length) except -1:
    try:
        PyUnicode_DecodeUTF8(<const char*>data, length, NULL)
    except UnicodeDecodeError:
        return False
    return True


cdef int64_t nulls_in(KafkaCells* cells, int64_t first, int64_t end) noexcept nogil:
    cdef int64_t row, nulls = 0
    if cells.nulls:
        for row in range(first, end):
            nulls += cells.places[row] == KAFKA_NULL
    return nulls


cdef inline int64_t kafka_padded(int64_t length) noexcept nogil:
    return (length + 7) & ~<int64_t>7


cdef struct KafkaPart:
    # a range of the rows, as a batch
    int64_t first, count, first_header, header_count
    int64_t key_nulls, value_nulls, list_nulls, content_nulls
    int64_t body_length


cdef int64_t cells_length(KafkaCells* cells, int64_t first, int64_t count, int64_t nulls) noexcept nogil:
    return (kafka_padded((count + 7) >> 3) if nulls else 0) + kafka_padded(4 * (count + 1)) + kafka_padded(cells.ends[first + count] - cells.ends[first])


cdef void measure_part(KafkaRows* rows, KafkaPart* part, int64_t first, int64_t end) noexcept nogil:
    cdef int64_t count = end - first, row
    part.first, part.count = first, count
    part.first_header = rows.list_ends[first]
    part.header_count = rows.list_ends[end] - part.first_header
    part.key_nulls = nulls_in(&rows.keys, first, end)
    part.value_nulls = nulls_in(&rows.values, first, end)
    part.content_nulls = nulls_in(&rows.contents, part.first_header, part.first_header + part.header_count)
    part.list_nulls = 0
    if rows.without_headers:
        for row in range(first, end):
            part.list_nulls += rows.list_ends[row + 1] == rows.list_ends[row]
    part.body_length = (
        kafka_padded(8 * count) + cells_length(&rows.keys, first, count, part.key_nulls) + cells_length(&rows.values, first, count, part.value_nulls)
        + (kafka_padded((count + 7) >> 3) if part.list_nulls else 0) + kafka_padded(4 * (count + 1))
        + cells_length(&rows.names, part.first_header, part.header_count, 0)
        + cells_length(&rows.contents, part.first_header, part.header_count, part.content_nulls)
    )


cdef void lay_bits(Body* body, KafkaCells* cells, int64_t first, int64_t count, int64_t nulls) noexcept:
    cdef int64_t row
    cdef uint8_t* bits
    if not nulls:
        lay(body, NULL, 0)
        return
    bits = <uint8_t*>body.at + body.end
    lay(body, NULL, (count + 7) >> 3)
    for row in range(count):
        if cells.places[first + row] != KAFKA_NULL:
            bits[row >> 3] |= <uint8_t>(1 << (row & 7))


cdef void lay_ends(Body* body, int32_t* ends, int64_t first, int64_t count) noexcept:
    """Offsets of cells or lists, from 0 on."""
    cdef int64_t row
    cdef int32_t start = ends[first]
    cdef int32_t* target
    if not start:
        lay(body, <const char*>(ends + first), 4 * (count + 1))
        return
    target = <int32_t*>(body.at + body.end)
    lay(body, NULL, 4 * (count + 1))
    for row in range(count + 1):
        target[row] = ends[first + row] - start


cdef void lay_cells(Body* body, KafkaRows* rows, KafkaCells* cells, int64_t first, int64_t count, int64_t nulls) noexcept:
    cdef int64_t row, length, size = cells.ends[first + count] - cells.ends[first], room
    cdef uint8_t* target
    cdef uint8_t* target_end
    cdef uint32_t place
    lay_bits(body, cells, first, count, nulls)
    lay_ends(body, cells.ends, first, count)
    body.places[0], body.places[1] = body.end, size
    body.places += 2
    target = <uint8_t*>body.at + body.end
    target_end = target + kafka_padded(size)
    for row in range(first, first + count):
        length = cells.ends[row + 1] - cells.ends[row]
        if length:
            place = cells.places[row]
            room = min(target_end - target, rows.length - place)
            kafka_copy(target, rows.records + place, length, room)
            target += length
    memset(target, 0, target_end - target)
    body.end += kafka_padded(size)


cdef void lay_part(Body* body, KafkaRows* rows, KafkaPart* part) noexcept:
    cdef int64_t row
    cdef uint8_t* bits
    lay(body, NULL, 0)
    lay(body, <const char*>(rows.stamps + part.first), 8 * part.count)
    lay_cells(body, rows, &rows.keys, part.first, part.count, part.key_nulls)
    lay_cells(body, rows, &rows.values, part.first, part.count, part.value_nulls)
    if part.list_nulls:
        bits = <uint8_t*>body.at + body.end
        lay(body, NULL, (part.count + 7) >> 3)
        for row in range(part.count):
            if rows.list_ends[part.first + row + 1] != rows.list_ends[part.first + row]:
                bits[row >> 3] |= <uint8_t>(1 << (row & 7))
    else:
        lay(body, NULL, 0)
    lay_ends(body, rows.list_ends, part.first, part.count)
    lay(body, NULL, 0)
    lay_cells(body, rows, &rows.names, part.first_header, part.header_count, 0)
    lay_cells(body, rows, &rows.contents, part.first_header, part.header_count, part.content_nulls)


cdef bytearray kafka_part(KafkaRows* rows, KafkaPart* part, object template, uint32_t schema_id, int64_t producer_id, int16_t producer_epoch, int32_t base_sequence, uint32_t seed):
    """The rows of a part as a batch."""
    cdef bytes metadata = template[0]
    cdef Py_ssize_t row_count_at = template[1], nodes_at = template[2], buffers_at = template[3], body_length_at = template[4]
    cdef Py_ssize_t place = PyBytes_GET_SIZE(metadata), body_at = place + BATCH_HEAD_BYTES
    cdef int64_t count = part.count, headers = part.header_count, row
    cdef int64_t[34] places
    cdef int64_t[14] nodes
    cdef uint32_t declared = <uint32_t>(body_at - 8)
    cdef bytearray batch = new_message(body_at + part.body_length)
    cdef uint8_t* at = <uint8_t*>PyByteArray_AS_STRING(batch)
    cdef Body body
    cdef BatchHead head
    body.at, body.end, body.places = <char*>at + body_at, 0, places
    lay_part(&body, rows, part)
    nodes[:] = [count, 0, count, part.key_nulls, count, part.value_nulls, count, part.list_nulls, headers, 0, headers, 0, headers, part.content_nulls]
    memcpy(at, PyBytes_AS_STRING(metadata), place)
    memcpy(at + 4, &declared, 4)
    memcpy(at + row_count_at, &count, 8)
    memcpy(at + nodes_at, nodes, sizeof(nodes))
    memcpy(at + buffers_at, places, sizeof(places))
    memcpy(at + body_length_at, &part.body_length, 8)
    memset(&head, 0, BATCH_HEAD_BYTES)
    head.batch_length = <uint32_t>(body_at + part.body_length)
    head.last_offset_delta, head.record_count = <uint32_t>(count - 1), <uint32_t>count
    head.first_timestamp_us = head.max_timestamp_us = rows.stamps[part.first]
    for row in range(part.first + 1, part.first + count):
        head.max_timestamp_us = max(head.max_timestamp_us, rows.stamps[row])
    head.append_time_us = head.due_us = head.delay_position = head.min_tick = head.leader_epoch = -1
    head.producer_id, head.producer_epoch, head.base_sequence = producer_id, producer_epoch, base_sequence
    head.schema_id, head.header_length, head.version, head.magic = schema_id, BATCH_HEAD_BYTES, 1, BATCH_MAGIC
    if producer_id >= TRANSACTIONAL_PRODUCER_IDS:
        head.attributes, head.version = TRANSACTIONAL, 2
    head.body_crc = client_crc(at + body_at, part.body_length, client_crc(at, place, 0))
    head.header_crc = client_crc(<uint8_t*>&head + 4, BATCH_HEAD_BYTES - 4, seed)
    memcpy(at + place, &head, BATCH_HEAD_BYTES)
    return batch


def batches_from_kafka(
    records, int64_t count, int64_t base_ms, int64_t missing_us, uint32_t schema_id, int64_t producer_id, int16_t producer_epoch, int32_t base_sequence,
    uint32_t seed, int64_t bytes_max, bint requires_key,
):
    """See `reference_kafka.batches_from_kafka`."""
    global _template
    cdef Py_buffer view
    cdef KafkaRows rows
    cdef KafkaPart part
    cdef int64_t fault_row = 0, first, end, fixed
    cdef int fault
    cdef list made = [], parts
    if _template is None:
        from tailrace.kernel.small_batch import template

        _template = template()
    fixed = len(_template[0]) + BATCH_HEAD_BYTES
    if producer_id < 0:
        producer_id, producer_epoch, base_sequence = -1, -1, -1
    PyObject_GetBuffer(records, &view, PyBUF_SIMPLE)
    take_kafka_scratch(&rows)
    try:
        rows.records, rows.length, rows.count = <const uint8_t*>view.buf, view.len, count
        if count < 1 or count > rows.length // KAFKA_RECORD_MIN or rows.length > KAFKA_RECORDS_MAX:
            raise_fault(KAFKA_CUT_OFF, 0)
        find_row_scratch(&rows)
        fault = read_kafka_rows(&rows, base_ms, missing_us, requires_key, bytes_max >> 3, &fault_row)
        if fault:
            raise_fault(fault, fault_row)
        parts = [(0, count)]
        while parts:
            first, end = parts.pop()
            measure_part(&rows, &part, first, end)
            if fixed + part.body_length > bytes_max:
                if end - first == 1:
                    raise_fault(KAFKA_RECORD_TOO_LARGE, first)
                parts.append(((first + end) >> 1, end))
                parts.append((first, (first + end) >> 1))
                continue
            made.append(
                kafka_part(
                    &rows, &part, _template, schema_id, producer_id, producer_epoch,
                    base_sequence if producer_id < 0 else <int32_t>((base_sequence + first) & 0x7FFFFFFF), seed,
                )
            )
    finally:
        PyBuffer_Release(&view)
        release_kafka_scratch(&rows)
    return made


# ---- out -----------------------------------------------------------------------------------------


cdef struct KafkaColumn:
    const uint8_t* valid  # NULL: all are
    const int32_t* offsets
    const uint8_t* data
    int64_t data_length
    int64_t count


cdef inline bint has_bits(Py_buffer* view, int64_t count, int64_t nulls) noexcept nogil:
    return not nulls or view.len >= (count + 7) >> 3


cdef bint kafka_column(KafkaColumn* column, Py_buffer* views, int64_t count, int64_t nulls) noexcept nogil:
    """The column of three buffers. False: they are too short."""
    if not has_bits(views, count, nulls) or (count and views[1].len < 4 * (count + 1)):
        return False
    column.valid = <const uint8_t*>views[0].buf if nulls else NULL
    column.offsets, column.data, column.data_length = <const int32_t*>views[1].buf, <const uint8_t*>views[2].buf, views[2].len
    column.count = count
    return True


cdef inline bint is_set(const uint8_t* bits, int64_t row) noexcept nogil:
    return bits[row >> 3] >> (row & 7) & 1


cdef inline bint cell_of(KafkaColumn* column, int64_t row, const uint8_t** data, int64_t* length) noexcept nogil:
    """A cell's bytes, a length of -1 for a null. False: its offsets are wrong."""
    cdef int32_t[2] bounds
    memcpy(bounds, column.offsets + row, 8)
    if bounds[0] < 0 or bounds[1] < bounds[0] or bounds[1] > column.data_length:
        return False
    if column.valid != NULL and not is_set(column.valid, row):
        data[0], length[0] = NULL, -1
    else:
        data[0], length[0] = column.data + bounds[0], bounds[1] - bounds[0]
    return True


cdef inline int cell_size(int64_t length) noexcept nogil:
    """The bytes of a cell's length."""
    return kafka_size(kafka_zigzag(length))


cdef inline uint8_t* put_cell(uint8_t* at, KafkaColumn* column, const uint8_t* data, int64_t length) noexcept nogil:
    """Behind what is written there is room for 15 bytes."""
    at = kafka_put(at, kafka_zigzag(length))
    if length > 0:
        kafka_copy(at, data, length, column.data + column.data_length - data)
        at += length
    return at


cdef struct KafkaSource:
    # the columns of rows of the default schema, whose buffers are as long as they have to be
    const uint8_t* stamp_valid
    const int64_t* stamps
    KafkaColumn keys
    KafkaColumn values
    const uint8_t* list_valid
    const int32_t* lists
    int64_t header_count
    const uint8_t* struct_valid
    KafkaColumn names
    KafkaColumn contents
    const int64_t* numbers  # the offset of each row; NULL: they are consecutive


cdef inline bint header_of(
    KafkaColumn* names, KafkaColumn* contents, const uint8_t* struct_valid, int64_t header,
    const uint8_t** name, int64_t* name_length, const uint8_t** content, int64_t* content_length,
) noexcept nogil:
    """A header, whose name is empty if there is none. False: its offsets are wrong."""
    if not cell_of(names, header, name, name_length) or not cell_of(contents, header, content, content_length):
        return False
    if struct_valid != NULL and not is_set(struct_valid, header):
        name_length[0] = content_length[0] = -1
    name_length[0] = max(name_length[0], <int64_t>0)
    return True


cdef inline bint goes_on(KafkaColumn* column, int64_t first, int64_t end, int64_t* written_to) noexcept nogil:
    """True if the cells from `first` to `end`, at least one, begin behind those written before them:
    cells that were skipped have offsets that were not read.
    """
    cdef int32_t start, stop
    memcpy(&start, column.offsets + first, 4)
    memcpy(&stop, column.offsets + end, 4)
    if start < written_to[0]:
        return False
    written_to[0] = stop
    return True


cdef bytearray lay_kafka_records(KafkaSource* source, int64_t first, int64_t count, int64_t time_us, bint has_one_time, int64_t base_offset, Py_ssize_t room, int64_t* base_ms, int64_t* max_ms):
    """`room` zeros and the records. Raises RecordFault."""
    cdef const uint8_t* key = NULL
    cdef const uint8_t* value = NULL
    cdef const uint8_t* name = NULL
    cdef const uint8_t* content = NULL
    cdef int64_t key_length = 0, value_length = 0, name_length = 0, content_length = 0
    cdef int64_t row, header, start, end, body, delta, stamp, stamp_ms, size_max, headers, names_to = 0, contents_to = 0
    cdef int32_t[2] list_bounds
    cdef uint64_t time_bits, delta_bits
    cdef uint8_t* at
    cdef uint8_t* made
    cdef bytearray out
    # Cells of a column do not overlap: `cell_of` refuses offsets that descend within a row and from
    # row to row, `goes_on` those that descend behind skipped headers. So each byte is written once.
    size_max = (
        room + count * KAFKA_NUMBERS_MAX + source.keys.data_length + source.values.data_length + source.names.data_length
        + source.contents.data_length + 10 * source.header_count + 16
    )
    if size_max > 1 << 31:
        raise_fault(KAFKA_RECORD_TOO_LARGE, first)
    out = PyByteArray_FromStringAndSize(NULL, size_max)
    made = <uint8_t*>PyByteArray_AS_STRING(out)
    memset(made, 0, room)
    at = made + room
    for row in range(first, first + count):
        stamp = time_us
        if not has_one_time and (source.stamp_valid == NULL or is_set(source.stamp_valid, row)):
            memcpy(&stamp, source.stamps + row, 8)
        stamp_ms = kafka_ms(stamp)
        if row == first:
            base_ms[0] = max_ms[0] = stamp_ms
        elif stamp_ms > max_ms[0]:
            max_ms[0] = stamp_ms
        delta = row - first
        if source.numbers != NULL:
            memcpy(&delta, source.numbers + row, 8)
            if delta < base_offset or <uint64_t>delta - <uint64_t>base_offset >= SEQUENCES:
                raise_fault(KAFKA_COLUMNS, row)
            delta -= base_offset
        if not cell_of(&source.keys, row, &key, &key_length) or not cell_of(&source.values, row, &value, &value_length):
            raise_fault(KAFKA_COLUMNS, row)
        memcpy(list_bounds, source.lists + row, 8)
        start, end = list_bounds[0], list_bounds[1]
        if start < 0 or end < start or end > source.header_count:
            raise_fault(KAFKA_COLUMNS, row)
        if source.list_valid != NULL and not is_set(source.list_valid, row):
            end = start
        if end > start and not (
            goes_on(&source.names, start, end, &names_to) and goes_on(&source.contents, start, end, &contents_to)
        ):
            raise_fault(KAFKA_COLUMNS, start)
        time_bits, delta_bits, headers = kafka_zigzag(stamp_ms - base_ms[0]), kafka_zigzag(delta), end - start
        body = (
            1 + kafka_size(time_bits) + kafka_size(delta_bits) + cell_size(key_length) + max(key_length, <int64_t>0)
            + cell_size(value_length) + max(value_length, <int64_t>0) + cell_size(headers)
        )
        for header in range(start, end):
            if not header_of(&source.names, &source.contents, source.struct_valid, header, &name, &name_length, &content, &content_length):
                raise_fault(KAFKA_COLUMNS, header)
            body += cell_size(name_length) + name_length + cell_size(content_length) + max(content_length, <int64_t>0)
        at = kafka_put(at, kafka_zigzag(body))
        at[0] = 0
        at = kafka_put(kafka_put(at + 1, time_bits), delta_bits)
        at = put_cell(at, &source.keys, key, key_length)
        at = put_cell(at, &source.values, value, value_length)
        at = kafka_put(at, kafka_zigzag(headers))
        for header in range(start, end):
            if headers > 1:
                header_of(&source.names, &source.contents, source.struct_valid, header, &name, &name_length, &content, &content_length)
            at = put_cell(at, &source.names, name, name_length)
            at = put_cell(at, &source.contents, content, content_length)
        if at - made > KAFKA_RECORDS_MAX:
            raise_fault(KAFKA_RECORD_TOO_LARGE, row)
    PyByteArray_Resize(out, at - made)
    return out


cdef bint find_source(KafkaSource* source, Py_buffer* views, int64_t* node) noexcept nogil:
    """The columns of 17 buffers. False: one is too short, or the numbers contradict each other."""
    if (
        node[0] != node[2] or node[0] != node[4] or node[0] != node[6]
        or node[10] < node[8] or node[12] < node[8] or node[0] > KAFKA_RECORDS_MAX or node[10] > KAFKA_RECORDS_MAX or node[12] > KAFKA_RECORDS_MAX
        or views[1].len < 8 * node[0] or views[9].len < 4 * (node[0] + 1)
        or not has_bits(&views[0], node[0], node[1]) or not has_bits(&views[8], node[0], node[7]) or not has_bits(&views[10], node[8], node[9])
        or not kafka_column(&source.keys, &views[2], node[0], node[3]) or not kafka_column(&source.values, &views[5], node[0], node[5])
        or not kafka_column(&source.names, &views[11], node[10], node[11]) or not kafka_column(&source.contents, &views[14], node[12], node[13])
    ):
        return False
    source.stamp_valid = <const uint8_t*>views[0].buf if node[1] else NULL
    source.list_valid = <const uint8_t*>views[8].buf if node[7] else NULL
    source.struct_valid = <const uint8_t*>views[10].buf if node[9] else NULL
    source.stamps, source.lists = <const int64_t*>views[1].buf, <const int32_t*>views[9].buf
    source.header_count = node[8]
    return True


def records_to_kafka(
    buffers, nodes, int64_t first, int64_t count, int64_t time_us, bint has_one_time, offsets, int64_t base_offset, Py_ssize_t room,
):
    """See `reference_kafka.records_to_kafka`."""
    cdef Py_buffer[KAFKA_BUFFERS + 1] views
    cdef int taken = 0, index
    cdef int64_t[14] node
    cdef KafkaSource source
    cdef int64_t base_ms = 0, max_ms = 0
    cdef list pieces = list(buffers)
    cdef bint is_whole = len(pieces) == KAFKA_BUFFERS and len(nodes) == 14 and room >= 0
    if not is_whole:
        raise_fault(KAFKA_COLUMNS, 0)
    for index in range(14):
        node[index] = nodes[index]
        is_whole = is_whole and node[index] >= 0
    source.numbers = NULL
    try:
        for piece in pieces:
            PyObject_GetBuffer(piece, &views[taken], PyBUF_SIMPLE)
            taken += 1
        if offsets is not None:
            PyObject_GetBuffer(offsets, &views[taken], PyBUF_SIMPLE)
            taken += 1
            source.numbers = <const int64_t*>views[KAFKA_BUFFERS].buf
        if (
            not is_whole or first < 0 or count < 1 or count > node[0] - first or not find_source(&source, views, node)
            or (offsets is not None and views[KAFKA_BUFFERS].len < 8 * node[0])
        ):
            raise_fault(KAFKA_COLUMNS, 0)
        out = lay_kafka_records(&source, first, count, time_us, has_one_time, base_offset, room, &base_ms, &max_ms)
    finally:
        for index in range(taken):
            PyBuffer_Release(&views[index])
    return out, base_ms, max_ms


def plain_batch_to_kafka(batch not None, uint32_t seed, BatchShape shape not None, Py_ssize_t room):
    """See `reference_kafka.plain_batch_to_kafka`."""
    cdef Py_buffer view
    cdef Py_buffer[KAFKA_BUFFERS] views
    cdef int64_t[14] node
    cdef BatchHead head
    cdef KafkaSource source
    cdef const uint8_t* nodes
    cdef const uint8_t* buffers
    cdef const uint8_t* body
    cdef int64_t at, base_ms = 0, max_ms = 0
    cdef int index
    cdef bint is_appended
    if shape.node_count != PLAIN_NODES or shape.buffer_count != PLAIN_BUFFERS or room < 0:
        return None
    PyObject_GetBuffer(batch, &view, PyBUF_SIMPLE)
    try:
        at = plain_head(<const uint8_t*>view.buf, view.len, &head, seed, shape, UNPACKED_MAX, TRANSACTIONAL | LOG_APPEND_TIME)
        if not at or head.attributes & COMPRESSED or not has_right_body(<const uint8_t*>view.buf, view.len, at, &head):
            return None
        if not pairs_of(<const uint8_t*>view.buf, at + BATCH_HEAD_BYTES - 8, &nodes, &buffers):
            return None
        body = <const uint8_t*>view.buf + at + BATCH_HEAD_BYTES
        for index in range(14):
            node[index] = number_at(nodes, index)
        for index in range(KAFKA_BUFFERS):
            views[index].buf, views[index].len = <void*>(body + number_at(buffers, 2 * index)), number_at(buffers, 2 * index + 1)
        source.numbers = NULL
        if not find_source(&source, views, node):
            return None
        is_appended = head.attributes & LOG_APPEND_TIME != 0
        out = lay_kafka_records(
            &source, 0, head.record_count, head.append_time_us if is_appended else head.max_timestamp_us, is_appended, head.base_offset, room, &base_ms, &max_ms
        )
    finally:
        PyBuffer_Release(&view)
    return (
        out, base_ms, max_ms, head.base_offset, head.last_offset_delta, head.record_count, head.leader_epoch, head.producer_id, head.producer_epoch,
        head.base_sequence, head.attributes,
    )
