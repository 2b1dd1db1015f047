# Cells of columns as Arrow holds them, picked by row into one column; and the hash of each (see
# reference_gather.py).
#
# Invariant: every row and every offset is looked at before memory is followed.

cdef const int64_t* rows_in(Py_buffer* view, Py_ssize_t count) except? NULL:
    """The rows that a buffer of int64 names. Raises ValueError for one that is out of the
    column.
    """
    cdef const int64_t* rows = <const int64_t*>view.buf
    cdef Py_ssize_t index
    if view.len & 7:
        raise ValueError("rows are int64")
    for index in range(view.len >> 3):
        if not 0 <= rows[index] < count:
            raise ValueError(f"there are rows 0 to {count - 1}, not {rows[index]}")
    return rows


def gathered(list columns not None, list rows not None):
    """See `reference_gather.gathered`."""
    cdef Py_ssize_t part, index, count = 0, done = 0, nulls = 0, length
    cdef int64_t end = 0
    cdef int32_t start, stop
    cdef Cells cells
    cdef Py_buffer view
    cdef const int64_t* chosen
    if PyList_GET_SIZE(columns) != PyList_GET_SIZE(rows):
        raise ValueError("rows are named for each column")
    for part in range(PyList_GET_SIZE(rows)):
        count += len(memoryview(rows[part]).cast("B")) >> 3
    cdef bytearray offsets = PyByteArray_FromStringAndSize(NULL, 4 * (count + 1))
    cdef bytearray valid = PyByteArray_FromStringAndSize(NULL, (count + 7) >> 3)
    cdef int32_t* ends = <int32_t*>PyByteArray_AS_STRING(offsets)
    cdef uint8_t* bits = <uint8_t*>PyByteArray_AS_STRING(valid)
    memset(bits, 0, (count + 7) >> 3)
    ends[0] = 0
    for part in range(PyList_GET_SIZE(rows)):
        find(&cells, columns[part], False)
        PyObject_GetBuffer(rows[part], &view, PyBUF_SIMPLE)
        try:
            if done + (view.len >> 3) > count:
                raise ValueError("rows that were fewer before")
            chosen = rows_in(&view, cells.count)
            for index in range(view.len >> 3):
                if bounds(&cells, chosen[index], &start, &stop):
                    end += stop - start
                    if end > DATA_MAX:
                        raise OverflowError(f"the cells have more than {DATA_MAX} bytes")
                    bits[done >> 3] |= <uint8_t>(1 << (done & 7))
                else:
                    nulls += 1
                done += 1
                ends[done] = <int32_t>end
        finally:
            PyBuffer_Release(&view)
    cdef object data = new_message(end)
    cdef char* at = PyByteArray_AS_STRING(data)
    cdef Py_ssize_t copied = 0
    for part in range(PyList_GET_SIZE(rows)):
        find(&cells, columns[part], False)
        PyObject_GetBuffer(rows[part], &view, PyBUF_SIMPLE)
        try:
            chosen = rows_in(&view, cells.count)
            for index in range(view.len >> 3):
                length = ends[copied + 1] - ends[copied]
                if bounds(&cells, chosen[index], &start, &stop):
                    if stop - start != length:
                        raise ValueError("cells that were others before")
                    if length:
                        memcpy(at + ends[copied], cells.data + start, length)
                copied += 1
        finally:
            PyBuffer_Release(&view)
    return offsets, data, valid if nulls else None, nulls


def murmur2_cells(column):
    """See `reference_gather.murmur2_cells`."""
    cdef Cells cells
    cdef int32_t start, stop
    cdef Py_ssize_t row
    find(&cells, column, False)
    cdef bytearray hashes = PyByteArray_FromStringAndSize(NULL, 4 * cells.count)
    cdef uint32_t* into = <uint32_t*>PyByteArray_AS_STRING(hashes)
    for row in range(cells.count):
        into[row] = _murmur2(<const uint8_t*>cells.data + start, stop - start) if bounds(&cells, row, &start, &stop) else 0
    return hashes
