# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True, binding=True
"""The kernel, compiled: what `reference.py` does, byte for byte. Its docstrings say what each thing is for; here is said how.

Columns are filled as Arrow lays them out: offsets of 32 bits, bytes, a validity bitmap from the first null on. A batch's message is then one copy.

Threads: every function here runs under the interpreter's lock from its first read of a caller's bytes to its last, and calls no Python code between: nothing
changes meanwhile. `send` takes the producer's lock, which may let other threads run, before it reads anything that can change.
Invariants: room for all of a record is made before any of it is written, so a call that raises has taken nothing; no offset exceeds `data_max`.
"""

import functools

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE, PyList_New, PyList_SET_ITEM
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE, PyTuple_SET_ITEM
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec


cdef extern from *:
    """
    #ifndef TAILRACE_KERNEL_STAMP
    #define TAILRACE_KERNEL_STAMP "no stamp: compiled by hand"
    #endif
    #define IS_ASCII(text) PyUnicode_IS_COMPACT_ASCII(text)
    #define ASCII_OF(text) ((const char *)PyUnicode_1BYTE_DATA(text))
    #define ALLOC(type, count) ((type)->tp_alloc((type), (count)))
    """
    const char* TAILRACE_KERNEL_STAMP
    int IS_ASCII(object text)
    const char* ASCII_OF(object text)
    object ALLOC(PyTypeObject* type, Py_ssize_t count)
    PyObject* PyDict_GetItemWithError(object mapping, object key) except? NULL
    Py_ssize_t PyUnicode_GET_LENGTH(object text)
    object PyUnicode_DecodeUTF8(const char* data, Py_ssize_t length, const char* errors)


STAMP = TAILRACE_KERNEL_STAMP.decode()
"""What this was compiled from: see `tailrace.kernel.stamp`."""

cdef enum:
    OVERHEAD = 24  # RECORD_OVERHEAD_BYTES
    HEADER_OVERHEAD = 16  # record_checks.HEADER_OVERHEAD_BYTES
    KNOWN_KEYS = 100_000  # KNOWN_KEYS_MAX

cdef int64_t TIMESTAMP_MAX_MS = 9223372036854775  # records.TIMESTAMP_MAX_MS
cdef int64_t DATA_MAX = 2147483647
cdef const char* NOTHING = ""

# ---- hashing ------------------------------------------------------------------------------------------------------------------------------


cdef uint32_t _murmur2(const uint8_t* data, Py_ssize_t length) noexcept nogil:
    cdef uint32_t m = 0x5BD1E995
    cdef uint32_t h = 0x9747B28CU ^ <uint32_t>length
    cdef uint32_t k
    cdef Py_ssize_t whole = length & ~<Py_ssize_t>3
    cdef Py_ssize_t i
    for i in range(0, whole, 4):
        memcpy(&k, data + i, 4)
        k *= m
        k ^= k >> 24
        h *= m
        h ^= k * m
    cdef Py_ssize_t rest = length & 3
    if rest:
        if rest == 3:
            h ^= <uint32_t>data[whole + 2] << 16
        if rest >= 2:
            h ^= <uint32_t>data[whole + 1] << 8
        h ^= data[whole]
        h *= m
    h ^= h >> 13
    h *= m
    return h ^ (h >> 15)


def murmur2(bytes data not None):
    """Kafka's murmur2 of `data`, as an unsigned 32-bit number."""
    return _murmur2(<const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))


# ---- memory -------------------------------------------------------------------------------------------------------------------------------


cdef struct Buffer:
    char* at
    Py_ssize_t end
    Py_ssize_t size


cdef int make_room(Buffer* buffer, Py_ssize_t more) except -1:
    """So many bytes can be written behind the end."""
    cdef Py_ssize_t wanted = buffer.end + more
    cdef Py_ssize_t size
    cdef void* moved
    if wanted <= buffer.size:
        return 0
    size = buffer.size + (buffer.size >> 1) if buffer.size > 1 << 20 else 2 * buffer.size
    size = max(size, wanted, 256)
    moved = realloc(buffer.at, size)
    if moved == NULL:
        raise MemoryError
    buffer.at = <char*>moved
    buffer.size = size
    return 0


