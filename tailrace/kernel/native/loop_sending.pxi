# `AsyncProducer.send` for a record that needs no thought: what the coroutine does, in one call.

cdef extern from *:
    PyObject* PyThreadState_GetDict()

cdef str RUNNING = "__asyncio_running_event_loop__"


cdef PyObject* running_mark() except? NULL:
    """What asyncio has put under this name for the loop that this thread runs now: a new object each
    time that a loop begins to run (CPython 3.11 and 3.12: Modules/_asynciomodule.c). NULL: nothing.
    Asking asyncio itself costs a call of getpid().
    """
    cdef PyObject* kept = PyThreadState_GetDict()
    return NULL if kept == NULL else PyDict_GetItemWithError(<object>kept, RUNNING)


cdef class LoopSender:
    """Of a producer in an event loop: see `reference.LoopSender`."""

    cdef FastPathSender producer
    cdef object connection
    cdef dict gates
    cdef object running_loop
    cdef object loop
    cdef object mark
    cdef object handle_type
    cdef Py_ssize_t yields_after
    cdef public Py_ssize_t send_count

    def _begin_loop_sends(
        self, FastPathSender producer not None, connection not None, dict gates not None, running_loop not None, handle_type, Py_ssize_t yields_after
    ):
        handle_type_of(handle_type)
        self.producer, self.connection, self.gates, self.running_loop = producer, connection, gates, running_loop
        self.handle_type, self.yields_after = handle_type, yields_after

    def _send_in(self, loop):
        cdef PyObject* mark = running_mark()
        self.loop = loop
        self.mark = None if mark == NULL else <object>mark

    def _sent_now(self, topic, value, key, headers, partition, timestamp, no_more, on_delivery, deliver_at, deliver_after, repeat):
        cdef object future
        if no_more is not None or deliver_at is not None or deliver_after is not None or repeat is not None:
            return None
        if self.loop is None or self.gates or not (self.send_count + 1) % self.yields_after:
            return None
        if (self.mark is None or running_mark() != <PyObject*>self.mark) and self.running_loop() is not self.loop:
            return None
        future = sent_fast(
            self.producer, topic, value, key, headers, partition, timestamp, on_delivery, <PyTypeObject*>self.handle_type, self.connection
        )
        if future is not None:
            self.send_count += 1
        return future
