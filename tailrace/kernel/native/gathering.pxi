# Cells of columns as Arrow holds them, picked by row into one column; and rows sorted by the
# partition of their key (see reference_gather.py).
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


cdef class GatheredCells:
    """See `reference_gather.GatheredCells`."""

    cdef list columns
    cdef list rows
    cdef readonly bytearray offsets
    cdef readonly object valid
    cdef readonly Py_ssize_t null_count
    cdef Py_ssize_t end

    def __init__(self, list columns not None, list rows not None):
        cdef Py_ssize_t part, index, count = 0, done = 0, chosen_count
        cdef int64_t end = 0
        cdef int32_t start, stop
        cdef Cells cells
        cdef Py_buffer view
        cdef const int64_t* chosen
        if PyList_GET_SIZE(columns) != PyList_GET_SIZE(rows):
            raise ValueError("rows are named for each column")
        self.columns, self.rows, self.null_count = list(columns), list(rows), 0
        for part in range(PyList_GET_SIZE(self.rows)):
            named = self.rows[part]
            count += len(self.columns[part]) if named is None else len(memoryview(named).cast("B")) >> 3
        self.offsets = PyByteArray_FromStringAndSize(NULL, 4 * (count + 1))
        cdef bytearray valid = PyByteArray_FromStringAndSize(NULL, (count + 7) >> 3)
        cdef int32_t* ends = <int32_t*>PyByteArray_AS_STRING(self.offsets)
        cdef uint8_t* bits = <uint8_t*>PyByteArray_AS_STRING(valid)
        memset(bits, 0, (count + 7) >> 3)
        ends[0] = 0
        for part in range(PyList_GET_SIZE(self.rows)):
            find(&cells, self.columns[part], False)
            chosen = open_rows(self.rows[part], &view, &cells, &chosen_count)
            try:
                if done + chosen_count > count:
                    raise ValueError("rows that were fewer before")
                for index in range(chosen_count):
                    if bounds(&cells, index if chosen == NULL else chosen[index], &start, &stop):
                        end += stop - start
                        if end > DATA_MAX:
                            raise OverflowError(f"the cells have more than {DATA_MAX} bytes")
                        bits[done >> 3] |= <uint8_t>(1 << (done & 7))
                    else:
                        self.null_count += 1
                    done += 1
                    ends[done] = <int32_t>end
            finally:
                if chosen != NULL:
                    PyBuffer_Release(&view)
        if done != count:
            raise ValueError("rows that were more before")
        self.end, self.valid = end, valid if self.null_count else None

    def __len__(self):
        return self.end

    cdef int fill(self, char* at) except -1:
        """Copy the bytes of all cells; there is room for `end`."""
        cdef Py_ssize_t part, index, copied = 0, length, count = (len(self.offsets) >> 2) - 1, chosen_count
        cdef const int32_t* ends = <const int32_t*>PyByteArray_AS_STRING(self.offsets)
        cdef int32_t start, stop
        cdef Cells cells
        cdef Py_buffer view
        cdef const int64_t* chosen
        for part in range(PyList_GET_SIZE(self.rows)):
            find(&cells, self.columns[part], False)
            chosen = open_rows(self.rows[part], &view, &cells, &chosen_count)
            try:
                if copied + chosen_count > count:
                    raise ValueError("rows that were fewer before")
                for index in range(chosen_count):
                    length = ends[copied + 1] - ends[copied]
                    if bounds(&cells, index if chosen == NULL else chosen[index], &start, &stop):
                        if stop - start != length:
                            raise ValueError("cells that were others before")
                        if length:
                            memcpy(at + ends[copied], cells.data + start, length)
                    copied += 1
            finally:
                if chosen != NULL:
                    PyBuffer_Release(&view)
        return 0

    def data(self):
        """See `reference_gather.GatheredCells.data`."""
        made = new_message(self.end)
        self.fill(PyByteArray_AS_STRING(made))
        return made


cdef const int64_t* open_rows(object named, Py_buffer* view, Cells* cells, Py_ssize_t* count) except? NULL:
    """The named rows of a column, whose buffer is open then; NULL for None: all of its rows."""
    cdef const int64_t* rows
    if named is None:
        count[0] = cells.count
        return NULL
    PyObject_GetBuffer(named, view, PyBUF_SIMPLE)
    try:
        rows = rows_in(view, cells.count)
    except:
        PyBuffer_Release(view)
        raise
    count[0] = view.len >> 3
    return rows


def rows_by_partition(column, Py_ssize_t partition_count):
    """See `reference_gather.rows_by_partition`."""
    cdef Cells cells
    cdef int32_t start, stop
    cdef Py_ssize_t row, index, total = 0
    if not 0 < partition_count < 1 << 20:
        raise ValueError(f"{partition_count} partitions")
    find(&cells, column, False)
    cdef bytearray numbers = PyByteArray_FromStringAndSize(NULL, 4 * cells.count)
    cdef bytearray places = PyByteArray_FromStringAndSize(NULL, 8 * (partition_count + 1))
    cdef bytearray rows = PyByteArray_FromStringAndSize(NULL, 8 * cells.count)
    cdef uint32_t* number_of = <uint32_t*>PyByteArray_AS_STRING(numbers)
    cdef int64_t* place = <int64_t*>PyByteArray_AS_STRING(places)
    cdef int64_t* into = <int64_t*>PyByteArray_AS_STRING(rows)
    memset(place, 0, 8 * (partition_count + 1))
    for row in range(cells.count):
        if bounds(&cells, row, &start, &stop):
            number_of[row] = (_murmur2(<const uint8_t*>cells.data + start, stop - start) & 0x7FFFFFFF) % <uint32_t>partition_count
        else:
            number_of[row] = <uint32_t>partition_count
        place[number_of[row]] += 1
    cdef list counts = [place[index] for index in range(partition_count + 1)]
    for index in range(partition_count + 1):  # from counts to the place of each one's first row
        total += place[index]
        place[index] = total - place[index]
    for row in range(cells.count):
        into[place[number_of[row]]] = row
        place[number_of[row]] += 1
    return rows, counts
