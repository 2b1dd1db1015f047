# Columns as Arrow lays them out: offsets of 32 bits, bytes, a validity bitmap from the first null
# on.
#
# Invariants: room for all of a record is made before any of it is written, so a call that raises
#     has taken nothing; no offset exceeds `data_max`.

cdef struct Buffer:
    char* at
    Py_ssize_t end
    Py_ssize_t size


cdef int make_room(Buffer* buffer, Py_ssize_t more) except -1:
    """So many bytes can be written behind the end."""
    cdef Py_ssize_t requested = buffer.end + more
    cdef Py_ssize_t size
    cdef void* moved
    if requested <= buffer.size:
        return 0
    size = buffer.size + (buffer.size >> 1) if buffer.size > 1 << 20 else 2 * buffer.size
    size = max(size, requested, 256)
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


cdef void release_column(Column* column) noexcept:
    let_go(&column.offsets)
    let_go(&column.data)
    let_go(&column.valid)
    column.count = column.nulls = 0


cdef struct Columns:
    Buffer stamps
    Column keys
    Column values
    # headers: a list for each record, null where it has none; empty until a record has some
    Column lists  # its `offsets` count headers, its `data` is not used
    Column names
    Column contents
