# Batches of the default schema to Kafka's records: one pass writes into memory that is large enough
# in any case, and gives back what is left.

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
        at = plain_head(<const uint8_t*>view.buf, view.len, &head, seed, shape, UNPACKED_MAX, TRANSACTIONAL | LOG_APPEND_TIME | OF_LOG)
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
