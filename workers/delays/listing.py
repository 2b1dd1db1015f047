"""Pending rows of one partition as clients see them in a list.

Owner: the scheduler. Reads only.
Invariants: a page has `limit` rows at most; of each its due time and its key are copied and no more, and a key of more than KEY_SHOWN_MAX is not shown: rows
    are clients', and a page of the largest would be gigabytes.
"""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from workers.delays.log_batches import shown_due_us
from workers.delays.pending_store import PendingStore
from workers.delays.recurring_rows import RecurringRows

KEY_SCAN_ROWS = 10_000
KEY_SHOWN_MAX = 4_096
"""Bytes."""
_DUE, _KEY, _SIZE = 0, 1, 2


def listed_rows(
    store: PendingStore, recurring: RecurringRows, places: list[int], begin: tuple[int, int], end_tick: int, limit: int, key: bytes | None
) -> tuple[list[dict[str, Any]], tuple[int, int] | None]:
    """Up to `limit` pending rows with (tick, offset) >= `begin` and tick < `end_tick`, in that order, of one key; and the key of the last one that was looked
    at, when more may come behind it. `places`: of the due times' column and, where there is one, of the keys'. For a key, KEY_SCAN_ROWS are looked at in one
    call and no more. Raises OSError.
    """
    page, last = store.page(begin, end_tick, limit if key is None else KEY_SCAN_ROWS, places, _narrow)
    result: list[dict[str, Any]] = []
    for tick, offset, columns, row in page:
        found = columns.column(_KEY)[row].as_py() if len(places) > _KEY else None
        if key is not None and found != key:
            continue
        result.append(_described(tick, offset, columns, row, found, recurring))
        if len(result) == limit:
            return result, (tick, offset)
    return result, last


def _narrow(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Due times and keys as they are shown: a key that is too long is null, with its length beside."""
    if rows.num_columns <= _KEY:
        return rows
    keys = rows.column(_KEY)
    sizes = pc.binary_length(keys)
    if (pc.max(sizes).as_py() or 0) > KEY_SHOWN_MAX:
        keys = pc.if_else(pc.less_equal(sizes, KEY_SHOWN_MAX), keys, pa.scalar(None, keys.type))
    return pa.RecordBatch.from_arrays([rows.column(_DUE), keys, sizes], ["due", "key", "size"])


def _described(tick: int, offset: int, columns: pa.RecordBatch, row: int, key: bytes | None, recurring: RecurringRows) -> dict[str, Any]:
    due_us, repeat = recurring.upcoming(offset) or (columns.column(_DUE)[row].as_py(), None)
    described = {
        "tick": tick, "offset": offset, "due_us": shown_due_us(due_us), "key": None if key is None else base64.b64encode(key).decode(),
        "repeat": None if repeat is None else orjson.loads(repeat.to_json()),
    }  # fmt: skip
    if key is None and columns.num_columns > _SIZE and columns.column(_SIZE)[row].is_valid:
        described["key_bytes"] = columns.column(_SIZE)[row].as_py()
    return described
