# Rows of Kafka's records to batches of the default schema: each column is one loop of copies.

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