cdef void let_go(Buffer* buffer) noexcept:
    free(buffer.at)
    buffer.at = NULL
    buffer.end = buffer.size = 0


cdef inline void put_i32(Buffer* buffer, int32_t number) noexcept:
    memcpy(buffer.at + buffer.end, &number, 4)
    buffer.end += 4


cdef struct Column:
    Buffer offsets  # one more than there are cells, once there is a cell
    Buffer data
    Buffer valid  # empty until there is a null
    Py_ssize_t count
    Py_ssize_t nulls


cdef int make_cell_room(Column* column, Py_ssize_t cells, Py_ssize_t data, bint may_be_null, int64_t data_max) except -1:
    """So many cells with so many bytes in all can be added."""
    if column.data.end + data > data_max:
        raise OverflowError(f"the keys, or the values, of a batch have more than {data_max} bytes")
    make_room(&column.offsets, 4 * (cells + 1))
    make_room(&column.data, data)
    if may_be_null or column.nulls:
        make_room(&column.valid, ((column.count + cells + 7) >> 3) - column.valid.end)
    return 0


cdef inline void mark(Column* column, bint is_valid) noexcept:
    """Whether the next cell is valid, from the first null on. There is room."""
    cdef Py_ssize_t row = column.count
    if not column.nulls:
        if is_valid:
            return
        column.valid.end = (row + 7) >> 3
        memset(column.valid.at, 255, column.valid.end)
        if row & 7:
            (<uint8_t*>column.valid.at)[row >> 3] = <uint8_t>((1 << (row & 7)) - 1)
    if not row & 7:
        column.valid.at[column.valid.end] = 0
        column.valid.end += 1
    if is_valid:
        (<uint8_t*>column.valid.at)[row >> 3] |= <uint8_t>(1 << (row & 7))
    else:
        column.nulls += 1


cdef inline void add_cell(Column* column, const char* data, Py_ssize_t length) noexcept:
    """`data` is NULL for a null. There is room."""
    mark(column, data != NULL)
    if not column.count:
        put_i32(&column.offsets, 0)
    if length:
        memcpy(column.data.at + column.data.end, data, length)
        column.data.end += length
    put_i32(&column.offsets, <int32_t>column.data.end)
    column.count += 1


cdef inline bint is_valid(Column* column, Py_ssize_t row) noexcept:
    return not column.nulls or ((<uint8_t*>column.valid.at)[row >> 3] >> (row & 7)) & 1


cdef inline int32_t offset_at(Column* column, Py_ssize_t row) noexcept:
    return (<int32_t*>column.offsets.at)[row]


cdef inline const char* where(Column* column, Py_ssize_t row) noexcept:
    """The bytes of a cell; NULL: it is null."""
    if not is_valid(column, row):
        return NULL
    if column.data.at == NULL:  # all cells are empty
        return NOTHING
    return column.data.at + offset_at(column, row)


cdef object cell(Column* column, Py_ssize_t row):
    if not is_valid(column, row):
        return None
    return PyBytes_FromStringAndSize(column.data.at + offset_at(column, row), offset_at(column, row + 1) - offset_at(column, row))


cdef void let_column_go(Column* column) noexcept:
    let_go(&column.offsets)
    let_go(&column.data)
    let_go(&column.valid)
    column.count = column.nulls = 0


# ---- the message --------------------------------------------------------------------------------------------------------------------------


