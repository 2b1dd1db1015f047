"""KeyOffsets: the last offset of each distinct key, in a table of fixed size. Compaction decides
with it which records have a later one of the same key.

The compiled table keeps 128 bits of a hash for each key and not the key, so that its memory does
not depend on the keys' lengths. The hash is keyed by a secret: who chooses keys cannot choose two
with one hash (docs/adr/0049-the-cleaner.md). This one keeps the keys, and has the same room.

Owner: one thread at a time.

Invariants:
- At most four fifths of the slots are taken. `put` stops before the first new key without room.
- A key's tag (32 bits of its hash) does not change while the object lives. Tags are spread evenly
  and differ between objects.
- A call that raises ValueError may have put keys of the rows before.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tailrace.kernel.reference_keys import TAGS_END, keyed_rows

if TYPE_CHECKING:
    from tailrace.kernel import BatchShape

SLOT_BYTES = 24
"""Bytes of a slot of the compiled table."""


class KeyOffsets:
    """Last offsets of distinct keys."""

    def __init__(self, slot_count: int, secret: bytes | None = None) -> None:
        """`secret` are 16 bytes that choose the hashes; None: random ones."""
        secret = os.urandom(16) if secret is None else secret
        if len(secret) != 16:
            raise ValueError(f"a secret has 16 bytes, not {len(secret)}")
        if slot_count < 2:
            raise ValueError(f"a table has at least two slots, not {slot_count}")
        self._seed = zlib.crc32(secret)
        self._last: dict[bytes, int] = {}
        self._count_max = max(1, slot_count * 4 // 5)

    def __len__(self) -> int:
        return len(self._last)

    @property
    def room(self) -> int:
        """The number of further keys that can be put."""
        return self._count_max - len(self._last)

    def clear(self) -> None:
        """Forget all keys."""
        self._last.clear()

    def put(
        self,
        validity: Any,
        ends: Any,
        data: Any,
        start: int,
        count: int,
        width: int,
        offsets: Any,
        low: int = 0,
        high: int = TAGS_END,
        superseded: Any = None,
        base: int = 0,
    ) -> int:
        """Raise each row's key to the row's offset (int64, one for each row). Rows without a key,
        or with a tag outside `low` to `high - 1`, are passed over. Returns how many rows were
        handled: fewer than `count` if there is no room.

        `superseded`: bits of the offsets from `base` on, the lowest of a byte first. The bit of
        each offset is set that another one of the same key exceeds; offsets without a bit are
        left out.

        Rows are `start` to `start + count - 1` of an Arrow column: its validity bits (or None), its
        32-bit offsets (None: each key has `width` bytes) and its data. Raises ValueError for rows
        outside these buffers.
        """
        numbers = _offsets_of(offsets, count)
        bits = memoryview(b"" if superseded is None else superseded).cast("B")
        for row, key in self._keys(validity, ends, data, start, count, width, low, high):
            known, number = self._last.get(key), numbers[row]
            if known is None and not self.room:
                return row
            self._last[key] = number if known is None else max(known, number)
            if known is not None and known != number:
                older = min(known, number) - base
                if 0 <= older < len(bits) * 8:
                    bits[older >> 3] |= 1 << (older & 7)
        return count

    def put_stored(
        self,
        data: Any,
        position: int,
        seed: int,
        following: int,
        end: int,
        shape: BatchShape,
        key_node: int,
        schema_id: int,
        superseded: Any,
        base: int,
        low: int = 0,
        high: int = TAGS_END,
    ) -> tuple[int, int]:
        """`put` the keys of the stored batches of one segment from `position` in `data` on, up to
        the first that has no room, or needs the general way. Returns where that begins, and its
        offset.

        `following` is the first batch's offset, `end` that of the segment's end. `key_node` is the
        node of the column with keys in `shape`, the schema of the batches. Batches of another
        schema are left, if `schema_id` is not -1. The compiled function takes plain batches that
        lie in `data` as a whole, uncompressed and of no transaction. It has verified both
        checksums and the structure of each that it takes. Raises ValueError for offsets of keys
        outside their data. This one takes none.
        """
        return position, following

    def mark_latest(
        self,
        validity: Any,
        ends: Any,
        data: Any,
        start: int,
        count: int,
        width: int,
        offsets: Any,
        out: Any,
        low: int = 0,
        high: int = TAGS_END,
    ) -> None:
        """Set the byte in `out` of each row to 0 whose key has a higher offset than the row. The
        other bytes are left as they are. The arguments are those of `put`.
        """
        if out is None:
            raise ValueError("there is nowhere to write")
        numbers, found = _offsets_of(offsets, count), memoryview(out).cast("B")
        if len(found) < count:
            raise ValueError("out is shorter than the rows")
        for row, key in self._keys(validity, ends, data, start, count, width, low, high):
            if self._last.get(key, -1) > numbers[row]:
                found[row] = 0

    def _keys(
        self,
        validity: Any,
        ends: Any,
        data: Any,
        start: int,
        count: int,
        width: int,
        low: int,
        high: int,
    ) -> Iterator[tuple[int, bytes]]:
        """The row and the key of each row that has one in the range of tags. Raises ValueError."""
        for row, key in keyed_rows(validity, ends, data, start, count, width):
            if low or high < TAGS_END:
                if low <= zlib.crc32(key, self._seed) < high:
                    yield row, key
            else:
                yield row, key


def _offsets_of(offsets: Any, count: int) -> memoryview:
    numbers = memoryview(offsets).cast("B")
    if len(numbers) < count * 8:
        raise ValueError("the offsets of the records are fewer than the rows")
    return numbers[: len(numbers) // 8 * 8].cast("q")
