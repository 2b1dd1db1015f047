"""KeyNumbers against a dictionary: the compiled kernel and its reference."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace import kernel
from tailrace.kernel import reference_keys
from tailrace.scanning.latest.key_column import TAGS_END, number_keys

NATIVE = kernel.load_compiled()
KINDS: list[Any] = [reference_keys.KeyNumbers, *([NATIVE.KeyNumbers] if NATIVE is not None else [])]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__module__))
KEY = st.none() | st.binary(max_size=40) | st.binary(min_size=1, max_size=1)
COLUMNS = st.lists(st.lists(KEY, max_size=60), max_size=6)
SECRET = b"0123456789abcdef"


def keys_of(numbers: Any) -> list[bytes]:
    ends, data = numbers.keys()
    edges = np.frombuffer(ends, np.int64).tolist()
    return [data[begin:end] for begin, end in itertools.pairwise(edges)]


@every_kind
@given(COLUMNS, st.integers(0, 5))
def test_equal_keys_have_one_number_in_order_of_appearance(
    kind: Any, columns: list[list[bytes | None]], cut: int
) -> None:
    numbers, model = kind(SECRET), dict[bytes, int]()
    for keys in columns:
        column = pa.array(keys, pa.binary()).slice(min(cut, len(keys)))
        expected = [
            -1 if key is None else model.setdefault(key, len(model)) for key in column.to_pylist()
        ]
        assert number_keys(numbers, column).tolist() == expected
    assert len(numbers) == len(model)
    assert keys_of(numbers) == list(model)
    assert [numbers.find(key) for key in model] == list(model.values())
    assert numbers.find(b"no key is as long as this one, which no column has") == -1


@every_kind
def test_many_keys_grow_the_table(kind: Any) -> None:
    numbers = kind()
    column = pa.array(np.arange(50_000) // 2, pa.int64())
    assert number_keys(numbers, column).tolist() == (np.arange(50_000) // 2).tolist()
    assert number_keys(numbers, column.slice(100, 7)).tolist() == [50, 50, 51, 51, 52, 52, 53]
    assert numbers.byte_count >= 25_000 * 8


@every_kind
@given(st.lists(st.binary(max_size=20), unique=True, min_size=1), st.data())
def test_kept_keys_are_numbered_anew(kind: Any, keys: list[bytes], data: st.DataObject) -> None:
    numbers = kind(SECRET)
    number_keys(numbers, pa.array(keys, pa.binary()))
    tags = np.frombuffer(numbers.tags(), np.uint32)
    kept = sorted(data.draw(st.sets(st.integers(0, len(keys) - 1))))
    numbers.retain(np.array(kept, np.int32))
    assert keys_of(numbers) == [keys[n] for n in kept]
    assert np.frombuffer(numbers.tags(), np.uint32).tolist() == tags[kept].tolist()
    assert number_keys(numbers, pa.array(keys, pa.binary())).max() == len(keys) - 1


@every_kind
def test_ranges_of_tags_divide_the_keys(kind: Any) -> None:
    keys = pa.array([b"k%d" % n for n in range(4_000)], pa.binary())
    edges = [0, 1 << 30, 3 << 30, TAGS_END]
    parts = [kind(SECRET) for _ in edges[1:]]
    found = [
        number_keys(part, keys, low, high) >= 0
        for part, low, high in zip(parts, edges, edges[1:], strict=False)
    ]
    assert np.sum(found, axis=0).tolist() == [1] * len(keys)
    assert [len(part) / len(keys) for part in parts] == pytest.approx([0.25, 0.5, 0.25], abs=0.05)


@pytest.mark.skipif(NATIVE is None, reason="the collision is one of the compiled kernel's hash")
@pytest.mark.parametrize("pair", [(99625, 239186), (14498, 81120), (131448, 246305)])
def test_two_keys_with_one_tag_have_two_numbers(pair: tuple[int, int]) -> None:
    """A planted collision, found among 250,000 keys for this secret."""
    numbers = KINDS[-1](SECRET)
    keys = [number.to_bytes(8, "little") for number in pair]
    assert number_keys(numbers, pa.array(keys * 2, pa.binary())).tolist() == [0, 1, 0, 1]
    first, second = np.frombuffer(numbers.tags(), np.uint32).tolist()
    assert first == second, "this kernel has another hash: look for another pair"
    assert [numbers.find(key) for key in keys] == [0, 1]
    numbers.retain(np.array([1], np.int32))
    assert [numbers.find(key) for key in keys] == [-1, 0]


@every_kind
def test_rows_outside_their_buffers_are_refused(kind: Any) -> None:
    numbers, out = kind(), np.empty(2, np.int32)
    ends = np.array([0, 1, 9], np.int32)
    for arguments in (
        (None, ends, b"ab", 0, 2, 0, out),
        (None, ends, b"ab", 1, 2, 0, out),
        (None, None, b"abcdefg", 0, 2, 4, out),
        (b"", ends, b"ab", 0, 1, 0, out),
        (None, np.array([0, 1, 2, 2], np.int32), b"ab", 0, 3, 0, out),
        (None, np.array([2, 1, 2], np.int32), b"ab", 0, 2, 0, out),
    ):
        with pytest.raises(ValueError, match=r"rows|data"):
            numbers.numbers(*arguments)
    with pytest.raises(ValueError, match="must ascend"):
        numbers.retain(np.array([3], np.int32))
    with pytest.raises(ValueError, match="16 bytes"):
        kind(b"short")
    with pytest.raises(TypeError):
        numbers.find("text")
