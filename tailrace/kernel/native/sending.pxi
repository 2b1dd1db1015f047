# `Producer.send` for a record that needs no thought.
#
# First what may run other code: parts are made plain, the handle is made (which may run the
# collector), the producer's lock is taken where a thread has it. Then, in `take`, everything that
# can change is read, and the record written, without letting any code come between.

cdef class OpenBatch:
    """Of a batch of a producer: what `fast_send` adds to."""

    cdef public object rows
    cdef public int64_t room
    cdef public list callbacks

    def __init__(self):
        self.rows = RecordBuffer()
        self.room = 0
        self.callbacks = None

    def add(self, key, value, int64_t stamp_us, headers, int64_t byte_count):
        """Append a record that takes `byte_count`; returns its row. -1: there is no room, or none
        any more.
        """
        if type(self.rows) is RecordBuffer:
            return (<RecordBuffer>self.rows).add_into(self, key, value, stamp_us, headers, byte_count)
        return self.rows.add_into(self, key, value, stamp_us, headers, byte_count)


cdef class OpenQueue:
    """Of a partition's queue: which batch takes records."""

    cdef public OpenBatch open


cdef class PartitionCache:
    """Where the records of a topic go: what is known without asking a partitioner again."""

    cdef list queues
    cdef Py_ssize_t partition_count
    cdef bint accepts_partitions
    cdef bint by_murmur2
    cdef dict by_key
    cdef OpenQueue keyless

    def __init__(self, queues, *, bint accepts_partitions, bint by_murmur2):
        self.queues = list(queues)
        self.partition_count = len(self.queues)
        self.accepts_partitions = accepts_partitions
        self.by_murmur2 = by_murmur2
        self.by_key = {}
        for queue in self.queues:
            if not isinstance(queue, OpenQueue):
                raise TypeError(f"a queue is an OpenQueue, not {type(queue).__name__}")

    def remember(self, key, OpenQueue queue not None):
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

    cdef OpenQueue of_plain(self, object key):
        """Of exact bytes or ASCII text. None: ask the partitioner."""
        cdef PyObject* found
        cdef Py_ssize_t length
        cdef const char* at
        if self.by_murmur2:
            at = read(key, &length)
            return <OpenQueue>PyList_GET_ITEM(
                self.queues, (_murmur2(<const uint8_t*>at, length) & 0x7FFFFFFF) % <uint32_t>self.partition_count
            )
        found = PyDict_GetItemWithError(self.by_key, key if type(key) is bytes else PyUnicode_AsUTF8String(key))
        return None if found == NULL else <OpenQueue>found

    def queue_of(self, key):
        """Where records of a key that was seen before go; None: ask the partitioner."""
        if key is None:
            return self.keyless
        return self.of_plain(key) if type(key) is bytes else None


cdef class FastPathSender:
    """Of a producer: what its `send` needs for a record that needs no thought."""

    cdef dict partition_cache
    cdef SendLock lock  # None: it is of another kind
    cdef object acquire
    cdef object release

    def _begin_fast_sends(self, dict partition_cache not None, lock):
        """`partition_cache`: topic -> what is known of it, kept by the producer. `lock`: the
        producer's.
        """
        self.partition_cache = partition_cache
        self.lock = lock if type(lock) is SendLock else None
        self.acquire, self.release = lock.acquire, lock.release


cdef inline Py_ssize_t plain_headers_size(object headers) except -2:
    """The bytes that headers take, by the rule of `record_validation.checked_headers`; -1: they need
    thought.
    """
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
    return type(part) is bytes or part is None or (type(part) is str and IS_ASCII(part))


cdef object made_plain(object part):
    """The bytes of a key or value that is not plain; itself: it needs thought. (A bytearray is
    copied, because it can be resized while a lock is waited for.)
    """
    if type(part) is not str and type(part) is not bytearray and type(part) is not memoryview:
        return part
    try:
        return PyUnicode_AsUTF8String(part) if type(part) is str else bytes(part)
    except (ValueError, BufferError):  # the long way has the words for it
        return part


cdef inline const char* read(object part, Py_ssize_t* length) noexcept:
    """Where the bytes of a plain key or value are; NULL: it is None."""
    if type(part) is bytes:
        length[0] = PyBytes_GET_SIZE(part)
        return PyBytes_AS_STRING(part)
    if part is None:
        length[0] = 0
        return NULL
    length[0] = PyUnicode_GET_LENGTH(part)
    return ASCII_OF(part)


cdef inline int64_t now_us() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_REALTIME, &now)
    return <int64_t>now.tv_sec * 1000000 + now.tv_nsec // 1000


