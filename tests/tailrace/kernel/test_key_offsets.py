"""KeyOffsets against a dictionary: the compiled kernel and its reference."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace import kernel
from tailrace.batch import arrow_codec
from tailrace.format.record_batch.arrow_metadata import read_schema
from tailrace.format.record_batch.batch_header import (
    HEADER_BYTES,
    header_position,
    verify_batch,
)
from tailrace.format.record_batch.header_stamps import seal_header
from tailrace.format.schema import DEFAULT_SCHEMA
from tailrace.kernel import reference_offsets
from tailrace.kernel.reference_arrow import default_rows
from tailrace.kernel.reference_keys import TAGS_END
from tests.kit.batches import SEED

NATIVE = kernel.load_compiled()
KINDS: list[Any] = [
    reference_offsets.KeyOffsets,
    *([NATIVE.KeyOffsets] if NATIVE is not None else []),
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__module__))
KEY = st.none() | st.binary(max_size=20) | st.binary(min_size=1, max_size=1)
COLUMNS = st.lists(st.lists(KEY, max_size=80), max_size=6)
SECRET = b"0123456789abcdef"


def put(table: Any, keys: pa.Array, offsets: list[int], low: int = 0, high: int = TAGS_END) -> int:
    buffers = keys.buffers()
    return int(
        table.put(
            buffers[0], buffers[1], buffers[2], keys.offset, len(keys), 0,
            np.array(offsets, np.int64), low, high,
        )
    )  # fmt: skip


def latest(
    table: Any, keys: pa.Array, offsets: list[int], low: int = 0, high: int = TAGS_END
) -> list[int]:
    buffers, out = keys.buffers(), np.ones(len(keys), np.uint8)
    table.mark_latest(
        buffers[0], buffers[1], buffers[2], keys.offset, len(keys), 0,
        np.array(offsets, np.int64), out, low, high,
    )  # fmt: skip
    return out.tolist()


@every_kind
@given(COLUMNS, st.integers(0, 5))
def test_a_record_is_the_latest_if_no_later_one_has_its_key(
    kind: Any, columns: list[list[bytes | None]], cut: int
) -> None:
    table, model = kind(1024, SECRET), dict[bytes, int]()
    at, seen = 10, list[tuple[pa.Array, list[int]]]()
    for keys in columns:
        column = pa.array(keys, pa.binary()).slice(min(cut, len(keys)))
        offsets = list(range(at, at + 2 * len(column), 2))
        at += 2 * len(column) + 1
        assert put(table, column, offsets) == len(column)
        model.update(
            {k: o for k, o in zip(column.to_pylist(), offsets, strict=True) if k is not None}
        )
        seen.append((column, offsets))
    assert len(table) == len(model)
    for column, offsets in seen:
        assert latest(table, column, offsets) == [
            int(key is None or model[key] == offset)
            for key, offset in zip(column.to_pylist(), offsets, strict=True)
        ]


@every_kind
def test_a_full_table_stops_before_the_first_key_without_room(kind: Any) -> None:
    table = kind(10, SECRET)
    keys = pa.array([b"k%d" % (n // 2) for n in range(40)], pa.binary())
    assert put(table, keys, list(range(40))) == 16
    assert (len(table), table.room) == (8, 0)
    assert put(table, keys.slice(0, 16), list(range(100, 116))) == 16  # these keys are there
    assert latest(table, keys.slice(0, 18), list(range(100, 118))) == [0, 1] * 8 + [1, 1]
    table.clear()
    assert (len(table), table.room) == (0, 8)
    assert latest(table, keys, [0] * 40) == [1] * 40


@every_kind
def test_ranges_of_tags_divide_the_keys(kind: Any) -> None:
    keys = pa.array([b"k%d" % (n % 500) for n in range(1_000)], pa.binary())
    offsets = list(range(1_000))
    edges = [0, 1 << 30, 3 << 30, TAGS_END]
    out = np.ones(1_000, np.uint8)
    count = 0
    for low, high in itertools.pairwise(edges):
        table = kind(1024, SECRET)
        assert put(table, keys, offsets, low, high) == 1_000
        assert 50 < len(table) < 400
        count += len(table)
        out &= np.array(latest(table, keys, offsets, low, high), np.uint8)
    assert count == 500
    assert out.tolist() == [0] * 500 + [1] * 500


@every_kind
def test_a_lower_offset_does_not_take_a_higher_ones_place(kind: Any) -> None:
    table, keys = kind(16, SECRET), pa.array([b"a", b"a"], pa.binary())
    put(table, keys, [7, 3])
    assert latest(table, keys, [7, 3]) == [1, 0]


@every_kind
def test_keys_of_no_bytes_of_a_megabyte_and_of_a_fixed_width(kind: Any) -> None:
    keys = pa.array([b"", b"x" * (1 << 20), b"", b"x" * (1 << 20) + b"y"], pa.binary())
    table = kind(16, SECRET)
    put(table, keys, [0, 1, 2, 3])
    assert latest(table, keys, [0, 1, 2, 3]) == [0, 1, 1, 1]
    table, column = kind(16, SECRET), pa.array([5, 6, None, 5], pa.int64())
    buffers, offsets, out = column.buffers(), np.arange(4), np.ones(4, np.uint8)
    table.put(buffers[0], None, buffers[1], 0, 4, 8, offsets)
    table.mark_latest(buffers[0], None, buffers[1], 0, 4, 8, offsets, out)
    assert out.tolist() == [0, 1, 1, 1]


@every_kind
def test_rows_outside_the_buffers_are_refused(kind: Any) -> None:
    table, four = kind(16, SECRET), np.arange(4)
    ends = np.array([0, 1, 9], np.int32)
    for arguments in (
        (None, ends, b"ab", 0, 2, 0, four),
        (None, ends, b"ab", 1, 2, 0, four),
        (None, None, b"abcd", 0, 3, 2, four),
        (b"", ends, b"ab", 0, 1, 0, four),
        (None, None, b"abcd", 0, 2, 2, four[:1]),
        (None, None, b"abcd", -1, 2, 2, four),
    ):
        with pytest.raises(ValueError, match=r"outside|fewer"):
            table.put(*arguments)
    with pytest.raises(ValueError, match="shorter"):
        table.mark_latest(None, None, b"abcd", 0, 2, 2, four, bytearray(1))
    with pytest.raises(ValueError, match="slots"):
        kind(1, SECRET)
    with pytest.raises(ValueError, match="secret"):
        kind(16, b"short")


@every_kind
def test_a_secret_decides_which_keys_come_first(kind: Any) -> None:
    """The hashes of one table tell nothing of another's: no collision can be prepared."""
    keys = pa.array([b"k%d" % n for n in range(64)], pa.binary())
    halves = []
    for secret in (SECRET, b"another secret!!"):
        table = kind(256, secret)
        put(table, keys, list(range(64)), 0, 1 << 31)
        halves.append([n == 0 for n in latest(table, keys, [-1] * 64)])
    assert halves[0] != halves[1]


