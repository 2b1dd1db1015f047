"""Frames of lz4 as clients write them are unpacked block by block, with the library's verdict."""

from __future__ import annotations

import random
import struct

import cramjam
import pytest

from netfront.kafka.records import compression
from netfront.kafka.records.compression import (
    CompressionError,
    TooLargeError,
    release,
    unpack,
)

LZ4 = 3
ROOM = 1 << 20


def frame(data: bytes, block_bytes: int, chance: random.Random) -> bytes:
    """A frame of independent blocks, some of them stored as they are."""
    out = bytearray(b"\x04\x22\x4d\x18\x60")
    out += dict(compression._LZ4_BLOCKS)[block_bytes]
    for at in range(0, len(data), block_bytes):
        piece = data[at : at + block_bytes]
        packed = bytes(cramjam.lz4.compress_block(piece, store_size=False))
        is_stored = chance.random() < 0.2
        size = len(piece) | 1 << 31 if is_stored else len(packed)
        out += struct.pack("<I", size) + (piece if is_stored else packed)
    return bytes(out + bytes(4))


@pytest.mark.parametrize("block_bytes", [64 << 10, 256 << 10, 1 << 20, 4 << 20])
def test_blocks_of_each_size_are_unpacked_and_the_bound_holds(block_bytes: int) -> None:
    chance = random.Random(block_bytes)
    for _ in range(20):
        data = chance.randbytes(chance.randrange(1, 300)) * chance.randrange(1, 3_000)
        data = data[: chance.randrange(1, 700_000)]
        packed = memoryview(frame(data, block_bytes, chance))
        assert bytes(cramjam.lz4.decompress(packed)) == data
        found = compression._unpack_plain_lz4(packed, ROOM)
        assert found is not None
        assert bytes(found) == data
        release(found)
        assert bytes(unpack(LZ4, packed, len(data))) == data
        with pytest.raises((TooLargeError, CompressionError)):
            unpack(LZ4, packed, len(data) - 1)


def test_damaged_frames_have_the_verdict_of_the_library() -> None:
    chance = random.Random(11)
    for _ in range(1_000):
        data = chance.randbytes(chance.randrange(1, 50)) * chance.randrange(1, 100)
        damaged = bytearray(frame(data, 64 << 10, chance))
        for _ in range(chance.choice((1, 2, 5))):
            at = chance.randrange(len(damaged) + 1)
            kind = chance.randrange(3)
            if kind == 0:
                damaged[at : at + 1] = chance.randbytes(1)
            elif kind == 1:
                del damaged[at : at + chance.randrange(1, 5)]
            else:
                damaged[at:at] = chance.randbytes(3)
        view = memoryview(bytes(damaged))
        assert verdict(lambda view=view: unpack(LZ4, view, ROOM)) == verdict(
            lambda view=view: compression._decode(cramjam.lz4, view, ROOM)
        )


def verdict(call: object) -> bytes | str:
    """The unpacked bytes, or the kind of the error."""
    assert callable(call)
    try:
        return bytes(call())
    except (CompressionError, TooLargeError) as error:
        return type(error).__name__
