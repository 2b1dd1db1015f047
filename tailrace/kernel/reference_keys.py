"""KeyNumbers: gives each distinct key a number, from 0 on, in the order of first appearance.

It serves whatever is kept once for each key of a topic: arrays beside it, indexed by number, take
the rest. Keys are compared byte for byte; the hash alone decides nothing.

Owner: one thread at a time.

Invariants:
- Equal keys have one number. Numbers are dense, 0 to `len - 1`.
- A key's tag (32 bits of its hash) does not change while the object lives. Tags are spread evenly,
  differ between objects, and differ from those of the compiled kernel.
- A call that raises ValueError may have numbered keys of the rows before.
"""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from collections.abc import Iterator
from typing import Any

TAGS_END = 1 << 32
"""Tags are below this."""
KEY_OVERHEAD_BYTES = 120
"""About what a dict's entry and a short bytes object take."""


def keyed_rows(
    validity: Any, ends: Any, data: Any, start: int, count: int, width: int
) -> Iterator[tuple[int, bytes]]:
    """The row and the key of each row that has one, of an Arrow column; see `KeyNumbers.numbers`.
    Raises ValueError for rows outside these buffers.
    """
    valid = None if validity is None else memoryview(validity).cast("B")
    cells = memoryview(b"") if data is None else memoryview(data).cast("B")
    if start < 0 or count < 0:
        raise ValueError("the rows are outside the column")
    if valid is not None and len(valid) * 8 < start + count:
        raise ValueError("the validity bits are fewer than the rows")
    edges: Any
    if ends is not None:
        view = memoryview(ends).cast("B")
        if len(view) < (start + count + 1) * 4 and count:
            raise ValueError("the offsets are fewer than the rows")
        edges = struct.unpack_from(f"<{count + 1}i", view, start * 4) if count else (0,)
    elif count and (width <= 0 or (start + count) * width > len(cells)):
        raise ValueError("the rows are outside the column")
    else:
        edges = range(start * width, (start + count) * width + 1, width or 1)
    for row in range(count):
        at = start + row
        if valid is not None and not valid[at >> 3] >> (at & 7) & 1:
            continue
        begin, end = edges[row], edges[row + 1]
        if not 0 <= begin <= end <= len(cells):
            raise ValueError("the offsets are outside the data")
        yield row, bytes(cells[begin:end])


class KeyNumbers:
    """Numbers of distinct keys."""

    def __init__(self, secret: bytes | None = None) -> None:
        """`secret` are 16 bytes that choose the tags; None: random ones."""
        secret = os.urandom(16) if secret is None else secret
        if len(secret) != 16:
            raise ValueError(f"a secret has 16 bytes, not {len(secret)}")
        self._seed = zlib.crc32(secret)
        self._numbers: dict[bytes, int] = {}
        self._key_bytes = 0

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def byte_count(self) -> int:
        """The memory that is taken, in bytes."""
        return self._key_bytes + len(self._numbers) * KEY_OVERHEAD_BYTES

    def numbers(
        self,
        validity: Any,
        ends: Any,
        data: Any,
        start: int,
        count: int,
        width: int,
        out: Any,
        low: int = 0,
        high: int = TAGS_END,
    ) -> None:
        """Write the number of each row's key to `out` (int32), -1 for a row without a key or with
        a tag outside `low` to `high - 1`. New keys get numbers.

        Rows are `start` to `start + count - 1` of an Arrow column: its validity bits (or None), its
        32-bit offsets (None: each key has `width` bytes) and its data. Raises ValueError for rows
        outside these buffers, OverflowError for more keys than an int32 counts.
        """
        found = memoryview(out).cast("B").cast("i")
        if len(found) < count:
            raise ValueError("out is shorter than the rows")
        found[:count] = array("i", [-1]) * max(count, 0)
        for row, key in keyed_rows(validity, ends, data, start, count, width):
            if (low or high < TAGS_END) and not low <= self._tag(key) < high:
                continue
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = len(self._numbers)
                self._key_bytes += len(key)
            found[row] = number

    def _tag(self, key: bytes) -> int:
        return zlib.crc32(key, self._seed)

    def find(self, key: bytes) -> int:
        """The number of this key, -1 if it has none."""
        if not isinstance(key, bytes):
            raise TypeError(f"a key is bytes, not {type(key).__name__}")
        return self._numbers.get(key, -1)

    def tags(self) -> bytes:
        """The tag of each number (uint32)."""
        return struct.pack(f"<{len(self._numbers)}I", *map(self._tag, self._numbers))

    def retain(self, kept: Any) -> None:
        """Keep the keys of these numbers (int32, ascending), with new numbers in the same order.

        Raises ValueError.
        """
        numbers = memoryview(kept).cast("B").cast("i").tolist()
        if any(b <= a for a, b in zip([-1, *numbers], numbers, strict=False)) or (
            numbers and numbers[-1] >= len(self._numbers)
        ):
            raise ValueError("the numbers to keep must ascend, and must exist")
        keys = list(self._numbers)
        self._numbers = {keys[number]: n for n, number in enumerate(numbers)}
        self._key_bytes = sum(map(len, self._numbers))

    def keys(self) -> tuple[bytes, bytes]:
        """All keys by number, as the offsets (int64) and the data of a large_binary array."""
        ends, position = [0], 0
        for key in self._numbers:
            position += len(key)
            ends.append(position)
        return struct.pack(f"<{len(ends)}q", *ends), b"".join(self._numbers)
