"""Decompression of Arrow's compressed buffers, a piece at a time, with the host's libzstd and
liblz4.

A front does not import pyarrow (150 ms and 80 MB), and needs a codec only for timestamp lookups in
compressed batches. The libraries are loaded at the first such batch. Debian and Red Hat always have
both, because their package managers need them. On a host without them `unpacker_for` returns None,
and the response says that it is not exact.

Owner: one front. Only the loaded libraries are kept.

Invariants:
- A call produces at most PIECE_BYTES. A codec's own memory is at most WINDOW_MAX_BYTES.
- Bytes that are not a frame raise UnpackError, and nothing outside the pieces is read or written.
- A buffer is one frame, and no codec is called after its end. Thousands of empty frames would hold
  the loop for 0.1 s. libzstd also accepts frames of versions before 1.0 there, which WINDOW_LOG_MAX
  does not bound.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Protocol

PIECE_BYTES = 64 << 10
WINDOW_LOG_MAX = 23
WINDOW_MAX_BYTES = 1 << WINDOW_LOG_MAX
"""RFC 8878 asks every decoder to support windows of 8 MiB. libzstd's own default is 128 MiB."""
_ZSTD_MAGIC = 0xFD2FB528.to_bytes(4, "little")
_LZ4_MAGIC = 0x184D2204.to_bytes(4, "little")
MAGIC_BYTES = 4
_WINDOW_LOG_PARAMETER = 100
"""`ZSTD_d_windowLogMax` in zstd.h."""
_LZ4F_VERSION = 100


class UnpackError(ValueError):
    """The bytes are not a valid frame."""


_MORE_THAN_A_FRAME = "a compressed buffer has bytes after its frame"


class Unpacker(Protocol):
    """Decompression state of one frame."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decompress the frame's next bytes and yield the output in pieces. Raises UnpackError."""

    def close(self) -> None:
        """Free the codec's memory. Call it once."""


def unpacker_for(magic: bytes) -> Unpacker | None:
    """Return the codec of a frame that begins with these MAGIC_BYTES, or None if this host has
    none.

    Raises UnpackError for unknown bytes.
    """
    if magic not in (_ZSTD_MAGIC, _LZ4_MAGIC):
        raise UnpackError("a compressed buffer is neither a zstd nor an lz4 frame")
    library = _library("libzstd.so.1" if magic == _ZSTD_MAGIC else "liblz4.so.1")
    if library is None:
        return None
    return _Zstd(library) if magic == _ZSTD_MAGIC else _Lz4(library)


@cache
def _library(name: str) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    if name.startswith("libzstd"):
        library.ZSTD_createDStream.restype = pointer
        library.ZSTD_freeDStream.argtypes = [pointer]
        library.ZSTD_DCtx_setParameter.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
        library.ZSTD_DCtx_setParameter.restype = size
        library.ZSTD_decompressStream.argtypes = [
            pointer,
            ctypes.POINTER(_Buffer),
            ctypes.POINTER(_Buffer),
        ]
        library.ZSTD_decompressStream.restype = size
        library.ZSTD_isError.argtypes = [size]
    else:
        library.LZ4F_createDecompressionContext.argtypes = [ctypes.POINTER(pointer), ctypes.c_uint]
        library.LZ4F_createDecompressionContext.restype = size
        library.LZ4F_freeDecompressionContext.argtypes = [pointer]
        library.LZ4F_decompress.argtypes = [
            pointer,
            pointer,
            ctypes.POINTER(size),
            pointer,
            ctypes.POINTER(size),
            pointer,
        ]
        library.LZ4F_decompress.restype = size
        library.LZ4F_isError.argtypes = [size]
    return library


class _Buffer(ctypes.Structure):
    """`ZSTD_inBuffer` and `ZSTD_outBuffer`, which have the same layout."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("position", ctypes.c_size_t))


class _Zstd:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._stream = library.ZSTD_createDStream()
        if not self._stream:
            raise MemoryError("no memory for a zstd stream")
        library.ZSTD_DCtx_setParameter(self._stream, _WINDOW_LOG_PARAMETER, WINDOW_LOG_MAX)
        self._target = ctypes.create_string_buffer(PIECE_BYTES)
        self._has_ended = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """See `Unpacker`."""
        source = _Buffer(ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p), len(data), 0)
        while True:
            if self._has_ended:
                if source.position < len(data):
                    raise UnpackError(_MORE_THAN_A_FRAME)
                return
            target = _Buffer(ctypes.addressof(self._target), PIECE_BYTES, 0)
            before = source.position
            result = self._library.ZSTD_decompressStream(
                self._stream, ctypes.byref(target), ctypes.byref(source)
            )
            if self._library.ZSTD_isError(result):
                raise UnpackError("a compressed buffer is not a valid zstd frame")
            self._has_ended = not result
            if target.position:
                yield ctypes.string_at(self._target, target.position)
            if target.position < PIECE_BYTES and source.position in (before, len(data)):
                return

    def close(self) -> None:
        """See `Unpacker`."""
        self._library.ZSTD_freeDStream(self._stream)


class _Lz4:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._context = ctypes.c_void_p()
        if library.LZ4F_isError(
            library.LZ4F_createDecompressionContext(ctypes.byref(self._context), _LZ4F_VERSION)
        ):
            raise MemoryError("no memory for an lz4 context")
        self._target = ctypes.create_string_buffer(PIECE_BYTES)
        self._has_ended = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """See `Unpacker`."""
        source = ctypes.create_string_buffer(data, len(data))
        position = 0
        while True:
            if self._has_ended:
                if position < len(data):
                    raise UnpackError(_MORE_THAN_A_FRAME)
                return
            made, taken = ctypes.c_size_t(PIECE_BYTES), ctypes.c_size_t(len(data) - position)
            result = self._library.LZ4F_decompress(
                self._context,
                self._target,
                ctypes.byref(made),
                ctypes.addressof(source) + position,
                ctypes.byref(taken),
                None,
            )
            if self._library.LZ4F_isError(result):
                raise UnpackError("a compressed buffer is not a valid lz4 frame")
            self._has_ended = not result
            position += taken.value
            if made.value:
                yield ctypes.string_at(self._target, made.value)
            if made.value < PIECE_BYTES and (position == len(data) or not taken.value):
                return

    def close(self) -> None:
        """See `Unpacker`."""
        self._library.LZ4F_freeDecompressionContext(self._context)
