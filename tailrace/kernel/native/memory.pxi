# Columns whose memory is used again: a batch fills them, its message is made of them, and the next
# batch does the same a moment later. To begin small each time costs a batch of 100 records a fifth
# of its time. Of small ones there are as many as partitions usually are. More large ones would cost
# more than they save: the memory that the C library then gives to messages lies behind them, and
# goes back to the system with each round of batches (64 of 50 KB: 10 page faults each).
#
# Owner: the process; what follows runs under the interpreter's lock. Invariant: what is kept for
# later is never more than the bounds below, nor than batches had at one time.
#
# Messages from 128 KiB on have a list of their own (`frames.pxi`); smaller ones have none: the C
# library gives their memory to the next one, measured (docs/adr/0021).

cdef enum:
    SPARES_MAX = 512
    LARGE_SPARES_MAX = 16
    SMALL_SPARE_BYTES = 48 << 10
    SPARE_MAX_BYTES = 2 << 20
    SPARES_MAX_BYTES = 8 << 20

cdef Columns[SPARES_MAX] _spare_columns
cdef Py_ssize_t _spare_count = 0
cdef Py_ssize_t _spare_bytes = 0


cdef inline Py_ssize_t column_bytes(Column* column) noexcept:
    return column.offsets.size + column.data.size + column.valid.size


cdef Py_ssize_t columns_bytes(Columns* columns) noexcept:
    return (
        columns.stamps.size + column_bytes(&columns.keys) + column_bytes(&columns.values) + column_bytes(&columns.lists) + column_bytes(&columns.names)
        + column_bytes(&columns.contents)
    )


cdef void empty_column(Column* column) noexcept:
    column.offsets.end = column.data.end = column.valid.end = column.count = column.nulls = 0


cdef void release_columns(Columns* columns) noexcept:
    """They have no memory any more: it is kept for others, or freed."""
    global _spare_count, _spare_bytes
    cdef Py_ssize_t size = columns_bytes(columns)
    if not size:
        return
    if (
        size <= SPARE_MAX_BYTES and _spare_bytes + size <= SPARES_MAX_BYTES
        and _spare_count < (SPARES_MAX if size <= SMALL_SPARE_BYTES else LARGE_SPARES_MAX)
    ):
        columns.stamps.end = 0
        empty_column(&columns.keys)
        empty_column(&columns.values)
        empty_column(&columns.lists)
        empty_column(&columns.names)
        empty_column(&columns.contents)
        _spare_columns[_spare_count] = columns[0]
        _spare_count += 1
        _spare_bytes += size
    else:
        let_go(&columns.stamps)
        release_column(&columns.keys)
        release_column(&columns.values)
        release_column(&columns.lists)
        release_column(&columns.names)
        release_column(&columns.contents)
    memset(columns, 0, sizeof(Columns))


cdef void pop_spare_columns(Columns* columns) noexcept:
    """Columns that have no memory get some, if there is any."""
    global _spare_count, _spare_bytes
    if _spare_count:
        _spare_count -= 1
        columns[0] = _spare_columns[_spare_count]
        _spare_bytes -= columns_bytes(columns)
