# Records straight out of a fetched batch of the usual form: both checksums, the structure and every
# offset are looked at first, and Arrow's library is not asked.
#
# A batch that is not plainly good, or of a rarer form (compressed, with headers, without a time, of
# another writer than a client), is left alone: the way through Arrow decodes it or says what is
# wrong. So what is taken here is what `arrow_batch.decode` and `to_rows` make records of, the same
# ones.

cdef enum:
    # DEFAULT_SCHEMA: timestamp, key, value, headers, and of headers items, names, contents
    PLAIN_NODES = 7
    PLAIN_BUFFERS = 17
    ARROW_V5 = 4  # MetadataVersion
    # of a message with version, header and body length, and without metadata of its own
    MESSAGE_VTABLE_BYTES = 12


cdef bint pairs_of(const uint8_t* batch, int64_t metadata_size, const uint8_t** nodes, const uint8_t** buffers) noexcept nogil:
    """Where a batch's nodes and buffers are listed, whose structure is that of the default
    schema.
    """
    cdef Flat flat
    cdef int64_t root, version, place, table
    flat.at, flat.size = batch + 8, metadata_size - BATCH_HEAD_BYTES
    root = followed(&flat, 0)
    version = field_at(&flat, root, 0)
    # Arrow refuses other versions, and messages with a field that leads nowhere, although nothing
    # of them is read here.
    if u16_at(&flat, root - <int32_t><uint32_t>u32_at(&flat, root)) != MESSAGE_VTABLE_BYTES or version <= 0 or version & 1 or u16_at(&flat, version) != ARROW_V5:
        return False
    place = field_at(&flat, root, 2)
    if place <= 0:
        return False
    table = followed(&flat, place)
    nodes[0] = flat.at + pairs_at(&flat, table, 1, PLAIN_NODES)
    buffers[0] = flat.at + pairs_at(&flat, table, 2, PLAIN_BUFFERS)
    return nodes[0] >= flat.at and buffers[0] >= flat.at


cdef inline int64_t number_at(const uint8_t* pairs, int index) noexcept nogil:
    cdef int64_t number
    memcpy(&number, pairs + 8 * index, 8)
    return number


cdef bint cells_in(Cells* cells, const uint8_t* body, const uint8_t* nodes, const uint8_t* buffers, int node, int buffer, Py_ssize_t count) noexcept nogil:
    """A column of bytes, whose buffers are as long as they have to be. False: its offsets descend,
    or exceed its data, or it does not have the nulls it says.
    """
    cdef int64_t nulls = number_at(nodes, 2 * node + 1)
    cdef Py_ssize_t row
    cdef int64_t valid = 0
    cells.first, cells.count = 0, count
    cells.valid = body + number_at(buffers, 2 * buffer) if nulls else NULL
    cells.offsets = <const int32_t*>(body + number_at(buffers, 2 * buffer + 2))
    cells.data = <const char*>(body + number_at(buffers, 2 * buffer + 4))
    cells.end = number_at(buffers, 2 * buffer + 5)
    if cells.offsets[0] < 0 or cells.offsets[count] > cells.end:
        return False
    for row in range(count):
        if cells.offsets[row] > cells.offsets[row + 1]:
            return False
    if nulls:
        for row in range(count):
            valid += (cells.valid[row >> 3] >> (row & 7)) & 1
    return not nulls or count - valid == nulls


cdef inline bint begins_with_zero(const uint8_t* body, const uint8_t* buffers, int buffer) noexcept nogil:
    return number_at(buffers, 2 * buffer + 1) < 4 or (<const int32_t*>(body + number_at(buffers, 2 * buffer)))[0] == 0


cdef bint is_without_headers(const uint8_t* body, const uint8_t* nodes, const uint8_t* buffers, Py_ssize_t count) noexcept nogil:
    """Whether the column of headers is nulls and nothing else, as Arrow would have it."""
    cdef const uint8_t* valid = body + number_at(buffers, 16)
    cdef const int32_t* offsets = <const int32_t*>(body + number_at(buffers, 18))
    cdef Py_ssize_t at
    if number_at(nodes, 7) != count or number_at(nodes, 8) or number_at(nodes, 10) or number_at(nodes, 12):
        return False
    for at in range(count >> 3):
        if valid[at]:
            return False
    if count & 7 and valid[count >> 3] & ((1 << (count & 7)) - 1):
        return False
    for at in range(count + 1):
        if offsets[at]:
            return False
    # the offsets of no names, and of no contents
    return begins_with_zero(body, buffers, 12) and begins_with_zero(body, buffers, 15)


def fetched_rows(batch not None, uint32_t seed, BatchShape shape not None, record_type, topic, partition, int64_t position):
    """See `reference_codec.fetched_rows`."""
    cdef Py_buffer view
    cdef BatchHead head
    cdef int64_t at, count
    cdef const uint8_t* body
    cdef const uint8_t* nodes
    cdef const uint8_t* buffers
    cdef RecordRows rows = RecordRows.__new__(RecordRows)
    if shape.node_count != PLAIN_NODES or shape.buffer_count != PLAIN_BUFFERS:
        return None
    if not isinstance(record_type, type) or not is_plain_tuple(<PyTypeObject*>record_type):
        raise TypeError("a record is a tuple, without attributes of its own")
    PyObject_GetBuffer(batch, &view, PyBUF_SIMPLE)
    try:
        at = plain_head(<const uint8_t*>view.buf, view.len, &head, seed, shape, UNPACKED_MAX, TRANSACTIONAL | OF_LOG)
        if not at or not has_right_body(<const uint8_t*>view.buf, view.len, at, &head):
            return None
        if head.attributes & ~<uint32_t>TRANSACTIONAL or <size_t>view.buf & 7 or not pairs_of(<const uint8_t*>view.buf, at + BATCH_HEAD_BYTES - 8, &nodes, &buffers):
            return None
        count = head.record_count
        if count > ROWS_FREE or position >= head.base_offset + count or 0 <= position < head.base_offset:
            return None
        body = <const uint8_t*>view.buf + at + BATCH_HEAD_BYTES
        # of nodes[1]: a time is missing
        if number_at(nodes, 1) or not is_without_headers(body, nodes, buffers, count):
            return None
        if not cells_in(&rows.keys, body, nodes, buffers, 1, 2, count) or not cells_in(&rows.values, body, nodes, buffers, 2, 5, count):
            return None
        # The memory stays as long as `owners` holds a view of it: the caller's own may be released,
        # a bytearray resized.
        rows.stamps_us = PyMemoryView_FromMemory(<char*>body + number_at(buffers, 2), 8 * count, PyBUF_READ).cast("q")
    finally:
        PyBuffer_Release(&view)
    rows.owners = (PyMemoryView_FromObject(batch),)
    # CREATE_TIME
    rows.record_type, rows.topic, rows.partition, rows.timestamp_type = record_type, topic, partition, 0
    rows.has_headers, rows.header_lists, rows.has_offsets = False, None, False
    rows.first_offset, rows.count = head.base_offset, count
    rows.row = max(0, position - head.base_offset)
    return rows, head.base_offset + count, head.leader_epoch
