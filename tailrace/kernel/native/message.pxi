# The records of a batch as columns, and the Arrow message of them: one copy.

# small_batch.template(): (metadata, row_count_at, nodes_at, buffers_at, body_length_at)
cdef object _template = None


cdef struct Body:
    char* at  # NULL: only measure
    Py_ssize_t end
    int64_t* places  # (offset, length) of each buffer


cdef void lay(Body* body, const char* data, Py_ssize_t length) noexcept:
    """One more buffer, padded to a multiple of 8; `data` is NULL for zeros."""
    cdef Py_ssize_t padded = (length + 7) & ~<Py_ssize_t>7
    if body.at != NULL:
        body.places[0] = body.end
        body.places[1] = length
        body.places += 2
        if data == NULL:
            memset(body.at + body.end, 0, padded)
        elif length:
            memcpy(body.at + body.end, data, length)
            memset(body.at + body.end + length, 0, padded - length)
    body.end += padded


cdef void lay_column(Body* body, Column* column) noexcept:
    lay(body, column.valid.at, column.valid.end)
    if column.count:
        lay(body, column.offsets.at, column.offsets.end)
    else:
        lay(body, NULL, 4)
    lay(body, column.data.at, column.data.end)


cdef class RecordBuffer:
    """The records of a batch, from its first to its encoding."""

    cdef Columns own
    cdef int64_t data_max

    def __cinit__(self, data_max=None):
        self.data_max = DATA_MAX if data_max is None else min(<int64_t>data_max, DATA_MAX)

    def __dealloc__(self):
        release_columns(&self.own)

    def __len__(self):
        return self.own.values.count

    cdef Py_ssize_t append(
        self, const char* key, Py_ssize_t key_length, const char* value, Py_ssize_t value_length, int64_t stamp_us, object headers
    ) except -1:
        """The row. `headers` are exact tuples (exact ASCII text or encoded bytes, bytes or None) in
        an exact list or tuple, or None.
        """
        cdef Py_ssize_t row = self.own.values.count
        if self.own.stamps.at == NULL:
            pop_spare_columns(&self.own)
        make_room(&self.own.stamps, 8)
        make_cell_room(&self.own.keys, 1, key_length, key == NULL, self.data_max)
        make_cell_room(&self.own.values, 1, value_length, value == NULL, self.data_max)
        if headers is not None:
            self.make_header_room(headers)
        elif self.own.lists.count:
            make_cell_room(&self.own.lists, 1, 0, True, self.data_max)
        memcpy(self.own.stamps.at + self.own.stamps.end, &stamp_us, 8)
        self.own.stamps.end += 8
        add_cell(&self.own.keys, key, key_length)
        add_cell(&self.own.values, value, value_length)
        if headers is not None:
            self.add_headers(headers)
        elif self.own.lists.count:
            self.end_list(False)
        return row

    cdef int make_header_room(self, object headers) except -1:
        cdef Py_ssize_t names = 0, contents = 0, count = 0
        cdef bint has_null = False
        for name, content in headers:
            names += PyUnicode_GET_LENGTH(name) if type(name) is str else PyBytes_GET_SIZE(name)
            if content is None:
                has_null = True
            else:
                contents += PyBytes_GET_SIZE(content)
            count += 1
        make_cell_room(&self.own.names, count, names, False, self.data_max)
        make_cell_room(&self.own.contents, count, contents, has_null, self.data_max)
        # The first record with headers: those before it have none.
        make_cell_room(&self.own.lists, self.own.values.count + 1 - self.own.lists.count, 0, True, self.data_max)
        return 0

    cdef void end_list(self, bint has_headers) noexcept:
        cdef Py_ssize_t row = self.own.lists.count
        mark(&self.own.lists, has_headers)
        if not row:
            put_i32(&self.own.lists.offsets, 0)
        put_i32(&self.own.lists.offsets, <int32_t>self.own.names.count)
        self.own.lists.count += 1

    cdef void add_headers(self, object headers) noexcept:
        while self.own.lists.count < self.own.values.count - 1:
            self.end_list(False)
        for name, content in headers:
            if type(name) is str:
                add_cell(&self.own.names, ASCII_OF(name), PyUnicode_GET_LENGTH(name))
            else:
                add_cell(&self.own.names, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
            if content is None:
                add_cell(&self.own.contents, NULL, 0)
            else:
                add_cell(&self.own.contents, PyBytes_AS_STRING(content), PyBytes_GET_SIZE(content))
        self.end_list(True)

    def add(self, key, value, int64_t stamp_us, headers=None):
        """Append a record; returns its row. `headers`: (text that is UTF-8, bytes or None)
        pairs.
        """
        return self.add_into(None, key, value, stamp_us, headers, 0)

    cdef Py_ssize_t add_into(self, OpenBatch batch, object key, object value, int64_t stamp_us, object headers, int64_t byte_count) except -2:
        """The same; with a batch, if that has room for `byte_count`, which are taken of it, else
        returns -1.
        """
        cdef const char* key_at = NULL
        cdef const char* value_at = NULL
        cdef Py_ssize_t key_length = 0, value_length = 0
        if key is not None:
            if not isinstance(key, bytes):
                raise TypeError(f"a key is bytes or None, not {type(key).__name__}")
            key_at, key_length = PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)
        if value is not None:
            if not isinstance(value, bytes):
                raise TypeError(f"a value is bytes or None, not {type(value).__name__}")
            value_at, value_length = PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value)
        cdef list pairs = None
        cdef Py_ssize_t row
        if headers:
            pairs = []
            for name, content in headers:
                if content is not None and not isinstance(content, bytes):
                    raise TypeError(f"what a header says is bytes or None, not {type(content).__name__}")
                pairs.append((str.encode(name), content))
        # From here on no other code runs.
        if batch is not None and batch.room < byte_count:
            return -1
        row = self.append(key_at, key_length, value_at, value_length, stamp_us, pairs)
        if batch is not None:
            batch.room -= byte_count
        return row

    def keys(self):
        """The key of each record."""
        return [cell(&self.own.keys, row) for row in range(self.own.keys.count)]

    def values(self):
        """The value of each record."""
        return [cell(&self.own.values, row) for row in range(self.own.values.count)]

    def stamps_us(self):
        """The timestamp of each record."""
        return memoryview(PyBytes_FromStringAndSize(self.own.stamps.at, self.own.stamps.end)).cast("q")

    def ends_without_key(self):
        """Whether there is a last record, and it has no key."""
        return self.own.keys.count > 0 and not is_valid(&self.own.keys, self.own.keys.count - 1)

    def picked(self, rows):
        """The records of some rows, in that order. Raises IndexError."""
        cdef RecordBuffer chosen = RecordBuffer(self.data_max)
        cdef Py_ssize_t row, header, count = self.own.values.count
        cdef Column* keys = &self.own.keys
        cdef Column* values = &self.own.values
        for given in rows:
            if not 0 <= given < count:
                raise IndexError(f"there are rows 0 to {count - 1}, not {given}")
            row = given
            pairs = None
            if self.own.lists.count > row and is_valid(&self.own.lists, row):
                pairs = [(cell(&self.own.names, header), cell(&self.own.contents, header)) for header in range(offset_at(&self.own.lists, row), offset_at(&self.own.lists, row + 1))]
            chosen.append(
                where(keys, row),
                offset_at(keys, row + 1) - offset_at(keys, row),
                where(values, row),
                offset_at(values, row + 1) - offset_at(values, row),
                (<int64_t*>self.own.stamps.at)[row],
                pairs,
            )
        return chosen

    def clear(self):
        """Forget all records."""
        release_columns(&self.own)

    def frame(self):
        """The records as a batch of the default schema."""
        import pyarrow
        from tailrace.format.schema import DEFAULT_SCHEMA

        return pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(pyarrow.py_buffer(self.message())), DEFAULT_SCHEMA)

    cdef void lay_all(self, Body* body) noexcept:
        cdef Py_ssize_t count = self.own.values.count
        lay(body, NULL, 0)
        lay(body, self.own.stamps.at, self.own.stamps.end)
        lay_column(body, &self.own.keys)
        lay_column(body, &self.own.values)
        if self.own.lists.count:
            lay(body, self.own.lists.valid.at, self.own.lists.valid.end)
            lay(body, self.own.lists.offsets.at, self.own.lists.offsets.end)
        else:
            lay(body, NULL, (count + 7) >> 3)
            lay(body, NULL, 4 * (count + 1))
        lay(body, NULL, 0)
        lay_column(body, &self.own.names)
        lay_column(body, &self.own.contents)

    def message(self, Py_ssize_t gap=0):
        """The records as an encapsulated Arrow message of the default schema whose metadata has
        `gap` more bytes of padding, zeros, a multiple of 8, than it needs. There is a record at
        least.
        """
        global _template
        if _template is None:
            from tailrace.kernel.small_batch import template

            _template = template()
        cdef bytes metadata = _template[0]
        cdef Py_ssize_t row_count_at = _template[1], nodes_at = _template[2], buffers_at = _template[3], body_length_at = _template[4]
        cdef Py_ssize_t metadata_size = PyBytes_GET_SIZE(metadata), body_at = metadata_size + gap
        cdef int64_t count = self.own.values.count, header_count = self.own.names.count
        cdef int64_t[34] places
        cdef int64_t[14] nodes
        cdef uint32_t declared = <uint32_t>(body_at - 8)
        cdef Body body
        body.at, body.end, body.places = NULL, 0, places
        self.lay_all(&body)
        cdef int64_t body_length = body.end
        cdef object message = PyByteArray_FromStringAndSize(NULL, body_at + body_length)
        cdef char* at = PyByteArray_AS_STRING(message)
        body.at, body.end = at + body_at, 0
        self.lay_all(&body)
        nodes[:] = [
            count, 0, count, self.own.keys.nulls, count, self.own.values.nulls, count, self.own.lists.nulls if self.own.lists.count else count, header_count, 0,
            header_count, 0, header_count, self.own.contents.nulls,
        ]
        memcpy(at, PyBytes_AS_STRING(metadata), metadata_size)
        memset(at + metadata_size, 0, gap)
        memcpy(at + 4, &declared, 4)
        memcpy(at + row_count_at, &count, 8)
        memcpy(at + nodes_at, nodes, sizeof(nodes))
        memcpy(at + buffers_at, places, sizeof(places))
        memcpy(at + body_length_at, &body_length, 8)
        return message
