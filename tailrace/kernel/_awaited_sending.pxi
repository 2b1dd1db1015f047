# `AsyncProducer.send` for a record that needs no thought.
#
# What is awaited is a coroutine of its own type: a Python coroutine's frame, its StopIteration and
# the calls in it cost more than the record. It does nothing before it is awaited, and becomes the
# coroutine of the long way when the record needs thought. Its `am_send` is set by hand, because
# Cython has no name for it (CPython: Include/cpython/object.h, PyAsyncMethods).

cdef extern from *:
    """
    #define SET_AM_SEND(type, function) (((PyTypeObject *)(type))->tp_as_async->am_send = (sendfunc)(function))
    """
    void SET_AM_SEND(object type, int (*function)(SendCall, object, PyObject**) except -1)
    int PyIter_Send(object iterator, object value, PyObject** result) except -1
    PyObject* PyThreadState_GetDict()
    PyObject* PyDict_GetItemWithError(object mapping, object key) except? NULL

cdef enum:
    SEND_ENDED = 0  # PYGEN_RETURN
    SEND_FAILED = -1  # PYGEN_ERROR
    SEND_WAITS = 1  # PYGEN_NEXT

cdef enum:
    CALL_NEW
    CALL_RUNS  # in a step, whose code of the program may come back here
    CALL_IS_SLOW
    CALL_ENDED


cdef str RUNNING = "__asyncio_running_event_loop__"


cdef PyObject* running_mark() except? NULL:
    """What asyncio has put under this name for the loop that this thread runs now: a new object each
    time that a loop begins to run (CPython 3.11 and 3.12: Modules/_asynciomodule.c). NULL: nothing.
    Asking asyncio itself costs a call of getpid().
    """
    cdef PyObject* kept = PyThreadState_GetDict()
    return NULL if kept == NULL else PyDict_GetItemWithError(<object>kept, RUNNING)


cdef class AwaitedSender:
    """Of a producer in an event loop: see `reference.AwaitedSender`."""

    cdef FastPathSender producer
    cdef object connection
    cdef dict gates
    cdef object running_loop
    cdef object loop
    cdef object running_mark
    cdef public Py_ssize_t send_count

    def __init__(self):
        self.send_count = 0

    def _begin_awaited_sends(self, FastPathSender producer not None, connection not None, dict gates not None, running_loop not None):
        self.producer, self.connection, self.gates, self.running_loop = producer, connection, gates, running_loop

    def _send_in(self, loop):
        cdef PyObject* mark = running_mark()
        self.loop = loop
        self.running_mark = None if mark == NULL else <object>mark

    cdef bint is_in_loop(self) except -1:
        """Whether this thread runs the loop that the producer works in."""
        if self.loop is None:
            return False
        if self.running_mark is not None and running_mark() == <PyObject*>self.running_mark:
            return True
        return self.running_loop() is self.loop