cdef object _template = None  # few_rows.template(): (metadata, row_count_at, nodes_at, buffers_at, body_length_at)


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

    cdef Buffer stamps
    cdef Column keys_
    cdef Column values_
    # headers: a list for each record, null where it has none; empty until a record has some
    cdef Column lists  # its `offsets` count headers, its `data` is not used
    cdef Column names
    cdef Column contents
    cdef int64_t data_max

    def __cinit__(self, data_max=None):
        self.data_max = DATA_MAX if data_max is None else min(<int64_t>data_max, DATA_MAX)

    def __dealloc__(self):
        self.let_all_go()

    cdef void let_all_go(self) noexcept:
        let_go(&self.stamps)
        let_column_go(&self.keys_)
        let_column_go(&self.values_)
        let_column_go(&self.lists)
        let_column_go(&self.names)
        let_column_go(&self.contents)

    def __len__(self):
        return self.values_.count

    cdef Py_ssize_t append(
        self, const char* key, Py_ssize_t key_length, const char* value, Py_ssize_t value_length, int64_t stamp_us, object headers
    ) except -1:
        """The row. `headers` are exact tuples (exact ASCII text or encoded bytes, bytes or None) in an exact list or tuple, or None."""
        cdef Py_ssize_t row = self.values_.count
        make_room(&self.stamps, 8)
        make_cell_room(&self.keys_, 1, key_length, key == NULL, self.data_max)
        make_cell_room(&self.values_, 1, value_length, value == NULL, self.data_max)
        if headers is not None:
            self.make_header_room(headers)
        elif self.lists.count:
            make_cell_room(&self.lists, 1, 0, True, self.data_max)
        memcpy(self.stamps.at + self.stamps.end, &stamp_us, 8)
        self.stamps.end += 8
        add_cell(&self.keys_, key, key_length)
        add_cell(&self.values_, value, value_length)
        if headers is not None:
            self.add_headers(headers)
        elif self.lists.count:
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
        make_cell_room(&self.names, count, names, False, self.data_max)
        make_cell_room(&self.contents, count, contents, has_null, self.data_max)
        # The first record with headers: those before it have none.
        make_cell_room(&self.lists, self.values_.count + 1 - self.lists.count, 0, True, self.data_max)
        return 0

    cdef void end_list(self, bint has_headers) noexcept:
        cdef Py_ssize_t row = self.lists.count
        mark(&self.lists, has_headers)
        if not row:
            put_i32(&self.lists.offsets, 0)
        put_i32(&self.lists.offsets, <int32_t>self.names.count)
        self.lists.count += 1

    cdef void add_headers(self, object headers) noexcept:
        while self.lists.count < self.values_.count - 1:
            self.end_list(False)
        for name, content in headers:
            if type(name) is str:
                add_cell(&self.names, ASCII_OF(name), PyUnicode_GET_LENGTH(name))
            else:
                add_cell(&self.names, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
            if content is None:
                add_cell(&self.contents, NULL, 0)
            else:
                add_cell(&self.contents, PyBytes_AS_STRING(content), PyBytes_GET_SIZE(content))
        self.end_list(True)

    def add(self, key, value, int64_t stamp_us, headers=None):
        """Append a record; returns its row. `headers`: (text that is UTF-8, bytes or None) pairs."""
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
        if not headers:
            return self.append(key_at, key_length, value_at, value_length, stamp_us, None)
        pairs = []
        for name, content in headers:
            if content is not None and not isinstance(content, bytes):
                raise TypeError(f"what a header says is bytes or None, not {type(content).__name__}")
            pairs.append((str.encode(name), content))
        return self.append(key_at, key_length, value_at, value_length, stamp_us, pairs)

    def keys(self):
        """The key of each record."""
        return [cell(&self.keys_, row) for row in range(self.keys_.count)]

    def values(self):
        """The value of each record."""
        return [cell(&self.values_, row) for row in range(self.values_.count)]

    def stamps_us(self):
        """The timestamp of each record."""
        return memoryview(PyBytes_FromStringAndSize(self.stamps.at, self.stamps.end)).cast("q")

    def ends_without_key(self):
        """Whether there is a last record, and it has no key."""
        return self.keys_.count > 0 and not is_valid(&self.keys_, self.keys_.count - 1)

    def picked(self, rows):
        """The records of some rows, in that order. Raises IndexError."""
        cdef RecordBuffer chosen = RecordBuffer(self.data_max)
        cdef Py_ssize_t row, header, count = self.values_.count
        cdef Column* keys = &self.keys_
        cdef Column* values = &self.values_
        for given in rows:
            if not 0 <= given < count:
                raise IndexError(f"there are rows 0 to {count - 1}, not {given}")
            row = given
            pairs = None
            if self.lists.count > row and is_valid(&self.lists, row):
                pairs = [(cell(&self.names, header), cell(&self.contents, header)) for header in range(offset_at(&self.lists, row), offset_at(&self.lists, row + 1))]
            chosen.append(
                where(keys, row),
                offset_at(keys, row + 1) - offset_at(keys, row),
                where(values, row),
                offset_at(values, row + 1) - offset_at(values, row),
                (<int64_t*>self.stamps.at)[row],
                pairs,
            )
        return chosen

    def clear(self):
        """Forget all records."""
        self.let_all_go()

    def frame(self):
        """The records as a batch of the default schema."""
        import pyarrow
        from tailrace.schema import DEFAULT_SCHEMA

        return pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(pyarrow.py_buffer(self.message())), DEFAULT_SCHEMA)

    cdef void lay_all(self, Body* body) noexcept:
        cdef Py_ssize_t count = self.values_.count
        lay(body, NULL, 0)
        lay(body, self.stamps.at, self.stamps.end)
        lay_column(body, &self.keys_)
        lay_column(body, &self.values_)
        if self.lists.count:
            lay(body, self.lists.valid.at, self.lists.valid.end)
            lay(body, self.lists.offsets.at, self.lists.offsets.end)
        else:
            lay(body, NULL, (count + 7) >> 3)
            lay(body, NULL, 4 * (count + 1))
        lay(body, NULL, 0)
        lay_column(body, &self.names)
        lay_column(body, &self.contents)

    def message(self, Py_ssize_t gap=0):
        """The records as an encapsulated Arrow message of the default schema whose metadata has `gap` more bytes of padding, zeros, a multiple of 8, than it
        needs. There is a record at least.
        """
        global _template
        if _template is None:
            from tailrace.few_rows import template

            _template = template()
        cdef bytes metadata = _template[0]
        cdef Py_ssize_t row_count_at = _template[1], nodes_at = _template[2], buffers_at = _template[3], body_length_at = _template[4]
        cdef Py_ssize_t metadata_size = PyBytes_GET_SIZE(metadata), body_at = metadata_size + gap
        cdef int64_t count = self.values_.count, header_count = self.names.count
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
            count, 0, count, self.keys_.nulls, count, self.values_.nulls, count, self.lists.nulls if self.lists.count else count, header_count, 0,
            header_count, 0, header_count, self.contents.nulls,
        ]
        memcpy(at, PyBytes_AS_STRING(metadata), metadata_size)
        memset(at + metadata_size, 0, gap)
        memcpy(at + 4, &declared, 4)
        memcpy(at + row_count_at, &count, 8)
        memcpy(at + nodes_at, nodes, sizeof(nodes))
        memcpy(at + buffers_at, places, sizeof(places))
        memcpy(at + body_length_at, &body_length, 8)
        return message


