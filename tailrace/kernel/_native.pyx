# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False,
# cdivision=True, binding=True
"""The kernel, compiled: what `reference.py` does, byte for byte. Its docstrings say what each thing
is for; here is said how.

One file for each thing that it does, in the order of the `include`s below.

Threads: every function here runs under the interpreter's lock from its first read of a caller's
bytes to its last, and calls no Python code between: nothing changes meanwhile.
"""

import functools
import os
import threading

from cpython.buffer cimport PyBUF_READ, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE, PyList_New, PyList_SET_ITEM
from cpython.memoryview cimport PyMemoryView_FromObject
from cpython.object cimport PyObject, PyTypeObject
from cpython.pythread cimport (
    NOWAIT_LOCK, PY_LOCK_ACQUIRED, PY_LOCK_INTR, PyLockStatus, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock,
    PyThread_get_thread_ident, PyThread_release_lock, PyThread_type_lock,
)
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE, PyTuple_SET_ITEM
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
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
    object PyMemoryView_FromMemory(char* memory, Py_ssize_t size, int flags)
    PyLockStatus PyThread_acquire_lock_timed(PyThread_type_lock lock, long long us, int may_be_interrupted) nogil
    PyObject* PyDict_GetItemWithError(object mapping, object key) except? NULL
    Py_ssize_t PyUnicode_GET_LENGTH(object text)
    object PyUnicode_AsUTF8String(object text)
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

include "native/hashing.pxi"
include "native/columns.pxi"
include "native/memory.pxi"
include "native/message.pxi"
include "native/reading.pxi"
include "native/locking.pxi"
include "native/timers.pxi"
include "native/sending.pxi"
include "native/loop_sending.pxi"
include "native/shared_memory.pxi"
include "native/batches.pxi"
include "native/gathering.pxi"
include "native/frames.pxi"
include "native/sockets.pxi"
include "native/requests.pxi"
include "native/fetched.pxi"
include "native/key_numbers.pxi"
include "native/key_offsets.pxi"
include "native/encoding.pxi"
include "native/kafka_numbers.pxi"
include "native/kafka_rows.pxi"
include "native/kafka_batches.pxi"
include "native/kafka_records.pxi"