cdef bint take(OpenQueue queue, object value, object key, object headers, int64_t stamp_us, bint is_stamped, object call, object handle) except -1:
    """Add a record to the queue's open batch and make `handle`, an empty tuple, its handle,
    and `call` (a tuple likewise: row, callback; or None) its callback. False: it needs thought. As
    if with the lock held; lets no other code run.
    """
    cdef OpenBatch batch = queue.open
    cdef RecordBuffer rows
    cdef Py_ssize_t key_length, value_length, header_size
    cdef const char* key_at
    cdef const char* value_at
    cdef int64_t room
    cdef object row
    if batch is None or type(batch.rows) is not RecordBuffer or (call is not None and batch.callbacks is None):
        return False
    rows = <RecordBuffer>batch.rows
    key_at = read(key, &key_length)
    value_at = read(value, &value_length)
    room = batch.room - value_length - key_length - OVERHEAD
    if headers is not None:
        header_size = plain_headers_size(headers)
        if header_size < 0:
            return False
        if header_size == 0:
            headers = None
        room -= header_size
    if room <= 0:
        return False
    row = rows.own.values.count
    if call is not None:
        batch.callbacks.append(call)
        try:
            rows.append(key_at, key_length, value_at, value_length, stamp_us if is_stamped else now_us(), headers)
        except BaseException:
            batch.callbacks.pop()
            raise
        Py_INCREF(row)
        PyTuple_SET_ITEM(call, 0, row)
    else:
        rows.append(key_at, key_length, value_at, value_length, stamp_us if is_stamped else now_us(), headers)
    batch.room = room
    Py_INCREF(batch)
    PyTuple_SET_ITEM(handle, 0, batch)
    Py_INCREF(row)
    PyTuple_SET_ITEM(handle, 1, row)
    return True


cdef object empty_call(object callback):
    """(its row, which is not known yet; the callback)."""
    cdef object call = ALLOC(<PyTypeObject*>tuple, 2)
    Py_INCREF(callback)
    PyTuple_SET_ITEM(call, 1, callback)
    return call


cdef object empty_handle(PyTypeObject* handle_type, object owner):
    """(batch, row), which `take` sets; and the owner, if there is one."""
    cdef object handle
    if owner is None:
        return ALLOC(handle_type, 2)
    handle = ALLOC(handle_type, 3)
    Py_INCREF(owner)
    PyTuple_SET_ITEM(handle, 2, owner)
    return handle


cdef object fast_path(FastPathSender sender, OpenQueue queue, object value, object key, object headers, int64_t stamp_us, bint is_stamped, object callback,
                    PyTypeObject* handle_type, object owner):
    """The handle of the record, or None: it needs thought."""
    cdef object call = None
    cdef object handle
    if callback is not None:
        call = empty_call(callback)
    handle = empty_handle(handle_type, owner)
    # Nothing runs between here and the end of `take`: while nobody has the lock, nobody is in the
    # midst of anything.
    if sender.lock is not None and not sender.lock.depth:
        return handle if take(queue, value, key, headers, stamp_us, is_stamped, call, handle) else None
    handle = call = None  # nothing sees them while they are empty
    sender.acquire()
    try:
        if callback is not None:
            call = empty_call(callback)
        handle = empty_handle(handle_type, owner)
        return handle if take(queue, value, key, headers, stamp_us, is_stamped, call, handle) else None
    finally:
        sender.release()


cdef object sent_fast(FastPathSender sender, object topic, object value, object key, object headers, object partition, object timestamp,
                      object on_delivery, PyTypeObject* handle_type, object owner):
    """The handle of a record of these arguments of `send`, or None: it needs thought."""
    cdef PyObject* found
    cdef PartitionCache partition_cache
    cdef OpenQueue queue = None
    cdef int64_t stamp_us = 0
    cdef Py_ssize_t number
    if not is_plain(value):
        value = made_plain(value)
    if not is_plain(key):
        key = made_plain(key)
    if not (
        is_plain(value) and is_plain(key) and (on_delivery is None or callable(on_delivery)) and (timestamp is None or type(timestamp) is int)
        and (partition is None or type(partition) is int) and sender.partition_cache is not None
    ):
        return None
    try:
        found = PyDict_GetItemWithError(sender.partition_cache, topic)
    except TypeError:  # no topic can have such a name: the long way says so
        return None
    if found == NULL:
        return None
    partition_cache = <PartitionCache>found
    if partition is not None:
        if partition_cache.accepts_partitions and 0 <= partition < partition_cache.partition_count:
            number = partition
            queue = <OpenQueue>PyList_GET_ITEM(partition_cache.queues, number)
    elif key is None:
        queue = partition_cache.keyless
    else:
        queue = partition_cache.of_plain(key)
    if queue is None:
        return None
    if timestamp is not None:
        if not 0 <= timestamp <= TIMESTAMP_MAX_MS:  # the long way says what is wrong
            return None
        stamp_us = timestamp
        stamp_us *= 1000
    return fast_path(sender, queue, value, key, headers, stamp_us, timestamp is not None, on_delivery, handle_type, owner)


cdef PyTypeObject* handle_type_of(object handle_type) except NULL:
    if not issubclass(handle_type, tuple):
        raise TypeError("a handle is a tuple")
    return <PyTypeObject*>handle_type


def fast_send(handle_type):
    """For `Producer.send`, of a FastPathSender: see `reference.fast_send`."""
    handle_type_of(handle_type)

    def decorate(slow):
        @functools.wraps(slow)
        def send(
            FastPathSender self not None, topic, value=None, key=None, headers=None, partition=None, timestamp=None, *,
            on_delivery=None, deliver_at=None, deliver_after=None, repeat=None,
        ):
            if deliver_at is None and deliver_after is None and repeat is None:
                handle = sent_fast(self, topic, value, key, headers, partition, timestamp, on_delivery, <PyTypeObject*>handle_type, None)
                if handle is not None:
                    return handle
            return slow(
                self, topic, value, key, headers, partition, timestamp, on_delivery=on_delivery, deliver_at=deliver_at,
                deliver_after=deliver_after, repeat=repeat,
            )

        return send

    return decorate