# ---- reading ------------------------------------------------------------------------------------------------------------------------------


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


# ---- sending ------------------------------------------------------------------------------------------------------------------------------


cdef class FillingBatch:
    """Of a batch of a producer: what `quick_send` adds to."""

    cdef public object rows
    cdef public int64_t room

    def __init__(self):
        self.rows = RecordBuffer()
        self.room = 0


cdef class FillingQueue:
    """Of a partition's queue: which batch takes records."""

    cdef public FillingBatch open


cdef class Choices:
    """Where the records of a topic go: what is known without asking a partitioner again."""

    cdef list queues
    cdef Py_ssize_t partition_count
    cdef bint takes_partitions
    cdef bint by_murmur2
    cdef dict by_key
    cdef FillingQueue keyless

    def __init__(self, queues, *, bint takes_partitions, bint by_murmur2):
        self.queues = list(queues)
        self.partition_count = len(self.queues)
        self.takes_partitions = takes_partitions
        self.by_murmur2 = by_murmur2
        self.by_key = {}
        for queue in self.queues:
            if not isinstance(queue, FillingQueue):
                raise TypeError(f"a queue is a FillingQueue, not {type(queue).__name__}")

    def remember(self, key, FillingQueue queue not None):
        """What the partitioner has chosen."""
        if key is None:
            self.keyless = queue
        elif not self.by_murmur2:
            if len(self.by_key) >= KNOWN_KEYS:
                self.by_key.clear()
            self.by_key[key] = queue

    def forget_keyless(self):
        """The batch of records without a key is closed."""
        self.keyless = None

    cdef FillingQueue of_bytes(self, bytes key):
        """None: ask the partitioner."""
        cdef PyObject* found
        if self.by_murmur2:
            return <FillingQueue>PyList_GET_ITEM(
                self.queues,
                (_murmur2(<const uint8_t*>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)) & 0x7FFFFFFF) % <uint32_t>self.partition_count,
            )
        found = PyDict_GetItemWithError(self.by_key, key)
        return None if found == NULL else <FillingQueue>found

    def queue_of(self, key):
        """Where records of a key that was seen before go; None: ask the partitioner."""
        if key is None:
            return self.keyless
        return self.of_bytes(<bytes>key) if type(key) is bytes else None