@pytest.mark.skipif(NATIVE is None, reason="the collision is one of the compiled kernel's hash")
@pytest.mark.parametrize("pair", [(34345, 119081), (157701, 218321), (9504, 237779)])
def test_two_keys_with_one_tag_are_two_keys(pair: tuple[int, int]) -> None:
    """A planted collision, found among 250,000 keys for this secret: tables and ranges go by the
    tag, and the rest of the hash tells the keys apart.
    """
    table = KINDS[-1](16, SECRET)
    keys = pa.array([number.to_bytes(8, "little") for number in pair], pa.binary())
    assert put(table, keys, [10, 20]) == 2
    low, high = 0, TAGS_END
    while high - low > 1:  # no range of tags parts them
        middle = (low + high) // 2
        first, second = latest(table, keys, [0, 0], low, middle)
        assert first == second, "this kernel has another hash: look for another pair"
        low, high = (middle, high) if first else (low, middle)
    assert len(table) == 2
    assert latest(table, keys, [10, 20]) == [1, 1]
    assert latest(table, keys, [9, 19]) == [0, 0]
    assert put(table, keys[:1], [30]) == 1
    assert latest(table, keys, [10, 20]) == [0, 1]


@every_kind
@given(COLUMNS, st.integers(0, 30))
def test_put_marks_the_offsets_that_later_ones_of_their_keys_exceed(
    kind: Any, columns: list[list[bytes | None]], base: int
) -> None:
    """Offsets before the first bit, and behind the last, have none."""
    table, model, superseded = kind(1024, SECRET), dict[bytes, int](), set[int]()
    bits, at = bytearray(16), 10
    for keys in columns:
        offsets = list(range(at, at + 2 * len(keys), 2))
        at += 2 * len(keys) + 1
        buffers = pa.array(keys, pa.binary()).buffers()
        table.put(
            buffers[0], buffers[1], buffers[2], 0, len(keys), 0, np.array(offsets, np.int64), 0,
            TAGS_END, bits, base,
        )  # fmt: skip
        for key, offset in zip(keys, offsets, strict=True):
            if key is not None and key in model:
                superseded.add(model[key])
            if key is not None:
                model[key] = offset
    marked = {n + base for n in range(128) if bits[n >> 3] >> (n & 7) & 1}
    assert marked == {offset for offset in superseded if base <= offset < base + 128}


