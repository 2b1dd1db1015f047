"""Compression of Kafka's record batches: gzip, snappy, lz4 and zstd.

`cramjam` has the last three. It is part of the extra `kafka` and is imported with the first batch
that needs it.

Owner: pure.

Invariants:
- Unpacking ends with an error at the first byte beyond the bound. No claimed size is believed.
- lz4 frames have independent blocks and snappy has the framing of xerial's library, because Kafka's
  Java clients read no others.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

from tailrace.format.crc32c import Readable

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
"""The names of `compression.type`, by their number in a batch's attributes."""
_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_BYTES = 64 << 10
_BLOCK_LENGTH = struct.Struct(">i")
_LZ4_LENGTH = struct.Struct("<I")
_LZ4_STORED = 1 << 31
_LZ4_START = b"\x04\x22\x4d\x18\x60"
"""Magic; version 1, independent blocks, no checksums, no size."""
_LZ4_BLOCKS = (
    (64 << 10, b"\x40\x82"),
    (256 << 10, b"\x50\xfb"),
    (1 << 20, b"\x60\x51"),
    (4 << 20, b"\x70\x73"),
)
"""(largest block, its byte in the descriptor and the descriptor's checksum)."""
_LZ4_BLOCK_MAX = {_LZ4_START + descriptor: size for size, descriptor in _LZ4_BLOCKS}
"""The largest block of a frame that begins like this."""
_FIRST_ROOM_BYTES = 64 << 10
_SPARE_MAX_BYTES = (4 << 20) + (32 << 10)
"""The largest block of lz4, packed, and records that do not shrink."""
_spare: list[bytearray] = []
"""At most one buffer of unpacked or of packed records, to use again: new memory costs as much as
unpacking.
"""


class CompressionError(ValueError):
    """The bytes are not of this compression."""


class TooLargeError(ValueError):
    """The bytes unpack to more than is allowed."""


def _library() -> Any:
    try:
        import cramjam
    except ImportError:
        raise CompressionError(
            "snappy, lz4 and zstd need the package cramjam, which is not installed; install "
            "tailrace[kafka]"
        ) from None
    return cramjam


def unpack(codec: int, data: memoryview, bytes_max: int) -> Readable:
    """The unpacked bytes of compressed records. `codec` is 0 to 4.

    Raises CompressionError, TooLargeError for more than `bytes_max`.
    """
    if codec == 0:
        if len(data) > bytes_max:
            raise TooLargeError(f"the records have {len(data)} bytes; {bytes_max} are allowed")
        return data
    if codec == 1:
        return _gunzip(data, bytes_max)
    if codec == 2:
        return _unsnap(data, bytes_max)
    if codec == 3:
        unpacked = _unpack_plain_lz4(data, bytes_max)
        if unpacked is not None:
            return unpacked
    return _decode(_library().lz4 if codec == 3 else _library().zstd, data, bytes_max)


def _too_large(bytes_max: int) -> TooLargeError:
    return TooLargeError(f"the records unpack to more than {bytes_max} bytes")


def _gunzip(data: memoryview, bytes_max: int) -> bytes:
    """All members of a gzip file, one after the other."""
    pieces, left, rest = [], bytes_max, bytes(data)
    try:
        while rest:
            member = zlib.decompressobj(wbits=31)
            piece = member.decompress(rest, left + 1)
            left -= len(piece)
            if left < 0:
                raise _too_large(bytes_max)
            if not member.eof:
                raise CompressionError("the gzip data is cut off")
            pieces.append(piece)
            rest = member.unused_data
    except zlib.error as error:
        raise CompressionError(f"the gzip data is damaged: {error}") from None
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _unsnap(data: memoryview, bytes_max: int) -> bytearray:
    """A block of snappy, or the blocks of xerial's framing."""
    if data[:8] != _XERIAL:
        unpacked = bytearray()
        _unsnap_block(data, unpacked, bytes_max)
        return unpacked
    unpacked, at = bytearray(), len(_XERIAL_HEADER)
    while at < len(data):
        if at + 4 > len(data):
            raise CompressionError("a snappy block is cut off")
        (length,) = _BLOCK_LENGTH.unpack_from(data, at)
        at += 4
        if not 0 < length <= len(data) - at:
            raise CompressionError(f"a snappy block claims {length} of {len(data) - at} bytes")
        _unsnap_block(data[at : at + length], unpacked, bytes_max)
        at += length
    return unpacked


def _unsnap_block(block: memoryview, unpacked: bytearray, bytes_max: int) -> None:
    snappy = _library().snappy
    try:
        size = snappy.decompress_raw_len(block)
        if size > bytes_max - len(unpacked):
            raise _too_large(bytes_max)
        start = len(unpacked)
        unpacked += bytes(size)
        with memoryview(unpacked) as view, view[start:] as target:
            done = snappy.decompress_raw_into(block, target) if size else 0
    except _library().DecompressionError as error:
        raise CompressionError(f"the snappy data is damaged: {error}") from None
    if done != size:
        raise CompressionError("the snappy data is damaged: its size is another")