cdef class QuickSender:
    """Of a producer: what its `send` needs for a record that needs no thought."""

    cdef dict choices
    cdef object acquire
    cdef object release

    def _begin_quick_sends(self, dict choices not None, lock):
        """`choices`: topic -> what is known of it, kept by the producer. `lock`: the producer's."""
        self.choices = choices
        self.acquire, self.release = lock.acquire, lock.release


cdef inline Py_ssize_t plain_headers_size(object headers) except -2:
    """The bytes that headers take, by the rule of `record_checks.checked_headers`; -1: they need thought."""
    cdef Py_ssize_t i, count, size = 0
    cdef object item, name, content
    cdef bint is_list = type(headers) is list
    if not is_list and type(headers) is not tuple:
        return -1
    count = PyList_GET_SIZE(headers) if is_list else PyTuple_GET_SIZE(headers)
    for i in range(count):
        item = <object>PyList_GET_ITEM(headers, i) if is_list else <object>PyTuple_GET_ITEM(headers, i)
        if type(item) is not tuple or PyTuple_GET_SIZE(item) != 2:
            return -1
        name = <object>PyTuple_GET_ITEM(item, 0)
        content = <object>PyTuple_GET_ITEM(item, 1)
        if type(name) is not str or not IS_ASCII(name):
            return -1
        size += PyUnicode_GET_LENGTH(name) + HEADER_OVERHEAD
        if type(content) is bytes:
            size += PyBytes_GET_SIZE(content)
        elif content is not None:
            return -1
    return size


cdef inline bint is_plain(object part) noexcept:
    """Whether a key or value can be read without thought."""
    return part is None or type(part) is bytes or (type(part) is str and IS_ASCII(part)) or type(part) is bytearray


cdef inline const char* read(object part, Py_ssize_t* length) noexcept:
    """Where the bytes of a plain key or value are; NULL: it is None."""
    if type(part) is bytes:
        length[0] = PyBytes_GET_SIZE(part)
        return PyBytes_AS_STRING(part)
    if part is None:
        length[0] = 0
        return NULL
    if type(part) is str:
        length[0] = PyUnicode_GET_LENGTH(part)
        return ASCII_OF(part)
    length[0] = PyByteArray_GET_SIZE(part)
    return PyByteArray_AS_STRING(part)


