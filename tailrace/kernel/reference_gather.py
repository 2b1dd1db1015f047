"""Gathers cells of Arrow columns into one column, and sorts rows by the partition of their key, for
the Spark sink.

This is the reference in pyarrow and numpy. pyarrow's `take` gathers from one array, so rows of
several arrays are copied again by the concatenation, and again into a message. The compiled kernel
copies a cell once, into the message.

Owner: pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class GatheredCells:
    """A column of bytes or text, gathered from `columns` (32-bit offsets): each gives the rows in
    its buffer of int64, or all of them for None, one column after the other.

    Its length is that of the cells' bytes. They are copied by `data`, or into a message by
    `lay_message`: until then the columns live on, and must not change.
    """

    def __init__(self, columns: list[pa.Array], rows: list[Any]) -> None:
        """Raises ValueError for a row that a column does not have, OverflowError above 2 GiB."""
        import numpy as np
        import pyarrow as pa

        if len(columns) != len(rows):
            raise ValueError(f"{len(columns)} columns and {len(rows)} lists of rows; give one each")
        parts = []
        for column, named in zip(columns, rows, strict=True):
            plain = column.cast(pa.binary())
            if named is None:
                parts.append(plain)
                continue
            chosen = np.frombuffer(named, np.int64)
            if len(chosen) and not (chosen.min() >= 0 and chosen.max() < len(column)):
                raise ValueError(f"there are rows 0 to {len(column) - 1}, not all that are named")
            parts.append(plain.take(pa.array(chosen)))
        if sum(part.nbytes for part in parts) > 2**31 - 1:
            raise OverflowError("the cells have more than 2147483647 bytes")
        cells = pa.concat_arrays(parts) if parts else pa.array([], pa.binary())
        bits = np.packbits(
            np.asarray(cells.is_valid().to_numpy(zero_copy_only=False), bool), bitorder="little"
        ).tobytes()
        filled = cells.fill_null(b"")
        _, offsets_buffer, data_buffer = filled.buffers()
        offsets = (
            np.frombuffer(offsets_buffer, np.int32, len(filled) + 1, filled.offset * 4)
            if len(filled)
            else np.zeros(1, np.int32)
        )
        self._data = (
            b"" if data_buffer is None else memoryview(data_buffer)[offsets[0] : offsets[-1]]
        )
        self.offsets = bytearray((offsets - offsets[0]).tobytes())
        """Arrow's offsets."""
        self.valid = bytearray(bits) if cells.null_count else None
        """Arrow's validity bitmap; None without a null."""
        self.null_count = cells.null_count

    def __len__(self) -> int:
        return len(self._data)

    def data(self) -> bytearray:
        """The bytes of all cells, one after the other."""
        return bytearray(self._data)


def rows_by_partition(column: pa.Array, partition_count: int) -> tuple[bytearray, list[int]]:
    """(numbers of the rows as int64, counts): the rows of partition 0 first, each partition's
    ascending, then those without a key. `counts` has the rows of each partition, and last those
    without a key.

    `column`: keys, bytes or text. The partition is Kafka's: murmur2, without its sign bit, modulo
    `partition_count`. Raises ValueError.
    """
    import numpy as np
    import pyarrow as pa

    if not 0 < partition_count < 1 << 20:
        raise ValueError(f"{partition_count} partitions")
    plain = column.cast(pa.binary())
    numbers = (hashed(plain, murmur2s) & 0x7FFFFFFF) % partition_count
    if plain.null_count:
        is_valid = np.asarray(plain.is_valid().to_numpy(zero_copy_only=False))
        numbers = np.where(is_valid, numbers, partition_count)
    counts = np.bincount(numbers, minlength=partition_count + 1).tolist()
    return bytearray(np.argsort(numbers, kind="stable").astype(np.int64).tobytes()), counts


def hashed(
    keys: pa.Array, function: Callable[[Bytes], np.ndarray[Any, Any]]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A hash of each key. `function` takes keys of one length, as rows of a matrix."""
    import numpy as np

    _, offsets_buffer, data_buffer = keys.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32, len(keys) + 1, keys.offset * 4).astype(
        np.int64
    )
    data = (
        np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    )
    starts, lengths = offsets[:-1], np.diff(offsets)
    if len(keys) and (lengths == lengths[0]).all():  # one contiguous matrix
        return function(data[offsets[0] : offsets[-1]].reshape(len(keys), lengths[0])).astype(
            np.int64
        )
    numbers = np.empty(len(keys), np.int64)
    for length in np.unique(lengths):
        chosen = np.flatnonzero(lengths == length)
        matrix = (
            data[starts[chosen, None] + np.arange(length)]
            if length
            else np.empty((len(chosen), 0), np.uint8)
        )
        numbers[chosen] = function(matrix)
    return numbers


def murmur2s(keys: Bytes) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """`tailrace.client.records.partitioners.murmur2` of keys of one length, as rows of a matrix.

    The algorithm is A. Appleby's MurmurHash2 with Kafka's seed.
    """
    import numpy as np

    count, length = keys.shape
    m = np.uint32(0x5BD1E995)
    hashed = np.full(count, (0x9747B28C ^ length) & 0xFFFFFFFF, np.uint32)
    whole = length // 4 * 4
    words = (
        np.ascontiguousarray(keys[:, :whole]).view("<u4")
        if whole
        else np.empty((count, 0), np.uint32)
    )
    for word in words.T:
        k = word * m
        k ^= k >> np.uint32(24)
        hashed = hashed * m ^ k * m
    for position in range(length - 1, whole - 1, -1):
        hashed ^= keys[:, position].astype(np.uint32) << np.uint32(8 * (position - whole))
    if length > whole:
        hashed *= m
    hashed ^= hashed >> np.uint32(13)
    hashed *= m
    hashed ^= hashed >> np.uint32(15)
    return hashed
