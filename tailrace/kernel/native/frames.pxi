# Columns that are there as buffers, laid into an Arrow message (see reference_frames.py); and the
# memory of large messages, which is used again.
#
# A message of a MiB in fresh memory costs 30 to 90 page faults, a third of its encoding. So a few
# that are not used any more are kept. Whether one is used is not believed but looked at: what
# anybody can still see, ZeroMQ too, has a reference or an exported buffer besides the list's own.
#
# Owner: the process; everything here runs under the interpreter's lock.
# Invariants: memory that anything else refers to is never given out; what is kept is never more
#     than the bounds below.

cdef extern from "Python.h":
    ctypedef struct PyByteArrayObject:
        Py_ssize_t ob_alloc
        Py_ssize_t ob_exports
    Py_ssize_t Py_REFCNT(PyObject* object) noexcept
    int PyByteArray_Resize(object array, Py_ssize_t length) except -1

cdef enum:
    KEPT_MIN_BYTES = 128 << 10
    KEPT_MAX_BYTES = 4 << 20
    KEPT_COUNT_MAX = 4
    CHECKED_BYTES = 256 << 10  # copied and checked at a time: a part of a core's second-level cache

cdef list _kept_messages = []


cdef object new_message(Py_ssize_t size):
    """A bytearray of so many bytes with anything in it."""
    cdef Py_ssize_t index
    cdef PyObject* kept
    cdef PyByteArrayObject* found
    for index in range(PyList_GET_SIZE(_kept_messages)):
        kept = <PyObject*>PyList_GET_ITEM(_kept_messages, index)
        found = <PyByteArrayObject*>kept
        if found.ob_alloc // 2 < size < found.ob_alloc and Py_REFCNT(kept) == 1 and not found.ob_exports:
            message = _kept_messages.pop(index)
            PyByteArray_Resize(message, size)
            return message
    return PyByteArray_FromStringAndSize(NULL, size)


def keep_message(message):
    """See `reference_frames.keep_message`."""
    cdef PyByteArrayObject* given
    if type(message) is not bytearray:
        return
    given = <PyByteArrayObject*><PyObject*>message
    if KEPT_MIN_BYTES <= given.ob_alloc <= KEPT_MAX_BYTES:
        for kept in _kept_messages:
            if kept is message:
                return
        if PyList_GET_SIZE(_kept_messages) >= KEPT_COUNT_MAX:
            _kept_messages.pop(0)
        _kept_messages.append(message)


cdef int64_t place_in(template, Py_ssize_t index, int64_t length, int64_t size) except -1:
    cdef int64_t place = template[index]
    if not 8 <= place <= size - length:
        raise ValueError(f"the metadata, of {size} bytes, has no room for {length} bytes at {place}")
    return place


def lay_message(template, int64_t row_count, nodes, list pieces not None, Py_ssize_t gap):
    """See `reference_frames.lay_message`."""
    global _crc32c
    if _crc32c is None:
        from tailrace.format.crc32c import crc32c

        _crc32c = crc32c
    cdef bytes metadata = template[0]
    cdef list numbers = list(nodes)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(metadata), count = PyList_GET_SIZE(pieces), index, length
    cdef int64_t row_count_at = place_in(template, 1, 8, size), nodes_at = place_in(template, 2, 8 * PyList_GET_SIZE(numbers), size)
    cdef int64_t buffers_at = place_in(template, 3, 16 * count, size), body_length_at = place_in(template, 4, 8, size)
    cdef int64_t end = 0, number
    cdef int64_t[2] place
    cdef uint32_t declared
    cdef bytearray head = bytearray(metadata)
    cdef char* at = PyByteArray_AS_STRING(head)
    cdef Py_buffer view
    if gap < 0 or gap & 7:
        raise ValueError("the gap is a multiple of 8")
    for index in range(count):
        piece = pieces[index]
        length = <Py_ssize_t>piece if type(piece) is int else <Py_ssize_t>len(piece)
        if length < 0 or length > DATA_MAX - end:
            raise ValueError("a batch of more than 2 GiB")
        place[0], place[1] = end, length
        memcpy(at + buffers_at + 16 * index, place, 16)
        end += (length + 7) & ~<int64_t>7
    if size + gap + end > 1 << 31:
        raise ValueError("a batch of more than 2 GiB")
    declared = <uint32_t>(size - 8 + gap)
    memcpy(at + 4, &declared, 4)
    memcpy(at + row_count_at, &row_count, 8)
    for index in range(PyList_GET_SIZE(numbers)):
        number = numbers[index]
        memcpy(at + nodes_at + 8 * index, &number, 8)
    memcpy(at + body_length_at, &end, 8)

    cdef object message = new_message(size + gap + end)
    cdef uint8_t* body = <uint8_t*>PyByteArray_AS_STRING(message)
    memcpy(body, at, size)
    memset(body + size, 0, gap)
    cdef uint32_t found = crc(body, size, 0)
    body += size + gap
    cdef int64_t done = 0, checked = 0, step, copied, padded
    for index in range(count):
        memcpy(place, at + buffers_at + 16 * index, 16)
        length, padded = place[1], (place[1] + 7) & ~<int64_t>7
        piece = pieces[index]
        if type(piece) is int:
            memset(body + done, 0, padded)
            done += padded
        elif type(piece) is GatheredCells:
            (<GatheredCells>piece).fill(<char*>body + done)
            memset(body + done + length, 0, padded - length)
            done += padded
        else:
            PyObject_GetBuffer(piece, &view, PyBUF_SIMPLE)
            try:
                if view.len != length:
                    raise ValueError("a piece that has another length than it says")
                copied = 0
                while copied < length:
                    step = min(<int64_t>CHECKED_BYTES, length - copied)
                    memcpy(body + done, <const char*>view.buf + copied, step)
                    copied += step
                    done += step
                    if done - checked >= CHECKED_BYTES:
                        found = crc(body + checked, done - checked, found)
                        checked = done
            finally:
                PyBuffer_Release(&view)
            memset(body + done, 0, padded - length)
            done += padded - length
    return message, crc(body + checked, end - checked, found)