def _unpack_plain_lz4(data: memoryview, bytes_max: int) -> memoryview | None:
    """The blocks of a frame as Kafka's clients write it: independent, without checksums and size.
    None: it is another frame, or it is damaged or too large, which `_decode` tells apart.

    The library unpacks large blocks of frames through a buffer that it makes anew each time, at a
    quarter of the speed.
    """
    block_max = _LZ4_BLOCK_MAX.get(bytes(data[: len(_LZ4_START) + 2]))
    if block_max is None:
        return None
    lz4, damaged = _library().lz4, _library().DecompressionError
    target = _buffer(min(max(_FIRST_ROOM_BYTES, 4 * len(data)), bytes_max))
    at, filled, end = len(_LZ4_START) + 2, 0, len(data) - 4
    while at <= end:
        (length,) = _LZ4_LENGTH.unpack_from(data, at)
        at += 4
        if not length:
            return memoryview(target)[:filled] if at == len(data) else None
        is_stored = bool(length & _LZ4_STORED)
        length &= ~_LZ4_STORED
        if length > min(end - at, block_max):
            return None
        block = data[at : at + length]
        at += length
        while True:
            room = min(block_max, bytes_max - filled, len(target) - filled)
            with memoryview(target) as view, view[filled : filled + room] as part:
                try:
                    if not is_stored:
                        done = lz4.decompress_block_into(block, part, output_len=room)
                    elif length <= room:
                        part[:length] = block
                        done = length
                    else:
                        raise damaged
                    break
                except damaged:
                    if room == min(block_max, bytes_max - filled):
                        return None
            target = _grown(target, filled, bytes_max)
        filled += done
    return None


def _buffer(room: int) -> bytearray:
    """A buffer of at least so many bytes, the spare one if it is large enough."""
    spare = _spare.pop() if _spare else b""
    return spare if isinstance(spare, bytearray) and len(spare) >= room else bytearray(room)


def _grown(target: bytearray, filled: int, bytes_max: int) -> bytearray:
    """A larger buffer with the filled bytes of another."""
    larger = bytearray(min(4 * len(target), bytes_max))
    larger[:filled] = memoryview(target)[:filled]
    return larger


def _decode(module: Any, data: memoryview, bytes_max: int) -> memoryview:
    """Unpack into more and more room, up to the bound."""
    room = max(_FIRST_ROOM_BYTES, 4 * len(data))
    spare = _spare.pop() if _spare else b""
    while True:
        room = min(max(room, len(spare)), bytes_max)
        target = spare if isinstance(spare, bytearray) and len(spare) >= room else bytearray(room)
        try:
            with memoryview(target) as view, view[:room] as part:
                done = module.decompress_into(data, part)
        except _library().DecompressionError as error:
            if "whole buffer" not in str(error):
                name = module.__name__.rsplit(".", 1)[-1]
                raise CompressionError(f"the {name} data is damaged: {error}") from None
            if room == bytes_max:
                raise _too_large(bytes_max) from None
            room *= 4
            continue
        return memoryview(target)[:done]


def release(unpacked: Readable) -> None:
    """Take back what `unpack` has returned, once it is not in use any more."""
    if isinstance(unpacked, memoryview) and isinstance(unpacked.obj, bytearray):
        buffer = unpacked.obj
        unpacked.release()
        _keep(buffer)


def _keep(buffer: bytearray) -> None:
    """Take a buffer that is not in use any more as the spare one."""
    if not _spare and len(buffer) <= _SPARE_MAX_BYTES:
        _spare.append(buffer)


def pack(codec: int, data: memoryview, room: int = 0) -> bytearray:
    """`room` zeros, and behind them the compressed records. `codec` is 0 to 4. Raises
    CompressionError without cramjam.
    """
    packed = bytearray(room)
    if codec == 0:
        packed += data
    elif codec == 1:
        packer = zlib.compressobj(wbits=31)
        packed += packer.compress(data)
        packed += packer.flush()
    elif codec == 2:
        _snap(data, packed)
    elif codec == 3:
        _lz4_frame(data, packed)
    else:
        packed += memoryview(_library().zstd.compress(data))
    return packed


def _snap(data: memoryview, packed: bytearray) -> None:
    snappy = _library().snappy
    packed += _XERIAL_HEADER
    for at in range(0, len(data), _XERIAL_BLOCK_BYTES):
        block = memoryview(snappy.compress_raw(data[at : at + _XERIAL_BLOCK_BYTES]))
        packed += _BLOCK_LENGTH.pack(len(block))
        packed += block


def _lz4_frame(data: memoryview, packed: bytearray) -> None:
    """A frame of independent blocks of the smallest size that holds the data, at most 4 MiB.

    Each block is made in the spare buffer. The library's own has as many bytes as the data: with
    the records in memory besides, the C library gave that memory back to the system after each
    batch, and took it again page by page, which cost half as much as the compression.
    """
    lz4 = _library().lz4
    size, descriptor = next(
        (block for block in _LZ4_BLOCKS if block[0] >= len(data)), _LZ4_BLOCKS[-1]
    )
    packed += _LZ4_START + descriptor
    target = _buffer(lz4.compress_block_bound(data[:size]))
    for at in range(0, len(data), size):
        piece = data[at : at + size]
        length = lz4.compress_block_into(piece, target, store_size=False)
        if length < len(piece):
            packed += _LZ4_LENGTH.pack(length)
            packed += memoryview(target)[:length]
        else:
            packed += _LZ4_LENGTH.pack(len(piece) | _LZ4_STORED)
            packed += piece
    packed += bytes(4)
    _keep(target)


def unpack_buffer(data: memoryview, size: int) -> bytearray:
    """Unpack a buffer of an Arrow batch, a frame of lz4 or zstd, to exactly `size` bytes.

    Raises CompressionError.
    """
    module = _library().lz4 if data[:4] == _LZ4_START[:4] else _library().zstd
    target = bytearray(size)
    try:
        done = module.decompress_into(data, target) if size else 0
    except _library().DecompressionError as error:
        raise CompressionError(f"a compressed buffer is damaged: {error}") from None
    if done != size:
        raise CompressionError(f"a compressed buffer unpacks to {done} bytes, not to {size}")
    return target
