# Kafka's records to rows: one pass reads all records, and notes in scratch memory the time and the
# place of each cell and where it will end in its column. Then the size of any range of rows is a
# subtraction.
#
# Scratch memory is kept for the next call, at most KAFKA_KEPT_BYTES of it.

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


cdef int read_kafka_rows(KafkaRows* rows, int64_t base_ms, int64_t missing_us, bint requires_key, int64_t headers_max, int64_t* fault_row) except -1:
    """Read all records into the scratch memory. Returns a fault or 0."""
    cdef const uint8_t* records = rows.records
    cdef const uint8_t* at = records
    cdef const uint8_t* records_end = at + rows.length
    cdef const uint8_t* end
    cdef const uint8_t* name
    cdef int32_t number = 0
    cdef int64_t delta = 0, time_ms = 0, row, headers = 0, room = rows.count, i, latest_ms = TIMESTAMP_MAX_MS
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
        if __builtin_add_overflow(base_ms, delta, &time_ms) or not -latest_ms <= time_ms <= latest_ms:
            return KAFKA_TIMESTAMP
        fault = kafka_varint(&at, end, &number)
        if fault:
            return fault
        if number != row:
            return KAFKA_OFFSET_DELTA
        rows.stamps[row] = missing_us if time_ms == -1 else time_ms * 1000
        fault = kafka_cell(records, &at, end, rows.keys.ends, rows.keys.places, &rows.keys.nulls, row)
        if fault:
            return fault
        if requires_key and rows.keys.places[row] == KAFKA_NULL:
            return KAFKA_KEY_MISSING
        fault = kafka_cell(records, &at, end, rows.values.ends, rows.values.places, &rows.values.nulls, row)
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
                fault = kafka_cell(records, &at, end, rows.names.ends, rows.names.places, &rows.names.nulls, headers)
                if fault:
                    return fault
                if rows.names.places[headers] == KAFKA_NULL:
                    return KAFKA_HEADER_NAME_NULL
                name = rows.records + rows.names.places[headers]
                if not kafka_is_ascii(name, at - name) and not is_utf8(name, at - name):
                    return KAFKA_HEADER_NAME_NOT_UTF8
                fault = kafka_cell(records, &at, end, rows.contents.ends, rows.contents.places, &rows.contents.nulls, headers)
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
