# Record tuples out of Arrow columns; every offset is looked at before it is followed.

# A column of bytes or text in memory of Arrow's, or the offsets of a column of lists.
cdef struct Cells:
    const uint8_t* valid  # NULL: all are
    const int32_t* offsets
    const char* data
    Py_ssize_t first  # the column's first cell is this one of the memory
    Py_ssize_t count
    int64_t end  # no offset may exceed this


cdef int find(Cells* cells, object array, bint is_list) except -1:
    """The memory of an Arrow array, which must outlive `cells`. Raises ValueError where it is too small."""
    cdef list buffers = array.buffers()
    cells.first, cells.count = array.offset, len(array)
    cells.valid, cells.offsets, cells.data, cells.end = NULL, NULL, NULL, 0
    if not cells.count:
        return 0
    if array.null_count:
        if buffers[0] is None or <int64_t>buffers[0].size * 8 < cells.first + cells.count:
            raise ValueError("a validity bitmap is too short")
        cells.valid = <const uint8_t*><size_t>buffers[0].address
    if buffers[1] is None or <int64_t>buffers[1].size < 4 * (cells.first + cells.count + 1):
        raise ValueError("offsets are too short")
    cells.offsets = <const int32_t*><size_t>buffers[1].address
    if is_list:
        cells.end = len(array.values)
    elif buffers[2] is not None:
        cells.data, cells.end = <const char*><size_t>buffers[2].address, buffers[2].size
    return 0


cdef inline int bounds(Cells* cells, Py_ssize_t row, int32_t* start, int32_t* end) except -1:
    """Where the cell of a row begins and ends. Returns whether it is valid. Raises ValueError for offsets that descend or exceed the data."""
    cdef Py_ssize_t at = cells.first + row
    if cells.valid != NULL and not (cells.valid[at >> 3] >> (at & 7)) & 1:
        return 0
    start[0], end[0] = cells.offsets[at], cells.offsets[at + 1]
    if not 0 <= start[0] <= end[0] <= cells.end:
        raise ValueError("offsets exceed the data")
    return 1


cdef inline object bytes_at(Cells* cells, Py_ssize_t row):
    cdef int32_t start, end
    if not bounds(cells, row, &start, &end):
        return None
    return PyBytes_FromStringAndSize(cells.data + start, end - start)


cdef object text_at(Cells* cells, Py_ssize_t row):
    cdef int32_t start, end
    if not bounds(cells, row, &start, &end):
        return None
    return PyUnicode_DecodeUTF8(cells.data + start, end - start, NULL)


cdef list headers_at(Cells* lists, Cells* names, Cells* contents, Py_ssize_t row):
    cdef int32_t start = 0, end = 0
    cdef Py_ssize_t header
    cdef list found = []
    if bounds(lists, row, &start, &end):
        for header in range(start, end):
            found.append((text_at(names, header), bytes_at(contents, header)))
    return found


cdef inline void give(object record, Py_ssize_t place, object part) noexcept:
    Py_INCREF(part)
    PyTuple_SET_ITEM(record, place, part)


def records(record_type, topic, partition, int64_t first_offset, timestamp_type, const int64_t[:] stamps_us, keys, values, headers):
    """Tuples of `record_type` of columns of the default schema: see `reference.records`."""
    if not issubclass(record_type, tuple):
        raise TypeError("a record is a tuple")
    cdef Py_ssize_t row, count = len(values)
    cdef int64_t stamp_us
    cdef Cells key_cells, value_cells, list_cells, name_cells, content_cells
    cdef bint has_headers = headers.null_count != count
    cdef list header_lists = None
    cdef object record, items = None, names = None, contents = None
    if len(keys) != count or len(headers) != count or stamps_us.shape[0] != count:
        raise ValueError("the columns have different lengths")
    find(&key_cells, keys, False)
    find(&value_cells, values, False)
    if has_headers:
        find(&list_cells, headers, True)
        items = headers.values
        if items.null_count:  # not of ours; let the same happen as in Python
            from tailrace.kernel.reference import header_lists as in_python

            header_lists = in_python(headers)
        else:
            names, contents = items.field(0), items.field(1)
            find(&name_cells, names, False)
            find(&content_cells, contents, False)
            if len(names) < list_cells.end or len(contents) < list_cells.end:
                raise ValueError("headers are too short")
    cdef list made = PyList_New(count)
    for row in range(count):
        stamp_us = stamps_us[row]
        record = ALLOC(<PyTypeObject*>record_type, 9)
        give(record, 0, topic)
        give(record, 1, partition)
        give(record, 2, first_offset + row)
        give(record, 3, stamp_us // 1000 - (stamp_us % 1000 < 0))  # cdivision cuts towards 0; this is the floor
        give(record, 4, timestamp_type)
        give(record, 5, bytes_at(&key_cells, row))
        give(record, 6, bytes_at(&value_cells, row))
        if not has_headers:
            give(record, 7, [])
        elif header_lists is not None:
            give(record, 7, header_lists[row])
        else:
            give(record, 7, headers_at(&list_cells, &name_cells, &content_cells, row))
        give(record, 8, stamp_us)
        Py_INCREF(record)
        PyList_SET_ITEM(made, row, record)
    return made