cdef inline int64_t now_us() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_REALTIME, &now)
    return <int64_t>now.tv_sec * 1000000 + now.tv_nsec // 1000


cdef object take(QuickSender sender, FillingQueue queue, object value, object key, object headers, int64_t stamp_us, bint is_stamped, handle_type):
    """The handle of the record, or None: it needs thought. With the lock held."""
    # First what can fail, or run the collector and so any code.
    cdef object handle = ALLOC(<PyTypeObject*>handle_type, 2)
    cdef FillingBatch batch = queue.open
    cdef RecordBuffer rows
    cdef Py_ssize_t key_length, value_length, header_size
    cdef const char* key_at
    cdef const char* value_at
    cdef int64_t room
    cdef object row
    if batch is None or type(batch.rows) is not RecordBuffer:
        return None
    rows = <RecordBuffer>batch.rows
    key_at = read(key, &key_length)
    value_at = read(value, &value_length)
    room = batch.room - value_length - key_length - OVERHEAD
    if headers is not None:
        header_size = plain_headers_size(headers)
        if header_size < 0:
            return None
        if header_size == 0:
            headers = None
        room -= header_size
    if room <= 0:
        return None
    row = rows.values_.count
    rows.append(key_at, key_length, value_at, value_length, stamp_us if is_stamped else now_us(), headers)
    batch.room = room
    Py_INCREF(batch)
    PyTuple_SET_ITEM(handle, 0, batch)
    Py_INCREF(row)
    PyTuple_SET_ITEM(handle, 1, row)
    return handle


def quick_send(handle_type):
    """For `Producer.send`, of a QuickSender: see `reference.quick_send`."""
    if not issubclass(handle_type, tuple):
        raise TypeError("a handle is a tuple")

    def decorate(slow):
        @functools.wraps(slow)
        def send(
            QuickSender self not None, topic, value=None, key=None, headers=None, partition=None, timestamp=None, *,
            on_delivery=None, deliver_at=None, deliver_after=None, repeat=None,
        ):
            cdef PyObject* found
            cdef Choices choices
            cdef FillingQueue queue = None
            cdef int64_t stamp_us = 0
            cdef Py_ssize_t number
            if (
                on_delivery is None and deliver_at is None and deliver_after is None and repeat is None and is_plain(value) and is_plain(key)
                and type(key) is not bytearray and (timestamp is None or type(timestamp) is int) and (partition is None or type(partition) is int)
                and self.choices is not None
            ):
                try:
                    found = PyDict_GetItemWithError(self.choices, topic)
                except TypeError:  # no topic can have such a name: the long way says so
                    found = NULL
                if found != NULL:
                    choices = <Choices>found
                    if partition is not None:
                        if choices.takes_partitions and 0 <= partition < choices.partition_count:
                            number = partition
                            queue = <FillingQueue>PyList_GET_ITEM(choices.queues, number)
                    elif key is None:
                        queue = choices.keyless
                    elif type(key) is bytes:
                        queue = choices.of_bytes(<bytes>key)
                    else:
                        queue = choices.of_bytes(PyBytes_FromStringAndSize(ASCII_OF(key), PyUnicode_GET_LENGTH(key)))
                    if queue is not None and timestamp is not None:
                        if -TIMESTAMP_MAX_MS <= timestamp <= TIMESTAMP_MAX_MS:
                            stamp_us = timestamp
                            stamp_us *= 1000
                        else:
                            queue = None
                    if queue is not None:
                        self.acquire()
                        try:
                            handle = take(self, queue, value, key, headers, stamp_us, timestamp is not None, handle_type)
                        finally:
                            self.release()
                        if handle is not None:
                            return handle
            return slow(
                self, topic, value, key, headers, partition, timestamp, on_delivery=on_delivery, deliver_at=deliver_at,
                deliver_after=deliver_after, repeat=repeat,
            )

        return send

    return decorate
