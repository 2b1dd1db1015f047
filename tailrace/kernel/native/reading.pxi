# Record tuples out of Arrow columns; every offset is looked at before it is followed.

cdef extern from *:
    """
    #define RECORD_FIELDS 9
    /* A record that is still empty, and a list without anything, of which the collector does not know. */
    static inline PyObject *untracked_record(PyTypeObject *type) {
        PyTupleObject *made = PyObject_GC_NewVar(PyTupleObject, type, RECORD_FIELDS);
        if (made) memset(made->ob_item, 0, RECORD_FIELDS * sizeof(PyObject *));
        return (PyObject *)made;
    }
    static inline PyObject *untracked_list(void) {
        PyListObject *made = PyObject_GC_New(PyListObject, &PyList_Type);
        if (made) { Py_SET_SIZE(made, 0); made->ob_item = NULL; made->allocated = 0; }
        return (PyObject *)made;
    }
    static inline int is_plain_tuple(PyTypeObject *type) {
        return PyType_IsSubtype(type, &PyTuple_Type) && type->tp_basicsize ==
            PyTuple_Type.tp_basicsize && type->tp_itemsize == PyTuple_Type.tp_itemsize &&
            !type->tp_dictoffset && !type->tp_weaklistoffset;
    }
    """
    object untracked_record(PyTypeObject* type)
    object untracked_list()
    bint is_plain_tuple(PyTypeObject* type)
    int PyGC_Disable()
    int PyGC_Enable()


# A column of bytes or text in memory of Arrow's, or the offsets of a column of lists.
cdef struct Cells:
    const uint8_t* valid  # NULL: all are
    const int32_t* offsets
    const char* data
    Py_ssize_t first  # the column's first cell is this one of the memory
    Py_ssize_t count
    int64_t end  # no offset may exceed this


cdef int find(Cells* cells, object array, bint is_list) except -1:
    """The memory of an Arrow array, which must outlive `cells`. Raises ValueError where it is too
    small.
    """
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
    """Where the cell of a row begins and ends. Returns whether it is valid. Raises ValueError for
    offsets that descend or exceed the data.
    """
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
    if not bounds(lists, row, &start, &end) or start == end:
        return untracked_list()
    cdef list found = []
    for header in range(start, end):
        found.append((text_at(names, header), bytes_at(contents, header)))
    return found


cdef inline void give(object record, Py_ssize_t place, object part) noexcept:
    Py_INCREF(part)
    PyTuple_SET_ITEM(record, place, part)


cdef class RecordRows:
    """Rows that become records when they are asked for: see `reference.RecordRows`."""

    cdef object record_type, topic, partition, timestamp_type
    cdef tuple owners  # of the memory that the cells lie in
    cdef const int64_t[:] stamps_us
    cdef const int64_t[:] offsets  # if they are not consecutive
    cdef bint has_offsets
    cdef Cells keys, values, lists, names, contents
    cdef bint has_headers
    cdef list header_lists
    cdef int64_t first_offset
    cdef Py_ssize_t row, count

    def __init__(self, record_type, topic, partition, int64_t first_offset, timestamp_type, stamps_us, keys, values, headers, offsets=None):
        if not isinstance(record_type, type) or not is_plain_tuple(<PyTypeObject*>record_type):
            raise TypeError("a record is a tuple, without attributes of its own")
        cdef Py_ssize_t count = len(values)
        self.stamps_us = stamps_us
        if len(keys) != count or len(headers) != count or self.stamps_us.shape[0] != count:
            raise ValueError("the columns have different lengths")
        self.has_offsets = offsets is not None
        if self.has_offsets:
            self.offsets = offsets
            if self.offsets.shape[0] != count:
                raise ValueError("the columns have different lengths")
        find(&self.keys, keys, False)
        find(&self.values, values, False)
        self.has_headers = headers.null_count != count
        self.header_lists = None
        names = contents = None
        if self.has_headers:
            find(&self.lists, headers, True)
            items = headers.values
            if items.null_count:  # not of ours; let the same happen as in Python
                from tailrace.kernel.reference import header_lists as in_python

                self.header_lists = in_python(headers)
            else:
                names, contents = items.field(0), items.field(1)
                find(&self.names, names, False)
                find(&self.contents, contents, False)
                if len(names) < self.lists.end or len(contents) < self.lists.end:
                    raise ValueError("headers are too short")
        self.owners = (keys, values, headers, names, contents)
        self.record_type, self.topic, self.partition, self.timestamp_type = record_type, topic, partition, timestamp_type
        self.first_offset = first_offset
        self.row, self.count = 0, count

    def __len__(self):
        return self.count - self.row

    @property
    def next_offset(self):
        if not self.has_offsets or not self.count:
            return self.first_offset + self.row
        return self.offsets[self.row] if self.row < self.count else self.offsets[self.count - 1] + 1

    def take(self, list into not None, Py_ssize_t count):
        cdef Py_ssize_t end = self.row + max(0, min(count, self.count - self.row))
        cdef bint was_enabled = PyGC_Disable()
        try:
            while self.row < end:
                self.append(into, end)
        finally:
            if was_enabled:
                PyGC_Enable()

    cdef int append(self, list into, Py_ssize_t end) except -1:
        """Rows up to `end`. Nothing here is in a cycle, so the collector need not look at it, as it
        does not at tuples of bytes and numbers: looking took two thirds of the time of making them.
        (A record that its user puts into its own list of headers is never freed.)
        """
        cdef PyTypeObject* record_type = <PyTypeObject*>self.record_type
        cdef object topic = self.topic, partition = self.partition, timestamp_type = self.timestamp_type
        cdef object record, found, stamp = None, stamp_ms = None
        cdef int64_t stamp_us = 0, ms, last_ms = 0
        while self.row < end:
            # neighbours often have the same time: the same numbers serve
            if stamp is None or self.stamps_us[self.row] != stamp_us:
                stamp_us = self.stamps_us[self.row]
                stamp = stamp_us
                # cdivision cuts towards 0; this is the floor
                ms = stamp_us // 1000 - (stamp_us % 1000 < 0)
                if stamp_ms is None or ms != last_ms:
                    stamp_ms, last_ms = ms, ms
            record = untracked_record(record_type)
            give(record, 0, topic)
            give(record, 1, partition)
            if self.has_offsets:
                give(record, 2, self.offsets[self.row])
            else:
                give(record, 2, self.first_offset + self.row)
            give(record, 3, stamp_ms)
            give(record, 4, timestamp_type)
            give(record, 5, bytes_at(&self.keys, self.row))
            give(record, 6, bytes_at(&self.values, self.row))
            if not self.has_headers:
                found = untracked_list()
            elif self.header_lists is not None:
                found = self.header_lists[self.row]
            else:
                found = headers_at(&self.lists, &self.names, &self.contents, self.row)
            give(record, 7, found)
            give(record, 8, stamp)
            into.append(record)
            self.row += 1
        return 0


def records(*columns):
    """All of them at once."""
    cdef list made = []
    rows = RecordRows(*columns)
    rows.take(made, len(rows))
    return made
