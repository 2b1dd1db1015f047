# A producer's lock: `threading.RLock`, but that those who hold the interpreter's lock can see
# whether anybody holds it.
#
# Whoever changes a producer's batches holds it, in code that other threads may come between.
# `fast_send` does all of its work without letting any come between: while nobody holds the lock,
# that is as good as to hold it, and costs nothing.
# Invariants: depth > 0 from when a thread has it until it lets it go, as others see it under the
# interpreter's lock; `depth` and `owner` are changed by the thread that has `inner` and the
# interpreter's lock only. (A thread that has `inner` and waits for the interpreter's lock has not
# looked at anything yet.)


cdef class SendLock:
    """A reentrant lock."""

    cdef PyThread_type_lock inner
    cdef long owner
    cdef Py_ssize_t depth

    def __cinit__(self):
        self.inner = PyThread_allocate_lock()
        if self.inner == NULL:
            raise MemoryError

    def __dealloc__(self):
        if self.inner != NULL:
            if self.depth:
                PyThread_release_lock(self.inner)
            PyThread_free_lock(self.inner)

    cdef bint take(self, bint blocking) except -1:
        """False: another thread has it, and `blocking` is False."""
        cdef long me = PyThread_get_thread_ident()
        cdef PyLockStatus status
        if self.depth and self.owner == me:
            self.depth += 1
            return True
        if not PyThread_acquire_lock(self.inner, NOWAIT_LOCK):
            if not blocking:
                return False
            status = PY_LOCK_INTR
            while status != PY_LOCK_ACQUIRED:
                with nogil:
                    status = PyThread_acquire_lock_timed(self.inner, -1, 1)
                if status == PY_LOCK_INTR:
                    PyErr_CheckSignals()
        self.owner = me
        self.depth = 1
        return True

    cdef int give(self) except -1:
        if not self.depth or self.owner != <long>PyThread_get_thread_ident():
            raise RuntimeError("cannot release un-acquired lock")
        self.depth -= 1
        if not self.depth:
            PyThread_release_lock(self.inner)
        return 0

    def acquire(self, bint blocking=True):
        """True; False if another thread has it and `blocking` is False."""
        return self.take(blocking)

    def release(self):
        """Raises RuntimeError in a thread that does not have it."""
        self.give()

    def __enter__(self):
        self.take(True)
        return self

    def __exit__(self, kind, error, trace):
        self.give()

    def _at_fork_reinit(self):
        """In a child: nobody has it. (What a thread of the parent held is left as it is.)"""
        self.depth = 0
        self.inner = PyThread_allocate_lock()
        if self.inner == NULL:
            raise MemoryError


def new_lock():
    """A lock for a FastPathSender. Where a library (gevent) has put locks of its own in the place
    of Python's, one of those: its threads are not the system's.
    """
    lock = threading.RLock()
    return SendLock() if type(lock).__module__ == "_thread" else lock