def stored(keys: list[bytes | None], base: int, **fields: Any) -> bytes:
    """A batch as a segment has it."""
    rows = default_rows([1] * len(keys), keys, [b"value"] * len(keys), None)
    compression = fields.pop("compression", "none")
    batch = arrow_codec.encode(
        rows, schema_id=3, seed=SEED, compression=compression, first_timestamp_us=1,
        max_timestamp_us=1,
    )  # fmt: skip
    header = verify_batch(memoryview(batch), SEED)
    crc = fields.pop("header_crc32c", None)
    for name, value in {"base_offset": base, **fields}.items():
        setattr(header, name, value)
    position = header_position(batch)
    batch[position : position + HEADER_BYTES] = header.to_bytes()
    if crc is None:
        seal_header(memoryview(batch), position, 0, SEED)
    return bytes(batch)


native_only = pytest.mark.skipif(NATIVE is None, reason="nothing is compiled here")
SHAPE_NODE = 1


def put_stored(table: Any, data: bytes, following: int, end: int = 1 << 40, **more: Any) -> Any:
    assert NATIVE is not None
    shape = NATIVE.BatchShape(read_schema(bytes(DEFAULT_SCHEMA.serialize())))
    return table.put_stored(
        data, more.pop("position", 0), SEED, following, end, shape, SHAPE_NODE,
        more.pop("schema_id", -1), more.pop("bits", None), 0,
    )  # fmt: skip


@native_only
@given(COLUMNS)
def test_keys_of_stored_batches_are_put_as_those_of_their_columns(
    columns: list[list[bytes | None]],
) -> None:
    assert NATIVE is not None
    table, other = NATIVE.KeyOffsets(1024, SECRET), NATIVE.KeyOffsets(1024, SECRET)
    bits, expected = bytearray(100), bytearray(100)
    data, following = b"", 40
    for keys in filter(None, columns):
        data += stored(keys, following)
        buffers = pa.array(keys, pa.binary()).buffers()
        offsets = np.arange(following, following + len(keys))
        other.put(
            buffers[0], buffers[1], buffers[2], 0, len(keys), 0, offsets, 0, TAGS_END, expected, 0
        )
        following += len(keys)
    assert put_stored(table, data, 40, bits=bits) == (len(data), following)
    assert (len(table), bits) == (len(other), expected)


@native_only
def test_stored_batches_are_put_up_to_the_first_that_needs_the_general_way() -> None:
    assert NATIVE is not None
    first, plain = stored([b"a", b"b"], 7), stored([b"c"], 9)
    flipped = bytearray(plain)
    flipped[-20] ^= 1
    others = [
        b"", plain[:-8], plain[:40], bytes(flipped), stored([b"c"], 10),
        stored([b"c"], 9, compression="lz4"), stored([b"c"], 9, header_crc32c=1),
        stored([b"c"], 9, attributes=1, producer_id=1 << 62), b"\xff\xff\xff\xff\0\0\0\0",
    ]  # fmt: skip
    for other in others:
        table = NATIVE.KeyOffsets(64, SECRET)
        assert put_stored(table, first + other, 7) == (len(first), 9), other
        assert len(table) == 2
    table = NATIVE.KeyOffsets(64, SECRET)
    assert put_stored(table, first + plain, 7, end=9) == (len(first), 9)
    assert put_stored(table, first + plain, 9, position=len(first)) == (len(first + plain), 10)
    assert put_stored(table, first, 7, schema_id=3) == (len(first), 9)
    assert put_stored(table, first, 7, schema_id=4) == (0, 7)
    assert put_stored(NATIVE.KeyOffsets(2, SECRET), first, 7) == (0, 7), "there is no room"
    with pytest.raises(ValueError, match="position"):
        put_stored(table, first, 7, position=-1)
    assert put_stored(table, first, 7, position=1 << 40) == (1 << 40, 7)
