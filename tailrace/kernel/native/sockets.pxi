# A ZeroMQ socket's messages without an object for each frame: the twin of
# `netfront.socket.message_socket.MessageSocket` and of
# `tailrace.client.connections.runtime.DealerSocket`, which are the reference, over pyzmq. Without
# `known` every first frame is known.
#
# libzmq is the one that pyzmq has loaded; its functions come as addresses, so that nothing is
# linked here. What is called is in its manual since version 3.2: a message is 64 bytes that only
# libzmq looks into.
#
# Invariants: every message that was begun is closed; nothing here waits (DONTWAIT), so the
#     interpreter's lock is kept.

cdef extern from *:
    """
    typedef struct { uint64_t words[8]; } ZmqMessage;
    typedef int (*ZmqOfMessage)(ZmqMessage *);
    typedef int (*ZmqReceive)(ZmqMessage *, void *, int);
    typedef void *(*ZmqData)(ZmqMessage *);
    typedef size_t (*ZmqSize)(ZmqMessage *);
    typedef int (*ZmqSend)(void *, const void *, size_t, int);
    typedef int (*ZmqErrno)(void);
    typedef int (*ZmqGetOption)(void *, int, void *, size_t *);
    """
    ctypedef struct ZmqMessage:
        uint64_t words[8]
    ctypedef int (*ZmqOfMessage)(ZmqMessage*) noexcept
    ctypedef int (*ZmqReceive)(ZmqMessage*, void*, int) noexcept
    ctypedef void* (*ZmqData)(ZmqMessage*) noexcept
    ctypedef size_t (*ZmqSize)(ZmqMessage*) noexcept
    ctypedef int (*ZmqSend)(void*, const void*, size_t, int) noexcept
    ctypedef int (*ZmqErrno)() noexcept
    ctypedef int (*ZmqGetOption)(void*, int, void*, size_t*) noexcept

cdef enum:
    ZMQ_DONTWAIT = 1
    ZMQ_SNDMORE = 2
    ZMQ_EVENTS = 15
    SYSTEM_EINTR = 4
    SYSTEM_EAGAIN = 11
    SYSTEM_ENOTSOCK = 88


cdef class LentFrame:
    """A frame's bytes where libzmq has received them, as a read-only buffer; libzmq's message is
    closed with it, whichever thread that is in.
    """

    cdef ZmqMessage message
    cdef ZmqOfMessage close_message
    cdef void* data
    cdef Py_ssize_t size

    def __cinit__(self):
        self.close_message = NULL

    def __dealloc__(self):
        if self.close_message != NULL:
            self.close_message(&self.message)

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.data, self.size, 1, flags)

    cdef void begin(self, ZmqOfMessage begin_message, ZmqOfMessage close_message) noexcept:
        begin_message(&self.message)
        self.close_message = close_message


cdef class MessageSocket:
    cdef public object _socket
    cdef public uint64_t taken
    cdef public bint has_rest
    cdef void* handle
    cdef object error_type
    cdef ZmqOfMessage begin_message
    cdef ZmqOfMessage close_message
    cdef ZmqOfMessage has_more
    cdef ZmqReceive receive_message
    cdef ZmqData data_of
    cdef ZmqSize size_of
    cdef ZmqSend send_bytes
    cdef ZmqErrno last_errno
    cdef ZmqGetOption get_option
    cdef Py_ssize_t first_lent
    cdef Py_ssize_t lent_from_bytes

    def _begin(self, size_t handle, tuple functions not None, error_type, Py_ssize_t first_lent, Py_ssize_t lent_from_bytes):
        """`functions`: addresses in libzmq, in the order of `libzmq.FUNCTIONS`;
        `error_type`: zmq.ZMQError.
        """
        if len(functions) != 9 or not all(functions) or not handle:
            raise ValueError("nine functions of libzmq and a socket are needed")
        self.error_type = error_type
        self.first_lent = first_lent
        self.lent_from_bytes = lent_from_bytes
        self.begin_message = <ZmqOfMessage><size_t>functions[0]
        self.close_message = <ZmqOfMessage><size_t>functions[1]
        self.has_more = <ZmqOfMessage><size_t>functions[2]
        self.receive_message = <ZmqReceive><size_t>functions[3]
        self.data_of = <ZmqData><size_t>functions[4]
        self.size_of = <ZmqSize><size_t>functions[5]
        self.send_bytes = <ZmqSend><size_t>functions[6]
        self.last_errno = <ZmqErrno><size_t>functions[7]
        self.get_option = <ZmqGetOption><size_t>functions[8]
        self.handle = <void*>handle

    cdef int failed(self) except -1:
        """After a call that did not do it: 0 where it is to be tried again, else the error's
        number, which is not raised yet.
        """
        cdef int error = self.last_errno()
        if error != SYSTEM_EINTR:
            return error
        PyErr_CheckSignals()
        return 0

    cdef int check_open(self) except -1:
        if self.handle == NULL:
            raise self.error_type(SYSTEM_ENOTSOCK)
        return 0

    def events(self):
        cdef int found = 0, error
        cdef size_t size = sizeof(found)
        self.check_open()
        while self.get_option(self.handle, ZMQ_EVENTS, &found, &size) < 0:
            error = self.failed()
            if error:
                raise self.error_type(error)
        return found

    def try_receive(self, dict known, Py_ssize_t parts_max):
        cdef ZmqMessage own
        cdef ZmqMessage* message = &own
        cdef LentFrame lent
        cdef list frames = []
        cdef Py_ssize_t size
        cdef uint64_t taken = 0
        cdef int error
        self.check_open()
        self.begin_message(&own)
        try:
            while True:
                if len(frames) >= self.first_lent:  # perhaps large, which is known when it has come
                    lent = LentFrame.__new__(LentFrame)
                    lent.begin(self.begin_message, self.close_message)
                    message = &lent.message
                while self.receive_message(message, self.handle, ZMQ_DONTWAIT) < 0:
                    error = self.failed()
                    if error == SYSTEM_EAGAIN and not frames:
                        return None
                    if error:
                        raise self.error_type(error)
                size = self.size_of(message)
                if len(frames) >= self.first_lent and size >= self.lent_from_bytes:
                    lent.data, lent.size = self.data_of(message), size
                    part = PyMemoryView_FromObject(lent)
                else:
                    part = PyBytes_FromStringAndSize(<const char*>self.data_of(message), size)
                self.has_rest = self.has_more(message) != 0
                if not frames:
                    frames.append(part)
                    if known is not None and part not in known:
                        break
                else:
                    frames.append(part)
                    taken += size + (2 if size < 256 else 9)
                if not self.has_rest or len(frames) > parts_max:
                    break
        finally:
            self.close_message(&own)
        self.taken = taken
        return frames

    def send(self, frames):
        cdef Py_buffer view
        cdef Py_ssize_t left = len(frames)
        cdef int done, error
        self.check_open()
        for frame in frames:
            left -= 1
            PyObject_GetBuffer(frame, &view, PyBUF_SIMPLE)
            try:
                while True:
                    done = self.send_bytes(self.handle, view.buf, view.len, ZMQ_DONTWAIT | ZMQ_SNDMORE if left else ZMQ_DONTWAIT)
                    if done >= 0:
                        break
                    error = self.failed()
                    if error:
                        raise self.error_type(error)
            finally:
                PyBuffer_Release(&view)

    def close(self):
        self.handle = NULL
