# `Producer.send` for a record that needs no thought.
#
# `send` takes the producer's lock, which may let other threads run, before it reads anything that can change.

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
