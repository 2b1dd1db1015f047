"""Records straight out of a fetched batch, in Python: there is no quick way, each batch is decoded by Arrow.

So the truth that the compiled `fetched_rows` is held against is `arrow_batch.decode` and `to_rows` (`tests/tailrace/formats/test_fetched_rows.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.kernel.reference_appends import BatchShape


def fetched_rows(
    batch: memoryview, seed: int, shape: BatchShape, record_type: type[Any], topic: str, partition: int, position: int
) -> tuple[Any, int, int] | None:
    """(RecordRows, the offset behind them, their leader epoch) of one whole batch of an untyped topic, from the row at `position` on (negative: from its
    first). `batch` stays as it is while the rows are used. None: it has none of that, or is not plainly good; decode it. `shape`: of the default schema.
    """
    return None
