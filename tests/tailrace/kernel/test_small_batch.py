"""The encoder for a few records: byte for byte what pyarrow makes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.kernel import small_batch as few_rows
from tailrace.kernel.reference import FEW
from tailrace.kernel.reference_arrow import default_rows

CELL = st.none() | st.binary(max_size=20)
ROWS = st.lists(
    st.tuples(st.integers(-(2**63), 2**63 - 1), CELL, CELL), min_size=1, max_size=3 * FEW
)


@given(ROWS)
def test_the_bytes_are_those_of_pyarrow(rows: list[tuple[int, bytes | None, bytes | None]]) -> None:
    stamps, keys, values = (list(column) for column in zip(*rows, strict=True))
    assert (
        bytes(few_rows.encode(stamps, keys, values))
        == default_rows(stamps, keys, values, None).serialize().to_pybytes()
    )