@cython.freelist(64)
cdef class SendCall:
    """One `await producer.send(...)`."""

    cdef AwaitedSender sender
    cdef object slow
    cdef object handle_type
    cdef Py_ssize_t yields_after
    cdef object on_delivery
    cdef object delay
    cdef object topic, value, key, headers, partition, timestamp
    cdef object inner
    cdef int state

    cdef object begin(self):
        """The future of the record, or None: `inner` is begun."""
        cdef AwaitedSender sender = self.sender
        cdef object future
        self.sender = None
        if (
            self.delay is None and sender.is_in_loop() and not sender.gates and (sender.send_count + 1) % self.yields_after
        ):
            future = sent_fast(
                sender.producer, self.topic, self.value, self.key, self.headers, self.partition, self.timestamp, self.on_delivery,
                <PyTypeObject*>self.handle_type, sender.connection,
            )
            if future is not None:
                sender.send_count += 1
                self.end()
                return future
        deliver_at, deliver_after, repeat = (None, None, None) if self.delay is None else self.delay
        self.inner = self.slow(
            sender, self.topic, self.value, self.key, self.headers, self.partition, self.timestamp, on_delivery=self.on_delivery,
            deliver_at=deliver_at, deliver_after=deliver_after, repeat=repeat,
        )
        return None

    cdef void end(self):
        self.state = CALL_ENDED
        self.inner = self.slow = self.topic = self.value = self.key = self.headers = self.on_delivery = None

    cdef object check_usable(self):
        if self.state == CALL_ENDED:
            raise RuntimeError("cannot reuse already awaited coroutine")
        self.check_rests()

    cdef object check_rests(self):
        if self.state == CALL_RUNS:
            raise ValueError("coroutine already executing")

    cdef int step(self, object value, PyObject** result) except -1:
        """As PyIter_Send: SEND_ENDED or SEND_WAITS, and what is returned or waited for."""
        cdef object future
        cdef int status
        self.check_usable()
        if self.state == CALL_NEW and value is not None:
            raise TypeError("can't send non-None value to a just-started coroutine")
        try:
            if self.state == CALL_NEW:
                self.state = CALL_RUNS
                future = self.begin()
                if future is not None:
                    Py_INCREF(future)
                    result[0] = <PyObject*>future
                    return SEND_ENDED
            self.state = CALL_RUNS
            status = PyIter_Send(self.inner, value, result)
        except BaseException:
            self.end()
            raise
        self.state = CALL_IS_SLOW
        if status == SEND_ENDED:
            self.end()
        return status

    cdef object stepped(self, object value):
        """What is waited for; StopIteration with what is returned."""
        cdef PyObject* result = NULL
        cdef int status
        cdef object given
        status = self.step(value, &result)
        given = <object>result
        Py_DECREF(given)
        if status == SEND_ENDED:
            raise StopIteration(given)
        return given

    def __await__(self):
        if self.state == CALL_IS_SLOW and self.inner.cr_await is not None:
            raise RuntimeError("coroutine is being awaited already")
        return self

    def __next__(self):
        return self.stepped(None)

    def send(self, value):
        return self.stepped(value)

    def throw(self, kind, value=None, traceback=None):
        self.check_usable()
        if self.state == CALL_IS_SLOW:
            self.state = CALL_RUNS
            try:
                if value is None and traceback is None:
                    given = self.inner.throw(kind)
                else:
                    given = self.inner.throw(kind, value, traceback)
            except BaseException:
                self.end()
                raise
            self.state = CALL_IS_SLOW
            return given
        self.sender = None
        self.end()
        if isinstance(kind, BaseException):
            raise kind
        if isinstance(value, BaseException):
            raise value.with_traceback(traceback)
        raise kind() if value is None else kind(value)

    def close(self):
        self.check_rests()
        self.sender = None
        if self.state == CALL_IS_SLOW:
            self.state = CALL_RUNS
            try:
                self.inner.close()
            finally:
                self.end()
        else:
            self.end()

    @property
    def cr_running(self):
        return self.state == CALL_RUNS

    @property
    def cr_await(self):
        return self.inner.cr_await if self.state == CALL_IS_SLOW else None

    @property
    def cr_frame(self):
        return self.inner.cr_frame if self.state == CALL_IS_SLOW else None

    @property
    def __name__(self):
        return "send"

    @property
    def __qualname__(self):
        return "AsyncProducer.send"

    def __repr__(self):
        return f"<coroutine object AsyncProducer.send at {id(self):#x}>"

    def __dealloc__(self):
        if self.state == CALL_NEW and self.sender is not None:
            warnings.warn("coroutine 'AsyncProducer.send' was never awaited", RuntimeWarning)


cdef int _send_call(SendCall call, object value, PyObject** result) except -1:
    return call.step(value, result)


SET_AM_SEND(SendCall, _send_call)


def fast_awaited_send(handle_type, Py_ssize_t yields_after):
    """For `AsyncProducer.send`, of an AwaitedSender: see `reference.fast_awaited_send`."""
    handle_type_of(handle_type)

    def decorate(slow):
        @functools.wraps(slow)
        def send(
            AwaitedSender self not None, topic, value=None, key=None, headers=None, partition=None, timestamp=None, *,
            on_delivery=None, deliver_at=None, deliver_after=None, repeat=None,
        ):
            cdef SendCall call = SendCall.__new__(SendCall)
            call.sender, call.slow, call.handle_type, call.yields_after = self, slow, handle_type, yields_after
            call.topic, call.value, call.key, call.headers, call.partition, call.timestamp = topic, value, key, headers, partition, timestamp
            call.on_delivery = on_delivery
            if deliver_at is not None or deliver_after is not None or repeat is not None:
                call.delay = (deliver_at, deliver_after, repeat)
            return call

        return send

    return decorate
